"""One run of uneven workers over its steps: each worker's share, and the time to compute it.

Marks show where the division changed. With many workers, only the lowest, the median and the highest value of each step
are drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from podium.lab.report.balance import Balanced, balanced_by_cell
from podium.lab.report.figures.base import MOST_LAYERS, Trace, scaled
from podium.lab.study.results import number
from podium.lab.study.store import Row


@dataclass(frozen=True)
class Strip:
    """One quantity of a course."""

    quantity: str
    traces: tuple[Trace, ...]
    whole: Trace | None = None
    """The duration of the whole step."""


@dataclass(frozen=True)
class Course:
    """One run of uneven workers: their shares of each step, and how long they took."""

    cell: str
    seed: int
    strips: tuple[Strip, ...]
    marks: tuple[int, ...]
    """The first step after each change of the division."""

    @property
    def name(self) -> str:
        return f"shares and step times, {self.cell}, seed {self.seed}"


def balance_courses(rows: Sequence[Row]) -> dict[str, Course]:
    """By strategy with uneven workers: the course of its first run."""
    told = balanced_by_cell(rows)
    return {cell: _course(cell, found, found.course) for cell, found in told.items() if found.course}


def _course(cell: str, found: Balanced, course: Mapping[str, Any]) -> Course:
    x, workers = tuple(course["step"]), course["workers"]
    shares = {rank: [scaled(value, 100) for value in told["share"]] for rank, told in workers.items()}
    passes = {rank: [number(value) for value in told["pass_ms"]] for rank, told in workers.items()}
    whole = Trace("whole step", x, tuple(number(value) for value in course["step_ms"]))
    strips = (Strip("% of the samples", _traces(x, shares)), Strip("ms of computing", _traces(x, passes), whole))
    marks = tuple(int(change["step"]) + 1 for seed, change in found.changes if seed == found.seed)
    return Course(cell, found.seed, strips, marks)


def _traces(x: tuple[int, ...], by_rank: Mapping[str, Sequence[float | None]]) -> tuple[Trace, ...]:
    if len(by_rank) <= MOST_LAYERS:
        return tuple(Trace(f"worker {rank}", x, tuple(values)) for rank, values in by_rank.items())
    rows = [[value for value in at if value is not None] for at in zip(*by_rank.values(), strict=True)]
    kinds: dict[str, Callable[[list[float]], float]] = {"highest": max, "median": median, "lowest": min}
    return tuple(Trace(name, x, tuple(of(row) if row else None for row in rows)) for name, of in kinds.items())
