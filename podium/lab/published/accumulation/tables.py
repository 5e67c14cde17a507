"""What the runs say, as plain tables: times by cell, the effect of accumulating, models of time, predicted and real."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

from podium.lab.published.accumulation.design import EPOCH
from podium.lab.published.accumulation.rows import runs, study_row
from podium.lab.stats.anova import Anova, anova
from podium.lab.stats.regress import (
    RESAMPLES,
    Extrapolation,
    Judgement,
    Model,
    Numbers,
    Point,
    extrapolate,
    judge,
    linear,
    overlapped,
    physical,
    points_of,
    power,
    quadratic,
)
from podium.lab.stats.statistics import Contrast, Mean, compare_pairs, holm, mean_interval
from podium.lab.study.store import Row

FACTORS = ("size", "batch", "nodes", "every")
"""Of the models without physics; size is a model's parameters, in millions."""


def numbers(row: Mapping[str, Any]) -> Numbers:
    """What is known of a run before it starts, for an epoch."""
    levels, bytes_ = row["levels"], 4.0 * row["parameters"]
    nodes, batch, every = float(levels["nodes"]), float(levels["batch"]), float(levels["every"])
    passes = EPOCH / (nodes * batch)
    return {
        "size": row["parameters"] / 1e6,
        "batch": batch,
        "nodes": nodes,
        "every": every,
        "samples": EPOCH / nodes,
        "passes": passes,
        "exchanges": passes / every,
        "bytes": bytes_,
        "bytes_per_s": levels["mbit"] * 1e6 / 8,
        "latency_s": row["latency_us"] / 1e6,
        f"is {levels['model']}": 1.0,
    }


def points(rows: Sequence[Row]) -> list[Point]:
    """Virtual runs as points, every model's mark on each."""
    kinds = kinds_of(rows)
    found = points_of(rows, numbers, "epoch_s")
    return [point._replace(x={**{f"is {kind}": 0.0 for kind in kinds}, **point.x}) for point in found]


def kinds_of(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(str(row["levels"]["model"]) for row in rows))


@dataclass(frozen=True, kw_only=True)
class Line:
    """One model, batch and number of nodes on one link: an exchange every batch against one every so many."""

    model: str
    batch: int
    nodes: int
    mbit: int
    every: int
    often: tuple[Row, ...]
    seldom: tuple[Row, ...]
    often_s: Mean
    seldom_s: Mean
    contrast: Contrast
    """Seldom over often, seed by seed; its p corrected over all lines of the page."""

    @property
    def rows(self) -> tuple[Row, ...]:
        return (*self.often, *self.seldom)


def lines(rows: Sequence[Row]) -> list[Line]:
    """All of them, in the order of the runs."""
    done = runs(rows, "virtual")
    most = max((row["levels"]["every"] for row in done), default=1)
    found = []
    for place in dict.fromkeys(_place(row) for row in done):
        here = [row for row in done if _place(row) == place]
        often = tuple(row for row in here if row["levels"]["every"] == 1)
        seldom = tuple(row for row in here if row["levels"]["every"] == most)
        if often and seldom and most > 1:
            found.append(_line(place, most, often, seldom))
    corrected = iter(holm([line.contrast.p for line in found if line.contrast.p is not None]))
    return [
        line if line.contrast.p is None else replace(line, contrast=replace(line.contrast, p_holm=next(corrected)))
        for line in found
    ]


class _Place(NamedTuple):
    model: str
    batch: int
    nodes: int
    mbit: int


def _place(row: Row) -> _Place:
    levels = row["levels"]
    return _Place(levels["model"], levels["batch"], levels["nodes"], levels["mbit"])


