"""The parts of a study's specification: rules for some cells, replications, a stopping rule, cells, the machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import podium
from podium.config import parse_strategy
from podium.errors import ConfigError
from podium.lab.stats.factorial import Level, Levels
from podium.records.manifest import git_commit, hardware, versions

Settings = Mapping[str, Any]
FromRecords = Callable[[Mapping[str, Any], Sequence[Mapping[str, Any]]], Mapping[str, Any]]
"""(row of a finished run, its records) to further fields of the row."""

ORDER_SEED = 20_240_501
"""The default seed for the order of runs; any constant will do."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Settings for the cells with these levels, which override all others; or leaves those cells out."""

    levels: Mapping[str, Level | Sequence[Level]]
    settings: Settings = field(default_factory=dict)
    leave_out: bool = False
    seeds: int | None = None
    """How many of the study's seeds these cells run with; None is all of them."""
    name: str = ""
    """A name for the one cell with these levels, instead of one made from its levels."""

    def holds(self, at: Levels) -> bool:
        return all(at[name] in as_list(wanted) for name, wanted in self.levels.items())


@dataclass(frozen=True, kw_only=True)
class Against:
    """A table of the report: cells compared seed by seed with the reference cells that differ only in these levels."""

    levels: Mapping[str, Level]
    """Of the reference: `{"codec": "dense"}`."""
    only: Mapping[str, Level | Sequence[Level]] = field(default_factory=dict)
    """Levels of the compared cells; empty means all cells."""
    responses: Sequence[str] = ()
    """What is compared; empty means the metric, seconds and the study's responses."""
    margin: float | None = None
    """How much worse than the reference the metric may be to count as `within`."""
    title: str = ""

    def chooses(self, at: Mapping[str, Any]) -> bool:
        """Whether a cell with these levels is compared."""
        return all(at[name] in as_list(wanted) for name, wanted in self.only.items())


def as_list(wanted: Level | Sequence[Level]) -> Sequence[Level]:
    """One level becomes a sequence of one."""
    return wanted if isinstance(wanted, list | tuple) else (wanted,)


@dataclass(frozen=True)
class Cell:
    """One combination of levels, and its settings, which override the study's."""

    cell: str
    """Its name, which its rows carry."""
    levels: Mapping[str, Level]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replications:
    """How often each cell is run: `least` seeds, then more until its mean is precise enough, `most` at most.

    Precision, not significance, decides: a rule that stops at the first small p finds differences that do not exist.
    """

    least: int = 3
    most: int = 3
    half_width: float | None = None
    """Add seeds until half of every cell's 95 % interval of `response` is at most this share of its mean."""
    response: str = "seconds"
    listed: tuple[int, ...] = ()
    """The seeds, if they are not 0, 1, 2 …"""

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.most:
            raise ConfigError(f"replications: 1 ≤ least ≤ most must hold, got {self.least} and {self.most}")
        if self.half_width is not None and not self.half_width > 0:
            raise ConfigError(f"replications: half_width must be above 0, got {self.half_width}")
        if self.half_width is None and self.least != self.most:
            raise ConfigError(
                f"replications: from {self.least} to {self.most} needs half_width, the precision to reach"
            )
        if self.listed and len(set(self.listed)) != self.most:
            raise ConfigError(f"replications: {self.most} seeds must differ, got {', '.join(map(str, self.listed))}")

    @property
    def seeds(self) -> tuple[int, ...]:
        """All seeds that may be run."""
        return self.listed or tuple(range(self.most))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Ends a run early, at the first validation that has reached one of these."""

    seconds: float | None = None
    """Of training, on the run's clock."""
    target: bool = False
    """Whether the study's target ends a run."""

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"stop: seconds must be above 0, got {self.seconds}")


NO_STOP = Stop()
"""Runs train all their epochs or steps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What follows from a specification: its cells, and the settings that all runs have in common."""

    cells: tuple[Cell, ...] = ()
    fewer: Mapping[str, int] = field(default_factory=dict)
    """Cells that are not run with all seeds, and their number of seeds."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of a fraction: effects that cannot be told apart."""
    resolution: int | None = None
    task: str | None = None
    """None if runs differ in it; so are `workers` and `launcher`."""
    workers: int | None = None
    launcher: str | None = None
    same_batch: bool = False
    clusters: Mapping[str, str | None] = field(default_factory=dict)
    """By cell: a checksum of its cluster file."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The machine and versions with which a study began, for repeating it."""

    versions: Mapping[str, str] = field(default_factory=lambda: {"podium": "?"})
    hardware: Mapping[str, Any] = field(default_factory=dict)
    commit: str | None = None


def this_machine() -> Machine:
    found = hardware()
    found["memory_gb"] = round(found.pop("memory_bytes") / 1e9, 1)
    used = {"podium": podium.__version__, **versions()}
    for package in ("scipy", "statsmodels"):
        used[package] = metadata.version(package)
    return Machine(versions=used, hardware=found, commit=git_commit(Path(podium.__file__).parent))


def label(strategy: str) -> str:
    """A strategy's text in canonical spelling, so that equal strategies are recognised."""
    name, options = parse_strategy(strategy)
    if not name:
        raise ConfigError(f"compare: a strategy needs a name, got {strategy!r}")
    return f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name


def as_text(value: Any) -> str:
    """A value in the syntax of `--set`."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return "none" if value is None else str(value)
