"""A study: one specification, both for the file that a person writes and for the `study.json` beside its results.

    study = podium.Study(
        name="links",
        settings={"task": "digits-mlp", "launcher": "virtual", "epochs": 3},
        factors={"strategy": ["all-reduce", "parameter-server"], "workers": [2, 4, 8]},
    )
    podium.run_study(study, out="runs/links")

A factor's level is a value of the setting of that name (`workers`, `task.lr`), or a name for several settings at once
(`{"slow": {"cluster": "slow.toml"}, "fast": {"cluster": "fast.toml"}}`).

`resolved` adds what follows from the specification (`Plan`): cells with their settings. `study.json` stores the result
and `from_dict` reads it back. Each block of runs has every cell once, with one seed, in an order drawn from a fixed
seed: a machine that gets slower over time then slows all cells, not only the last one.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from podium.config import RunConfig
from podium.errors import ConfigError, RecordError, UnknownName
from podium.lab.stats.factorial import Level, Levels
from podium.lab.study.cells import planned
from podium.lab.study.configs import checked, config_of, nodes_of
from podium.lab.study.parts import (
    NO_STOP,
    ORDER_SEED,
    Against,
    Cell,
    FromRecords,
    Machine,
    Plan,
    Replications,
    Settings,
    Stop,
    Where,
    label,
)
from podium.lab.study.store import Key, Store
from podium.lab.study.study_json import fields_of, to_table
from podium.sweeps.search.space import Range

Kind = Literal["full", "fractional", "latin-hypercube"]
RUNS = ("trainings", "sweeps", "own")
KINDS: tuple[Kind, ...] = ("full", "fractional", "latin-hypercube")

FactorGiven = Sequence[Level] | Mapping[str, Settings] | Range
"""Levels; or names for settings; or a range of numbers."""

Measure = Callable[[Mapping[str, Any], int], Mapping[str, Any]]
Runs = Literal["trainings", "sweeps", "own"] | Measure
"""In `study.json`, `own` stands for a function."""

WORKERS = 2
"""The default number of workers: with one worker there is nothing to compare."""

OWN = ("strategy_options", "run_dir", "out", "seed", "resume", "replay")
"""Settings that a study cannot set, because they differ from run to run or make no sense in one."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """What to compare, and how often."""

    name: str
    question: str = ""
    """The question that the study answers, in a sentence, for the report."""
    settings: Settings = field(default_factory=dict)
    """Of all runs, named as for `--set`: `task`, `workers`, `task.lr` …"""
    factors: Mapping[str, FactorGiven]
    where: Sequence[Where] = ()
    derive: Callable[[Levels], Settings] | None = None
    """Computes settings from a cell's levels, where tables are not enough; they override all others."""
    keep: Callable[[Levels], bool] | None = None
    """Whether a combination of levels is a cell, where `where` is not enough; by default all are."""
    runs: Runs = "trainings"
    """What a run is: a training, a whole sweep (settings are then arguments of `podium.sweep`), or a function that
    gets a run's settings and its seed and returns fields of its row: `{"metrics": {"us": 3.5}, "seconds": 1.2}`."""
    measure: FromRecords | None = None
    """Computes further fields for the rows of finished runs."""
    kind: Kind = "full"
    generators: Sequence[str] = ()
    """Of a fractional design: `c = a*b`."""
    points: int | None = None
    """Of a Latin hypercube."""
    replications: int | Replications = 3
    """Seeds per cell; each seed is a block with every cell once, in a random order."""
    order_seed: int = ORDER_SEED
    target: float | None = None
    maximize: bool | None = None
    """Whether a higher metric is better; None decides by its name: of losses and errors, lower is better."""
    stop: Stop = NO_STOP
    retries: int = 1
    """How often a failed run is retried."""
    responses: Sequence[str] = ()
    """Further responses for the analysis of variance, besides the metric and seconds."""
    baseline: Mapping[str, Level] = field(default_factory=dict)
    """Levels of the one cell that is the baseline of speed-ups; without it the report shows none."""
    against: Sequence[Against] = ()
    """Tables of cells beside a reference, paired by seed."""
    notes: Sequence[str] = ()
    """Paragraphs for the reader of the report: reasons and hints, no results."""
    reference: Sequence[Mapping[str, Any]] = ()
    """Others' tables for the report: `title`, `source`, `columns`, `rows` and optionally `note`."""
    changes: Mapping[str, Any] = field(default_factory=dict)
    """The caller's overrides of the file, so that a report can show how to reproduce it."""
    file: str | Path = ""
    """The file that the study was read from; cluster files are first searched beside it."""
    size: str = ""
    own_task: bool = False
    """Whether the caller passed a Task object, which its name alone cannot restore."""
    plan: Plan = field(default_factory=Plan)
    """Computed by `resolved`."""
    machine: Machine = field(default_factory=Machine)
    """The machine on which the study began."""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("kind of design", self.kind, KINDS)
        for name, kind in (("generators", "fractional"), ("points", "latin-hypercube")):
            if getattr(self, name) and self.kind != kind:
                raise ConfigError(f"study {self.name}: {name} are for a {kind} design, got kind {self.kind}")
        if isinstance(self.retries, bool) or not isinstance(self.retries, int) or self.retries < 0:
            raise ConfigError(f"study {self.name}: retries must be a whole number of at least 0, got {self.retries!r}")
        if not callable(self.runs) and self.runs not in RUNS:
            raise UnknownName("kind of runs", self.runs, RUNS[:2])
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
        for name in (*self.baseline, *self._named()):
            if name not in self.factors:
                raise UnknownName("factor", name, self.factors)
        if self.stop.target and self.target is None:
            raise ConfigError(f"study {self.name}: [stop] target needs a target in [study], got none")
        for table in self.reference:
            if missing := {"title", "source", "columns", "rows"} - set(table):
                raise ConfigError(f"study {self.name}: a reference must have {', '.join(sorted(missing))}, got {table}")

    def _named(self) -> list[str]:
        """All factors that `where` and `against` name."""
        found = [name for rule in self.where for name in rule.levels]
        return found + [name for table in self.against for name in (*table.levels, *table.only)]

    def changed(
        self,
        settings: Settings,
        *,
        seeds: int | None = None,
        target: float | None = None,
        maximize: bool | None = None,
    ) -> Study:
        """The study with these settings, number of seeds, target and direction in place of its own.

        Raises `ConfigError` for a setting that is a factor, or that a level or rule sets.
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

    def resolved(self) -> Study:
        """The study with its cells, once the configuration of every run has been checked."""
        return checked(
            replace(
                planned(self),
                settings=self._shared(),
                replications=self.repeated,
                responses=tuple(self.responses),
                notes=tuple(self.notes),
                reference=tuple(map(dict, self.reference)),
                file=os.path.relpath(self.file) if self.file else "",
            )
        )

    def _shared(self) -> Settings:
        given = self.runs != "trainings" or "workers" in self.settings
        return self.settings if given else {"workers": WORKERS, **self.settings}

    # Of a study with its cells.

    @property
    def repeated(self) -> Replications:
        given = self.replications
        return given if isinstance(given, Replications) else Replications(least=given, most=given)

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds that may be run."""
        return self.repeated.seeds

    @property
    def cells(self) -> tuple[Cell, ...]:
        return self.plan.cells

    @property
    def levels(self) -> dict[str, tuple[Level, ...]]:
        """The levels of each factor."""
        return {name: () if isinstance(given, Range) else tuple(given) for name, given in self.factors.items()}

    @property
    def names(self) -> list[str]:
        return [cell.cell for cell in self.cells]

    def at(self, name: str) -> Cell:
        return next(cell for cell in self.cells if cell.cell == name)

    def blocks(self) -> list[list[Key]]:
        """All runs that may be made, in blocks of one seed each."""
        draw = random.Random(self.order_seed)
        blocks = []
        for number, seed in enumerate(self.seeds):
            names = [name for name in self.names if number < self.plan.fewer.get(name, len(self.seeds))]
            draw.shuffle(names)
            blocks.append([(name, seed) for name in names])
        return blocks

    def order(self) -> list[Key]:
        """All runs that may be made, in order."""
        return [key for block in self.blocks() for key in block]

    def config(self, name: str, seed: int) -> RunConfig:
        """The configuration of one run."""
        return config_of(self, name, seed)

    def nodes(self, config: RunConfig) -> int:
        """The number of machines of a run: its workers, and servers that are not colocated with workers."""
        return nodes_of(config)

    # On disk.

    def to_dict(self) -> dict[str, Any]:
        """The study as `study.json` stores it, in one flat table."""
        return to_table(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Study:
        """The inverse of `to_dict`; also reads older versions, whose only factor is the strategy."""
        return cls(**fields_of(cls, values))

    @classmethod
    def read(cls, store: Store, maximize: bool | None = None) -> Study:
        """The study of a folder; raises `RecordError` with the file's name if it holds none.

        `maximize`: whether a higher metric is better; it overrides the study.
        """
        values = store.read_study()
        try:
            study = cls.from_dict(values)
            return study if maximize is None else replace(study, maximize=maximize)
        except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
            raise RecordError(f"{store.study}: holds no study: {type(error).__name__}: {error}") from error


def strategies_study(
    task: str, strategies: Sequence[str], seeds: int | Sequence[int], settings: Mapping[str, Any], **more: Any
) -> Study:
    """A resolved comparison of strategies: every run's configuration is checked before the first starts."""
    if isinstance(strategies, str):
        raise ConfigError(f"compare: strategies must be a list of texts, got the text {strategies!r}")
    for name in ("strategy", *OWN):
        if name in settings:
            raise ConfigError(f"compare: {name} differs from run to run and cannot be set for all of them")
    labels = tuple(label(text) for text in strategies)
    chosen = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
    for what, values in (("strategies", labels), ("seeds", chosen)):
        if not values:
            raise ConfigError(f"compare: {what} must name at least one, got none")
        if len(set(values)) != len(values):
            raise ConfigError(f"compare: {what} must differ from each other, got {', '.join(map(str, values))}")
    repeated = Replications(least=len(chosen), most=len(chosen), listed=() if isinstance(seeds, int) else chosen)
    settings = {"task": task, **settings}
    return Study(name=task, factors={"strategy": labels}, replications=repeated, settings=settings, **more).resolved()


def _key(name: str) -> str:
    return name.replace("-", "_")
