"""Population based training: the worst trials copy the best, and change their options a little.

Jaderberg et al., 2017, https://arxiv.org/abs/1711.09846. Every `every` epochs a trial in the bottom quantile of the
population becomes one of the top quantile (parameters, buffers, optimizer), drawn at random, and multiplies each
explored option by one of two factors, or draws it anew.

When is a trial judged? Not when all have reached an epoch: that would make the fastest wait. Nor, as in the paper, by
the other trials' latest scores: trials that train side by side report one after the other, and the first would be
compared with scores that are one evaluation old, and so look better than it is. Here each trial is judged once per
milestone (a multiple of `every`), by the scores that all trials had at the milestone. It is judged at its first report
after every running trial that had reached the previous milestone has reached this one. No trial waits, the order within
an evaluation does not matter, and draws are fixed by (seed, trial, milestone).

The whole population must train side by side: a trial that waits for a row, or is over, cannot be copied from. A resumed
sweep does not know which trials the interrupted session had copied.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any, ClassVar, final

from podium.errors import ConfigError, UnknownName
from podium.sweeps.search.space import Choices, Range, Space
from podium.sweeps.stopping.base import SLACK, Ledger, Page, Stopping
from podium.sweeps.trial import GO, Evaluation, Trial, Verdict

_BELOW_ONE = ("dropout", "label_smoothing", "momentum")  # bounded by 0.99 where no space gives a bound
_NOT_IN_MID_TRAINING = ("batch_size", "epochs", "init_seed", "order_seed")


@dataclass
class _Memory:
    judged: dict[int, int] = field(default_factory=dict)  # the last milestone of each trial
    options: dict[int, dict[str, Any]] = field(default_factory=dict)  # of trials that became another


@final
@dataclass(frozen=True, kw_only=True)
class PBT(Stopping):
    """Population based training: the worst trials become copies of the best, with options changed a little."""

    name: ClassVar[str] = "pbt"
    copies: ClassVar[bool] = True
    every: float = 1.0
    """Epochs between milestones."""
    quantile: float = 0.25
    """Share of the population that is replaced, and that is copied; at least one trial."""
    explore: str = ""
    """Options that change, as `lr+weight_decay`; by default all whose values are floats."""
    down: float = 0.8
    up: float = 1.2
    """An explored number is multiplied by one of the two."""
    resample: float = 0.25
    """How often an option is drawn anew from the space instead, if there is a space."""
    seed: int = 0
    space: Any = None
    """The search space (`podium.sweeps.search.space.Space`), for bounds and new draws."""

    def __post_init__(self) -> None:
        def need(holds: bool, name: str, what: str) -> None:
            if not holds:
                raise ConfigError(f"stopping pbt: {name} must be {what}, got {getattr(self, name)!r}")

        need(self.every > 0, "every", "above 0 epochs")
        need(0 < self.quantile <= 0.5, "quantile", "above 0 and at most 0.5")
        need(0 < self.down < 1, "down", "between 0 and 1")
        need(self.up > 1, "up", "above 1")
        need(0 <= self.resample <= 1, "resample", "between 0 and 1")
        need(self.space is None or isinstance(self.space, Space), "space", "a Space")
        never = [name for name in self._names() if name in _NOT_IN_MID_TRAINING]
        need(not never, "explore", f"options that may change while a trial trains, not {', '.join(never)}")

    def check(self, *, epochs: int | None, eval_every: int, per_point: int) -> None:
        super().check(epochs=epochs, eval_every=eval_every, per_point=per_point)
        for name in self._names():
            if self.space is not None and name not in self.space:
                raise UnknownName("stopping pbt: explored option", name, self.space)

    @property
    def first_at(self) -> float:
        return self.every

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        memory: _Memory = ledger.memory.setdefault(self.name, _Memory())
        milestone = int((evaluation.epoch + SLACK) / self.every)
        done = memory.judged.get(trial.number, 0)
        while milestone > done and not self._is_complete(milestone, trial, ledger):
            milestone -= 1
        if milestone <= done:
            return GO
        memory.judged[trial.number] = milestone
        return self._judge_at(milestone, trial, ledger, memory)

    def _is_complete(self, milestone: int, trial: Trial, ledger: Ledger) -> bool:
        """Whether all running trials have reached this milestone; trials that began later are not waited for."""
        before, here = (milestone - 1) * self.every, milestone * self.every
        on_its_way = [p for p in _population(trial, ledger) if milestone == 1 or p.reached(before)]
        return all(page.reached(here) for page in on_its_way)

    def _judge_at(self, milestone: int, trial: Trial, ledger: Ledger, memory: _Memory) -> Verdict:
        at = milestone * self.every
        pages = [page for page in _population(trial, ledger) if page.reached(at)]
        scores = {page.trial.number: s for page in pages if (s := page.score_at(at)) is not None}
        ranked = sorted(pages, key=lambda page: (-scores[page.trial.number], page.trial.number))
        count = min(max(1, int(len(ranked) * self.quantile)), len(ranked) // 2)
        top, bottom = ranked[:count], ranked[len(ranked) - count :]
        if all(page.trial.number != trial.number for page in bottom):
            return GO
        rng = random.Random(f"{self.seed}/{trial.number}/{milestone}")
        source = top[rng.randrange(count)]
        if scores[source.trial.number] <= scores[trial.number]:
            return GO
        options = self._explored(source, memory, rng)
        memory.options[trial.number] = {**dict(trial.options), **memory.options.get(trial.number, {}), **options}
        why = f"place {1 + ranked.index(ledger[trial.number])} of {len(ranked)} at epoch {at:g}"
        return Verdict(action="become", source=source.trial.number, options=options, why=why)

    def _explored(self, source: Page, memory: _Memory, rng: random.Random) -> dict[str, Any]:
        """The source's current values of the explored options, changed."""
        present = {**source.trial.options, **memory.options.get(source.trial.number, {})}
        names = self._names() or [k for k, v in present.items() if isinstance(v, float)]
        return {name: self._changed(name, present[name], rng) for name in names if name in present}

    def _names(self) -> list[str]:
        return [name.strip().replace("-", "_") for name in self.explore.split("+") if name.strip()]

    def _changed(self, name: str, value: Any, rng: random.Random) -> Any:
        dimension = None if self.space is None else self.space.get(name)
        anew, up = rng.random() < self.resample, rng.random() < 0.5
        if dimension is not None and anew:
            return dimension.draw(rng)
        if isinstance(dimension, Choices) and value in dimension.values:
            place = dimension.values.index(value) + (1 if up else -1)
            return dimension.values[min(max(place, 0), len(dimension.values) - 1)]
        if isinstance(value, bool) or not isinstance(value, int | float):
            return value
        changed = value * (self.up if up else self.down)
        if isinstance(dimension, Range):
            return dimension.clip(changed)
        changed = min(changed, 0.99) if name in _BELOW_ONE and value < 1 else changed
        return round(changed) if isinstance(value, int) else changed


def _population(trial: Trial, ledger: Ledger) -> list[Page]:
    """The running trials of the same fold."""
    return [page for page in ledger.running.values() if page.trial.fold == trial.fold]
