"""Bars: one cost, a bar per strategy with its interval and its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from podium.lab.report.figures.base import scaled
from podium.lab.stats.statistics import mean_interval
from podium.lab.study.results import cells, finished, number
from podium.lab.study.store import Row


@dataclass(frozen=True)
class Bar:
    """One strategy's bar: the mean, its interval if there is one, and the runs."""

    cell: str
    mean: float
    low: float | None
    high: float | None
    points: tuple[float, ...]


@dataclass(frozen=True)
class Bars:
    """One cost, a bar per strategy."""

    name: str
    bars: tuple[Bar, ...]


def cost_bars(rows: Sequence[Row]) -> list[Bars]:
    """The costs of each strategy: time, throughput, traffic, waiting."""
    return _drawn(
        [
            _bars("seconds of training", rows, lambda row: number(row.get("seconds"))),
            _bars("samples per second", rows, lambda row: number(row.get("samples_per_s"))),
            _bars("MB sent by all ranks", rows, lambda row: scaled(row.get("sent_bytes"), 1e-6)),
            _bars("% of step time spent waiting", rows, lambda row: scaled(row.get("wait_share"), 100)),
        ]
    )


def staleness_bars(rows: Sequence[Row]) -> list[Bars]:
    """Mean staleness of the asynchronous strategies."""
    return _drawn(
        [_bars("mean staleness (updates)", rows, lambda row: number((row.get("staleness") or {}).get("mean")))]
    )


def _bars(name: str, rows: Sequence[Row], value: Callable[[Row], float | None]) -> Bars:
    done = finished(rows)
    bars = []
    for cell in cells(done):
        values = [value(row) for row in done if row["cell"] == cell]
        points = tuple(x for x in values if x is not None)
        mean = mean_interval(points)
        if mean is not None:
            bars.append(Bar(cell, mean.mean, mean.low, mean.high, points))
    return Bars(name, tuple(bars))


def _drawn(figures: Sequence[Bars]) -> list[Bars]:
    """The figures without those in which all bars are zero."""
    return [figure for figure in figures if any(bar.mean for bar in figure.bars)]
