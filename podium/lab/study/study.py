"""A study as a person writes it: factors and their levels, how often, in what order, until when.

    study = podium.Study(
        name="links",
        settings={"task": "digits-mlp", "launcher": "virtual", "epochs": 3},
        factors={"strategy": ["all-reduce", "parameter-server"], "workers": [2, 4, 8]},
    )
    podium.run_study(study, out="runs/links")

A factor's level is a value of the setting of that name (`workers`, `task.lr`), or a name for several settings at once
(`{"slow": {"cluster": "slow.toml"}, "fast": {"cluster": "fast.toml"}}`). `Study.design` works out the cells.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from podium.errors import ConfigError, UnknownName
from podium.lab.stats.factorial import Factor, Level, Levels, fractional, full, latin_hypercube
from podium.lab.study.design import NO_STOP, ORDER_SEED, Cell, Design, Replications, Stop, check_runs, label
from podium.sweeps.search.space import Range

Kind = Literal["full", "fractional", "latin-hypercube"]
KINDS: tuple[Kind, ...] = ("full", "fractional", "latin-hypercube")

Settings = Mapping[str, Any]
FactorGiven = Sequence[Level] | Mapping[str, Settings] | Range
"""Levels; or names for settings; or a range of numbers."""

WORKERS = 2
"""What cells have that nobody gave a number: of one worker there is nothing to compare."""

OWN = ("strategy_options", "run_dir", "out", "seed", "resume", "replay")
"""What differs from run to run, or belongs to none: not for a study to set."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Settings of the cells with these levels, over all others; or those cells are left out."""

    levels: Mapping[str, Level | Sequence[Level]]
    settings: Settings = field(default_factory=dict)
    leave_out: bool = False
    name: str = ""
    """What the one cell with these levels is called, where they do not say it well."""

    def holds(self, at: Levels) -> bool:
        return all(
            at[name] in (some if isinstance(some, list | tuple) else (some,)) for name, some in self.levels.items()
        )


