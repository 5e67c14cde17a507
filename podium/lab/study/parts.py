"""What a study's specification is made of: rules for some cells, replications, a stopping rule, cells, the machine."""

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
"""From the row of a finished run and its records to what the row gets besides."""

ORDER_SEED = 20_240_501
"""Fixes the order of runs; any number would do, as long as it stays the same."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """Settings of the cells with these levels, over all others; or those cells are left out."""

    levels: Mapping[str, Level | Sequence[Level]]
    settings: Settings = field(default_factory=dict)
    leave_out: bool = False
    seeds: int | None = None
    """How many of the study's seeds they are run with; None is all of them."""
    name: str = ""
    """What the one cell with these levels is called, where they do not say it well."""

    def holds(self, at: Levels) -> bool:
        return all(at[name] in as_list(wanted) for name, wanted in self.levels.items())


@dataclass(frozen=True, kw_only=True)
class Against:
    """A table of the report: cells beside those with these levels, seed by seed, all other levels being equal."""

    levels: Mapping[str, Level]
    """Of the reference: `{"codec": "dense"}`."""
    only: Mapping[str, Level | Sequence[Level]] = field(default_factory=dict)
    """Levels of the cells that are compared; all of them where it is empty."""
    responses: Sequence[str] = ()
    """What is compared; the metric, seconds and the study's responses where it is empty."""
    margin: float | None = None
    """How much worse than the reference the metric may be to be called within it."""
    title: str = ""

    def chooses(self, at: Mapping[str, Any]) -> bool:
        """Whether a cell with these levels is one of those that are compared."""
        return all(at[name] in as_list(wanted) for name, wanted in self.only.items())


def as_list(wanted: Level | Sequence[Level]) -> Sequence[Level]:
    """One level, or several, as several."""
    return wanted if isinstance(wanted, list | tuple) else (wanted,)


@dataclass(frozen=True)
class Cell:
    """One combination of levels, and its settings (over the study's own)."""

    cell: str
    """Its name, by which its rows are found."""
    levels: Mapping[str, Level]
    settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Replications:
    """How often each cell is run: `least` seeds, then more until its mean is known well enough, `most` at most.

    Precision, not significance, decides: a rule that stops at the first small p finds differences that are not there.
    """

    least: int = 3
    most: int = 3
    half_width: float | None = None
    """Add seeds until every cell's 95 % interval of `response` reaches no further than this share of its mean."""
    response: str = "seconds"
    listed: tuple[int, ...] = ()
    """The seeds themselves, where they are not 0, 1, 2 …"""

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
        """All seeds that may come."""
        return self.listed or tuple(range(self.most))


@dataclass(frozen=True, kw_only=True)
class Stop:
    """Ends a run before its last epoch: at the first validation with one of these reached."""

    seconds: float | None = None
    """Of training, on the run's own clock."""
    target: bool = False
    """Whether the study's target ends a run."""

    def __post_init__(self) -> None:
        if self.seconds is not None and not self.seconds > 0:
            raise ConfigError(f"stop: seconds must be above 0, got {self.seconds}")


NO_STOP = Stop()
"""Runs go to the end of their epochs or steps."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What follows from a specification: its cells, and what all their runs have in common."""

    cells: tuple[Cell, ...] = ()
    fewer: Mapping[str, int] = field(default_factory=dict)
    """Cells that are not run with all seeds, and with how many."""
    aliases: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Of a fraction: effects that cannot be told apart."""
    resolution: int | None = None
    task: str | None = None
    """None where runs differ in it, as below."""
    workers: int | None = None
    launcher: str | None = None
    same_batch: bool = False
    clusters: Mapping[str, str | None] = field(default_factory=dict)
    """By cell: a checksum of what its cluster file says."""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Where a study was begun, for the reader who wants to repeat it."""

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
    """A strategy's text in one spelling, so that the same one is recognised again."""
    name, options = parse_strategy(strategy)
    if not name:
        raise ConfigError(f"compare: a strategy needs a name, got {strategy!r}")
    return f"{name}:{','.join(f'{k}={v}' for k, v in options.items())}" if options else name


def as_text(value: Any) -> str:
    """A value as `--set` takes it."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return ",".join(map(as_text, value))
    return "none" if value is None else str(value)
