"""Interactions: means of a response against the levels of one factor, one line per level of another.

Parallel lines mean that the factors act independently of each other; lines that cross or fan out mean that they do not.
A point is the mean over seeds with its 95 % interval; a seed's value is the mean over all cells with the point's two
levels, which averages out the other factors. A seed that lacks one of these cells does not count at that point.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean
from typing import Any

from podium.lab.stats.statistics import mean_interval
from podium.lab.study.results import finished, number
from podium.lab.study.store import Row

MOST = 3
"""The most figures per response; with many factors, those of the first factor."""
RATIOS = ("seconds", "time", "samples_per_s", "bytes", "mb", "joules", "setup_s", "step_ms", "throughput")
"""Words in the names of responses that are compared by their ratio, and drawn on a logarithmic axis."""

Level = str | float


@dataclass(frozen=True)
class Spot:
    """The response at one pair of levels."""

    x: Level
    mean: float
    low: float | None
    high: float | None
    seeds: int


@dataclass(frozen=True)
class Thread:
    """One line: all spots with one level of the factor `by`."""

    level: Level
    spots: tuple[Spot, ...]


@dataclass(frozen=True)
class Interaction:
    """A response against one factor, by another."""

    response: str
    factor: str
    """On the x axis."""
    by: str
    """A line for each of its levels."""
    levels: tuple[Level, ...]
    """Of `factor`, in the study's order; numbers are sorted."""
    threads: tuple[Thread, ...]
    numeric: bool
    log: bool

    @property
    def name(self) -> str:
        return f"{self.response} against {self.factor}, by {self.by}"


def interactions(
    rows: Sequence[Row], response: str, value: Callable[[Row], float | None], *, ratio: bool | None = None
) -> list[Interaction]:
    """A figure for each pair of factors, at most `MOST`; empty if rows have fewer than two factors.

    `ratio`: whether a positive response is drawn on a logarithmic axis; None decides by its name.
    """
    done = [row for row in finished(rows) if row.get("levels") and value(row) is not None]
    levels = _levels(done)
    factors = [name for name, some in levels.items() if len(some) > 1]
    if ratio is None:
        ratio = any(word in response.lower().replace(" ", "_") for word in RATIOS)
    found = [_interaction(done, response, value, levels, pair, ratio) for pair in combinations(factors, 2)]
    return [figure for figure in found if figure.threads][:MOST]


def _levels(rows: Sequence[Row]) -> dict[str, list[Level]]:
    """Every factor's levels in order of first appearance; numbers are sorted."""
    found: dict[str, list[Level]] = {}
    for row in rows:
        for factor, level in row["levels"].items():
            known = found.setdefault(str(factor), [])
            if level not in known:
                known.append(level)
    return {factor: sorted(some, key=_size) if _is_numeric(some) else some for factor, some in found.items()}


def _size(level: Level) -> float:
    return float(level)


def _is_numeric(levels: Sequence[Any]) -> bool:
    return all(isinstance(level, int | float) and number(level) is not None for level in levels)


def _interaction(
    rows: Sequence[Row],
    response: str,
    value: Callable[[Row], float | None],
    levels: Mapping[str, Sequence[Level]],
    pair: tuple[str, str],
    ratio: bool,
) -> Interaction:
    by, factor = pair
    if _is_numeric(levels[by]) and not _is_numeric(levels[factor]):
        by, factor = factor, by
    threads = []
    for level in levels[by]:
        here = [row for row in rows if row["levels"].get(by) == level]
        spots = [_spot(x, [row for row in here if row["levels"].get(factor) == x], value) for x in levels[factor]]
        known = tuple(spot for spot in spots if spot is not None)
        if known:
            threads.append(Thread(level, known))
    lowest = [spot.mean if spot.low is None else spot.low for thread in threads for spot in thread.spots]
    log = ratio and bool(lowest) and min(lowest) > 0
    return Interaction(
        response, factor, by, tuple(levels[factor]), tuple(threads), _is_numeric(levels[factor]), bool(log)
    )


def _spot(x: Level, rows: Sequence[Row], value: Callable[[Row], float | None]) -> Spot | None:
    by_seed: dict[int, dict[str, float]] = {}
    for row in rows:
        known = value(row)
        if known is not None:
            by_seed.setdefault(int(row["seed"]), {})[str(row["cell"])] = known
    wanted = {cell for some in by_seed.values() for cell in some}
    mean = mean_interval([fmean(some.values()) for some in by_seed.values() if set(some) == wanted])
    return None if mean is None else Spot(x, mean.mean, mean.low, mean.high, mean.n)