@dataclass(frozen=True, kw_only=True)
class Study:
    """What is to be compared, and how often."""

    name: str
    question: str = ""
    """What the study is to answer, in a sentence; the report begins with it."""
    settings: Settings = field(default_factory=dict)
    """Of all runs, in the words of `--set`: `task`, `workers`, `task.lr` …"""
    factors: Mapping[str, FactorGiven]
    where: Sequence[Where] = ()
    derive: Callable[[Levels], Settings] | None = None
    """Settings that follow from a cell's levels, for what a table cannot say; over all others."""
    kind: Kind = "full"
    generators: Sequence[str] = ()
    """Of a fractional design: `c = a*b`."""
    points: int | None = None
    """Of a Latin hypercube."""
    replications: int | Replications = 3
    """Seeds per cell; each is a block, in which all cells come once, in an order of their own."""
    order_seed: int = ORDER_SEED
    target: float | None = None
    maximize: bool | None = None
    """Whether the metric is better when higher; None goes by its name: losses and errors are better when lower."""
    stop: Stop = NO_STOP
    retries: int = 1
    """How often a failed run is tried again before its failure stands."""
    responses: Sequence[str] = ()
    """What the analysis of variance looks at, besides the metric and seconds."""
    baseline: Mapping[str, Level] = field(default_factory=dict)
    """Levels of the one cell that speed-ups are taken over; none are told without it."""
    notes: Sequence[str] = ()
    """Paragraphs for the reader of the report: why it is so, what to look at. They hold no results."""
    reference: Sequence[Mapping[str, Any]] = ()
    """Tables that a report shows beside its own: `title`, `source`, `columns`, `rows` and perhaps `note`."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """What was asked for over the file, so that a report can say how to run it again: `settings`, `seeds`, `target`."""
    file: Path | None = None
    """Where it was read from: cluster files are looked for beside it first."""
    size: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("kind of design", self.kind, KINDS)
        for name, kind in (("generators", "fractional"), ("points", "latin-hypercube")):
            if getattr(self, name) and self.kind != kind:
                raise ConfigError(f"study {self.name}: {name} are for a {kind} design, got kind {self.kind}")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ConfigError(f"study {self.name}: retries must be a whole number from 0 on, got {self.retries!r}")
        if self.maximize is not None and not isinstance(self.maximize, bool):
            raise ConfigError(f"study {self.name}: maximize must be true or false, got {self.maximize!r}")
        if isinstance(self.responses, str) or not all(isinstance(name, str) for name in self.responses):
            raise ConfigError(f"study {self.name}: responses must be a list of names, got {self.responses!r}")
        if not self.factors:
            raise ConfigError(f"study {self.name}: must have at least one factor, got none")
        for name in (*self.settings, *self.factors):
            if name.replace("-", "_") in OWN:
                raise ConfigError(
                    f"study {self.name}: {name} differs from run to run and cannot be set for all of them"
                )
        for name in (*self.baseline, *(name for rule in self.where for name in rule.levels)):
            if name not in self.factors:
                raise UnknownName("factor", name, self.factors)
        if self.stop.target and self.target is None:
            raise ConfigError(f"study {self.name}: stop at the target needs one: give [study] a target")
        for table in self.reference:
            if missing := {"title", "source", "columns", "rows"} - set(table):
                raise ConfigError(f"study {self.name}: a reference must have {', '.join(sorted(missing))}, got {table}")

    def changed(
        self,
        settings: Settings,
        *,
        seeds: int | None = None,
        target: float | None = None,
        maximize: bool | None = None,
    ) -> Study:
        """The same study with these settings over its own, so many seeds, this target, this way up.

        A factor cannot be set.
        """
        factors = {_key(name) for name in self.factors}
        levels = [level for given in self.factors.values() if isinstance(given, Mapping) for level in given.values()]
        taken = {_key(name) for some in (*levels, *(rule.settings for rule in self.where)) for name in some}
        for name in settings:
            if _key(name) in factors:
                raise ConfigError(f"study {self.name}: {name} is a factor, so it cannot be set for all runs")
            if _key(name) in taken:
                raise ConfigError(
                    f"study {self.name}: {name} is set by a level or a rule, so it cannot be set for all runs"
                )
        given: dict[str, Any] = {"settings": dict(settings), "seeds": seeds, "target": target, "maximize": maximize}
        return replace(
            self,
            settings={**self.settings, **settings},
            replications=self.replications if seeds is None else seeds,
            target=self.target if target is None else target,
            maximize=self.maximize if maximize is None else maximize,
            changes={name: value for name, value in given.items() if value not in (None, {})},
        )

    def design(self) -> Design:
        """The study with its cells worked out; every run's configuration is checked."""
        factors = {name: _levels(name, given) for name, given in self.factors.items()}
        combinations, facts = self._combinations(factors)
        where = [replace(rule, levels=self._known(rule.levels, factors, "where")) for rule in self.where]
        chosen = [at for at in combinations if not any(rule.leave_out and rule.holds(at) for rule in where)]
        if not chosen:
            raise ConfigError(f"study {self.name}: where leaves out every cell")
        names = _names(chosen)
        for rule in where:
            found = [place for place, at in enumerate(chosen) if rule.name and rule.holds(at)]
            if len(found) > 1:
                raise ConfigError(f"study {self.name}: where names {len(found)} cells {rule.name!r}, which must be one")
            for place in found:
                names[place] = rule.name
        cells = tuple(Cell(name, at, self._settings(at, where)) for name, at in zip(names, chosen, strict=True))
        given = self.replications
        listed = {
            name: tuple(dict.fromkeys(at[name] for at in chosen)) if isinstance(levels, Range) else tuple(levels)
            for name, levels in factors.items()
        }
        design = Design(
            name=self.name,
            question=self.question,
            cells=cells,
            factors=listed,
            replications=given if isinstance(given, Replications) else Replications(least=given, most=given),
            order_seed=self.order_seed,
            settings={"workers": WORKERS, **self.settings},
            target=self.target,
            maximize=self.maximize,
            stop=self.stop,
            retries=self.retries,
            responses=tuple(self.responses),
            kind=self.kind,
            changes=dict(self.changes),
            baseline=self._baseline(factors, chosen),
            notes=tuple(self.notes),
            reference=tuple(map(dict, self.reference)),
            file="" if self.file is None else os.path.relpath(self.file),
            size=self.size,
            **facts,
        )
        return check_runs(design)

    def _known(self, levels: Mapping[str, Any], factors: Mapping[str, Factor], what: str) -> dict[str, Any]:
        """Levels in the spelling that cells have them in; one that no cell can have is a slip, and is refused."""
        found: dict[str, Any] = {}
        for name, wanted in levels.items():
            factor = factors[name]
            some = [label(str(level)) if name == "strategy" else level for level in _some(wanted)]
            for level in some:
                # A size may have fewer levels than the rules of its file know.
                if not isinstance(factor, Range) and level not in factor and not self.size:
                    raise UnknownName(f"level of {name} in {what} of study {self.name}:", str(level), map(str, factor))
            found[name] = some
        return found

    def _baseline(self, factors: Mapping[str, Factor], chosen: Sequence[Levels]) -> dict[str, Level]:
        """The baseline's levels, once it is sure that one cell has them."""
        known = self._known(self.baseline, factors, "baseline")
        cells = [at for at in chosen if all(at[name] in some for name, some in known.items())]
        if self.baseline and len(cells) != 1:
            raise ConfigError(
                f"study {self.name}: baseline must be the levels of one cell, got those of {len(cells)}: "
                f"{dict(self.baseline)}"
            )
        return {name: some[0] for name, some in known.items()}

    def _combinations(self, factors: Mapping[str, Factor]) -> tuple[Sequence[Levels], dict[str, Any]]:
        if self.kind == "latin-hypercube":
            if self.points is None:
                raise ConfigError(f"study {self.name}: a Latin hypercube needs points, the number of its cells")
            return latin_hypercube(factors, self.points, self.order_seed), {}
        # `full` refuses a range, with the reason.
        listed: Any = factors
        if self.kind == "full":
            return full(listed), {}
        fraction = fractional(listed, self.generators)
        return fraction.combinations, {"aliases": fraction.aliases, "resolution": fraction.resolution}

    def _settings(self, at: Levels, where: Sequence[Where]) -> dict[str, Any]:
        """What a cell sets: its levels, then where they hold, then what follows from them."""
        settings: dict[str, Any] = {}
        for name, level in at.items():
            factor: Any = self.factors[name]
            settings.update(factor[str(level)] if isinstance(factor, Mapping) else {name: level})
        for rule in where:
            if rule.holds(at):
                settings.update(rule.settings)
        if self.derive is not None:
            settings.update(self.derive(dict(at)))
        for name in ("cluster", "task"):
            given = settings.get(name, self.settings.get(name))
            if isinstance(given, str) and name not in self.changes.get("settings", {}):
                settings |= {} if (placed := self._place(given)) == given else {name: placed}
        return settings

    def _place(self, name: str) -> str:
        """A cluster file, or a task's, beside the study's own, named from here: results hold nobody's folders."""
        path, colon, function = name.partition(".py:")
        path += ".py" * bool(colon)
        if self.file is None or os.path.isabs(path) or not (self.file.parent / path).is_file():
            return name
        return os.path.relpath(self.file.parent / path) + (f":{function}" if colon else "")


