"""The types of a comparison of two sets of results."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from podium.lab.stats.statistics import ALPHA, Mean
from podium.lab.study.results import (
    finished,
)
from podium.lab.study.store import Row
from podium.lab.study.study import Study

FEW = 6
"""With fewer pairs, `limits` warns that only large differences are detected."""
ROUNDING = 1e-9
"""Pairs with a smaller relative difference count as the same."""
PAGE = "versus.html"
NAMED = 3
"""A sentence names at most this many cells; of more it gives the number."""

Verdict = Literal["larger", "smaller", "no difference detected", "the same in every pair", "not tested"]


@dataclass(frozen=True, kw_only=True)
class Change:
    """One measure of one cell: the second set against the first."""

    cell: str
    measure: str
    ratio: bool
    """Whether `value` is second over first; otherwise it is second minus first."""
    first: Mean
    second: Mean
    n: int
    """Pairs with the same seed."""
    value: float
    low: float | None
    high: float | None
    """95 % interval of this cell alone."""
    p: float | None
    p_holm: float | None
    """Corrected over all cells of the measure."""
    test: Literal["paired", "Welch", "none"]
    p_unpaired: float | None = None
    """For times: of Welch's unpaired test, also Holm-corrected. The verdict does not use it."""
    points: tuple[float, ...] = ()
    """The value of each pair, in order of seeds."""

    @property
    def exact(self) -> bool:
        """Whether every pair has the same value, as with simulated time."""
        return self.n > 1 and (self.low == self.high or self.unchanged)

    @property
    def unchanged(self) -> bool:
        """Whether no pair differs by more than rounding, which may differ between versions of a library."""
        size = 1.0 if self.ratio else max(abs(self.first.mean), abs(self.second.mean))
        return self.n > 1 and all(abs(point - self.ratio) <= ROUNDING * size for point in self.points)

    @property
    def verdict(self) -> Verdict:
        if self.unchanged:
            return "the same in every pair"
        if self.p_holm is None:
            return "not tested"
        if self.p_holm >= ALPHA:
            return "no difference detected"
        return "larger" if self.value > (1 if self.ratio else 0) else "smaller"


@dataclass(frozen=True, kw_only=True)
class FromZero:
    """One measure of one cell that is 0 in some run, so there is no ratio: both values, and no test."""

    cell: str
    measure: str
    first: Mean
    second: Mean


@dataclass(frozen=True)
class Difference:
    """A recorded fact in which the two studies differ."""

    kind: Literal["settings", "versions", "hardware", "commit", "seeds"]
    what: str
    first: str
    second: str


@dataclass(frozen=True)
class Side:
    """One of the two sets."""

    name: str
    folder: str
    runs: int
    failed: int
    only: tuple[str, ...]
    """Cells of which the other set has no finished run."""


@dataclass(frozen=True, kw_only=True)
class Versus:
    """The comparison of two sets of results. `podium report A B --json` prints it."""

    a: Side
    b: Side
    metric: str
    target: float | None
    """The target of "seconds to target": the studies' own if both have the same, else chosen from the first set."""
    answer: str
    limits: str
    """What may not be concluded."""
    changes: tuple[Change, ...]
    differences: tuple[Difference, ...]
    same_parameters: tuple[int, int]
    """How many pairs ended with bitwise equal parameters, and for how many pairs that is known."""
    zeros: tuple[FromZero, ...] = ()
    """Measures that are 0 in some runs; those that are 0 in all runs of both sets are left out."""
    maximize: bool | None = None
    """Whether a higher metric is better; None decides by its name."""

    def of(self, measure: str) -> list[Change]:
        return [change for change in self.changes if change.measure == measure]

    @property
    def measures(self) -> list[str]:
        return list(dict.fromkeys(change.measure for change in self.changes))

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        for told, change in zip(found["changes"], self.changes, strict=True):
            told["verdict"] = change.verdict
        return found


class Set(NamedTuple):
    """The contents of a study's folder."""

    name: str
    folder: Path
    study: Study
    rows: list[Row]
    """In the order of the study's cells."""
    as_written: list[Row]
    """The same rows, in the order of the file."""

    @property
    def done(self) -> list[Row]:
        return finished(self.rows)
