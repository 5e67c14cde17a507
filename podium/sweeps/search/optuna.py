"""Points that Optuna suggests from the scores of earlier points.

One Optuna trial per point. A finished point reports its score, a stopped one is pruned (its last score counts as an
intermediate value), a failed or diverged one has failed. A resumed sweep gives Optuna the earlier points first, with
their scores; its suggestions may then differ from those in an uninterrupted sweep.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from podium.errors import ConfigError, MissingExtra, UnknownName
from podium.sweeps.search.base import Source
from podium.sweeps.search.space import Choices, Dimension, Space
from podium.sweeps.trial import Outcome, Trial


@final
@dataclass(kw_only=True, eq=False)
class OptunaSearch(Source):
    """Points suggested by one of Optuna's samplers from the scores so far."""

    space: Space
    points: int
    """How many."""
    sampler: Any = "tpe"
    """`tpe`, `gp`, `cmaes`, `qmc`, `random` … (a class of `optuna.samplers`), or an instance."""
    maximize: bool = False
    """Whether larger scores are better; must match `study`, when that is given."""
    seed: int = 0
    parallel: int = 16
    """How many points may be open at once: the fewer, the more scores each suggestion is based on."""
    study: Any = None
    """An `optuna.Study` to continue; None makes one in memory."""

    def __post_init__(self) -> None:
        optuna = import_optuna("the search with Optuna")
        for name in ("points", "parallel"):
            if getattr(self, name) < 1:
                raise ConfigError(f"search optuna: {name} must be at least 1, got {getattr(self, name)}")
        direction = "maximize" if self.maximize else "minimize"
        if self.study is None:
            # `constant_liar`: open points count as bad ones, or many suggestions at once would be nearly the same.
            settings = {"seed": self.seed % 2**32, "constant_liar": True}
            sampler = make_part(self.sampler, optuna.samplers, "Sampler", settings)
            self._study = optuna.create_study(sampler=sampler, direction=direction)
        elif not isinstance(self.study, optuna.Study):
            raise ConfigError(f"search optuna: study must be an optuna.Study, got {self.study!r}")
        else:
            self._study = self.study
            came = [d.name.lower() for d in self.study.directions]
            if came != [direction]:
                raise ConfigError(f"search optuna: the study must {direction}, got one to {' and '.join(came)}")
        self._labels = {name: _labels(d) for name, d in self.space.items()}
        self._distributions = {name: _distribution(optuna, d, self._labels[name]) for name, d in self.space.items()}
        self._state = optuna.trial.TrialState
        self._open: dict[int, Any] = {}  # by point
        self._recalled: deque[Mapping[str, Any]] = deque()
        self._asked = 0

    @property
    def total(self) -> int:
        return self.points

    @property
    def exhausted(self) -> bool:
        return self._asked == self.points

    def ask(self) -> Trial | None:
        if self.exhausted or len(self._open) >= self.parallel:
            return None
        if self._recalled:
            params = {name: self._label_of(name, value) for name, value in self._recalled.popleft().items()}
            self._study.enqueue_trial(params)
        trial = self._study.ask(self._distributions)
        number, self._asked = self._asked, self._asked + 1
        self._open[number] = trial
        options = {name: self._labels[name].get(value, value) for name, value in trial.params.items()}
        return Trial(number=number, point=number, options={name: options[name] for name in self.space})

    def tell(self, outcome: Outcome, score: float | None) -> None:
        trial = self._open.pop(outcome.trial.point)
        known = score is not None and math.isfinite(score)
        if outcome.status == "stopped":
            if known:
                trial.report(score, step=outcome.steps)
            self._study.tell(trial, state=self._state.PRUNED)
        elif outcome.status == "finished" and known:
            self._study.tell(trial, score)
        else:
            self._study.tell(trial, state=self._state.FAIL)

    def recall(self, points: Sequence[Mapping[str, Any]]) -> None:
        self._recalled.extend(points)

    def _label_of(self, name: str, value: Any) -> Any:
        if name not in self._labels:
            raise ConfigError(
                f"search optuna: the earlier sweep must have had the same space, got {name} besides "
                f"{', '.join(self.space)}"
            )
        return next((label for label, meant in self._labels[name].items() if _same(meant, value)), value)


def import_optuna(purpose: str) -> Any:
    """The package, with its log line for each trial turned off."""
    try:
        optuna = importlib.import_module("optuna")
    except ImportError:
        raise MissingExtra("optuna", "sweep", purpose) from None
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def make_part(given: Any, module: Any, kind: str, settings: Mapping[str, Any]) -> Any:
    """One of Optuna's own by its name without `kind` (`tpe`, `TPESampler`), or the instance that was given.

    `settings` that its constructor does not take are left out.
    """
    if not isinstance(given, str):
        if not isinstance(given, getattr(module, f"Base{kind}")):
            raise ConfigError(f"optuna: must be a {kind.lower()} or the name of one, got {type(given).__name__}")
        return given
    classes: dict[str, Callable[..., Any]] = {
        name.removesuffix(kind).lower(): getattr(module, name)
        for name in module.__all__
        if name.endswith(kind) and not name.startswith("Base")
    }
    key = given.lower().removesuffix(kind.lower()).replace("-", "").replace("_", "")
    if key not in classes:
        raise UnknownName(f"{kind.lower()} of optuna", given, classes)
    accepted = inspect.signature(classes[key]).parameters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # no warning that a class is experimental: the user named it
            return classes[key](**{name: value for name, value in settings.items() if name in accepted})
    except (TypeError, ValueError) as error:
        raise ConfigError(f"optuna: {given} must be made in Python and given as an instance: {error}") from None


def _labels(dimension: Dimension) -> dict[Any, Any]:
    """Text labels for values that Optuna cannot store; empty where it can store all of them."""
    if not isinstance(dimension, Choices) or all(isinstance(v, str | int | float | None) for v in dimension.values):
        return {}
    return {json.dumps(value): value for value in dimension.values}


def _distribution(optuna: Any, dimension: Dimension, labels: Mapping[Any, Any]) -> Any:
    made = optuna.distributions
    if isinstance(dimension, Choices):
        return made.CategoricalDistribution(list(labels) or list(dimension.values))
    if dimension.whole:
        return made.IntDistribution(round(dimension.low), round(dimension.high), log=dimension.log)
    return made.FloatDistribution(dimension.low, dimension.high, log=dimension.log)


def _same(a: Any, b: Any) -> bool:
    return json.dumps(a) == json.dumps(b)