def _key(name: str) -> str:
    return name.replace("-", "_")


def _some(wanted: Level | Sequence[Level]) -> Sequence[Level]:
    return wanted if isinstance(wanted, list | tuple) else (wanted,)


def _levels(name: str, given: FactorGiven) -> Factor:
    if isinstance(given, Range):
        return given
    if isinstance(given, str) or not isinstance(given, Sequence | Mapping):
        raise ConfigError(f"factor {name!r} must be a list of levels, or a table of named ones, got {given!r}")
    if isinstance(given, Mapping):
        for level, settings in given.items():
            if not isinstance(settings, Mapping):
                raise ConfigError(f"factor {name!r}: level {level!r} must be a table of settings, got {settings!r}")
        return tuple(given)
    levels: Sequence[Any] = given
    for level in levels:
        if not isinstance(level, str | int | float | bool):
            raise ConfigError(f"factor {name!r}: a level must be a text or a number, got {level!r}")
        if isinstance(level, float) and not math.isfinite(level):
            raise ConfigError(f"factor {name!r}: a level must be finite, got {level}")
    return tuple(label(str(level)) for level in given) if name == "strategy" else tuple(given)


def _names(combinations: Sequence[Levels]) -> list[str]:
    """What each cell is called: texts as they are, numbers with their factor, unless that would be ambiguous."""

    def name_of(at: Levels, plain: bool) -> str:
        if len(at) == 1 and isinstance(next(iter(at.values())), str):
            return str(next(iter(at.values())))
        return ", ".join(str(v) if plain and isinstance(v, str) else f"{k}={v}" for k, v in at.items())

    names = [name_of(at, plain=True) for at in combinations]
    return names if len(set(names)) == len(names) else [name_of(at, plain=False) for at in combinations]