def _line(place: _Place, every: int, often: tuple[Row, ...], seldom: tuple[Row, ...]) -> Line:
    by_seed = [{int(row["seed"]): float(row["epoch_s"]) for row in some} for some in (seldom, often)]
    (contrast,) = compare_pairs("epoch", {"seldom": by_seed[0], "often": by_seed[1]}, ratio=True)
    means = [mean_interval(list(values.values())) for values in by_seed]
    assert means[0] is not None and means[1] is not None
    return Line(
        **place._asdict(),
        every=every,
        often=often,
        seldom=seldom,
        often_s=means[1],
        seldom_s=means[0],
        contrast=contrast,
    )


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One link: its lines, which factors matter, and how well models of the time predict."""

    mbit: int
    rows: tuple[Row, ...]
    lines: tuple[Line, ...]
    anova: Anova | None
    judged: tuple[Judgement, ...]
    beyond: tuple[Extrapolation, ...]
    """Fitted without the most nodes, predicting these."""


def panels(rows: Sequence[Row], *, resamples: int = RESAMPLES) -> list[Panel]:
    """One per link, in the study's order. Links without whole cells are left out.

    `resamples`: of the bootstrap for coefficients, which takes most of the time.
    """
    done, all_lines = runs(rows, "virtual"), lines(rows)
    factors = {name: levels for name, levels in study_row(rows).get("factors", {}).items() if name != "mbit"}
    found = []
    for mbit in dict.fromkeys(line.mbit for line in all_lines):
        here = tuple(row for row in done if row["levels"]["mbit"] == mbit)
        some = points(here)
        most = max(point.x["nodes"] for point in some)
        models = models_of(kinds_of(here))
        enough = [model for model in models if len({p.cell for p in some}) > len(model.names)]
        fewer = partial(_has_fewer_nodes, most)
        near = len({point.cell for point in some if fewer(point)})
        told = [model for model in enough if near > len(model.names)]
        found.append(
            Panel(
                mbit=mbit,
                rows=here,
                lines=tuple(line for line in all_lines if line.mbit == mbit),
                anova=anova([_without_link(row) for row in here], "epoch_s", ratio=True, factors=factors),
                judged=tuple(judge(some, model, resamples=resamples) for model in enough),
                beyond=tuple(extrapolate(some, model, fewer) for model in told),
            )
        )
    return found


def models_of(kinds: Sequence[str]) -> list[Model]:
    return [linear(FACTORS), quadratic(FACTORS), power(FACTORS), physical(kinds), overlapped(kinds)]


def _has_fewer_nodes(most: float, point: Point) -> bool:
    return point.x["nodes"] < most


def _without_link(row: Row) -> Row:
    return {**row, "levels": {name: level for name, level in row["levels"].items() if name != "mbit"}}


def other_link(rows: Sequence[Row]) -> list[Extrapolation]:
    """Fitted to the first link, predicting the others: what only models that know of links can do."""
    done = runs(rows, "virtual")
    rates = list(dict.fromkeys(row["levels"]["mbit"] for row in done))
    if len(rates) < 2:
        return []
    kinds, first = kinds_of(done), rates[0] * 1e6 / 8
    return [
        extrapolate(points(done), model, lambda point: point.x["bytes_per_s"] == first)
        for model in (physical(kinds), overlapped(kinds))
    ]


@dataclass(frozen=True, kw_only=True)
class Check:
    """A cell that was run for real, and what virtual time said: seconds per batch, the first step left out."""

    cell: str
    real: Mean
    predicted: Mean
    real_rows: tuple[Row, ...]
    predicted_rows: tuple[Row, ...]

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted.mean / self.real.mean - 1


def checks(rows: Sequence[Row]) -> list[Check]:
    """Cells that were both predicted and run."""
    both = {part: runs(rows, part) for part in ("real", "predicted")}
    found = []
    for cell in dict.fromkeys(str(row["cell"]) for row in both["real"]):
        mine = {part: tuple(row for row in some if row["cell"] == cell) for part, some in both.items()}
        means = {part: mean_interval([batch_s(row) for row in some]) for part, some in mine.items()}
        if means["real"] is not None and means["predicted"] is not None:
            found.append(
                Check(
                    cell=cell,
                    real=means["real"],
                    predicted=means["predicted"],
                    real_rows=mine["real"],
                    predicted_rows=mine["predicted"],
                )
            )
    return found


def batch_s(row: Mapping[str, Any]) -> float:
    """Seconds per batch of a node; the first step prepares buffers and kernels, and is left out."""
    every = int(row["levels"]["every"])
    return float(sum(row["step_s"][1:]) / (every * (len(row["step_s"]) - 1)))


def median_error(found: Sequence[Check]) -> float:
    return statistics.median(abs(one.error) for one in found)
