"""The data of a sweep's figures, which `drawing` draws.

The kind of score figure depends on the search: for one option a line (marks, if its values are not numbers); for a grid
of two options a heat map; otherwise parallel coordinates, a line per point through one axis per option. The timeline
has a lane for each row of an array; for executors without rows, as many lanes as trials ran at the same time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from podium.lab.report.figures import Convergence, Curve, Line
from podium.records.recorder import read_records
from podium.sweeps.formats import format_value
from podium.sweeps.ranking import Point
from podium.sweeps.result import Sweep
from podium.sweeps.trial import Outcome

MOST_CURVES = 8
"""The most points whose learning curves are drawn: the number of colours."""
WIDE = 20
"""Positive numbers that differ by more than this factor get a logarithmic axis."""


@dataclass(frozen=True)
class Mark:
    """One point's score at one value."""

    x: Any
    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]


@dataclass(frozen=True)
class OneOption:
    """Scores by the only option that was searched."""

    metric: str
    option: str
    marks: tuple[Mark, ...]
    numeric: bool
    log: bool

    @property
    def name(self) -> str:
        return f"{self.metric} by {self.option}"


@dataclass(frozen=True)
class Map:
    """Scores of all combinations of two options; NaN if one was not tried or has no score."""

    metric: str
    maximize: bool
    x: str
    y: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    cells: tuple[tuple[float, ...], ...]
    """Row by row."""

    @property
    def name(self) -> str:
        return f"{self.metric} by {self.x} and {self.y}"


@dataclass(frozen=True)
class Axis:
    """One option of parallel coordinates: the position of each value, from 0 to 1."""

    option: str
    ticks: tuple[tuple[float, str], ...]


@dataclass(frozen=True)
class Parallel:
    """Parallel coordinates: a line for each point through its options to its score."""

    metric: str
    maximize: bool
    axes: tuple[Axis, ...]
    """The last one is the score."""
    lines: tuple[tuple[float, ...], ...]
    """Each point's position on each axis, the best point first."""

    @property
    def name(self) -> str:
        return f"{self.metric} of every point"


@dataclass(frozen=True)
class Stay:
    """A trial's time in its lane."""

    trial: int
    lane: int
    began_s: float
    ended_s: float
    status: str


@dataclass(frozen=True)
class Timeline:
    """Which trial trained in which lane, when."""

    lanes: tuple[str, ...]
    stays: tuple[Stay, ...]

    @property
    def name(self) -> str:
        return "slots: which trial trained where, when"


Scores = OneOption | Map | Parallel
Figure = Scores | Convergence | Timeline


def varied(points: Sequence[Point]) -> list[str]:
    """The options that are not the same in all points."""
    names = dict.fromkeys(name for point in points for name in point.options)
    return [name for name in names if len({_key(_value(point, name)) for point in points}) > 1]


def score_figure(sweep: Sweep) -> Scores | None:
    """Scores by point; None if fewer than two points have one."""
    points = [point for point in sweep.points if point.mean is not None]
    names = varied(points)
    if len(points) < 2 or not names:
        return None
    if len(names) == 1:
        return _one_option(sweep.metric, names[0], points)
    if len(names) == 2 and _fills_a_grid(points, names):
        return _map(sweep, names, points)
    return _parallel(sweep, names, points)


def curve_figure(sweep: Sweep) -> Convergence | None:
    """Learning curves of the best points, metric over epoch; None if trials were evaluated at their end only."""
    ended: dict[int, list[Outcome]] = {}
    for outcome in sweep.outcomes:
        ended.setdefault(outcome.trial.point, []).append(outcome)
    curves = [_curve(point, ended.get(point.number, []), sweep.metric) for point in sweep.points[:MOST_CURVES]]
    drawn = tuple(curve for curve in curves if curve is not None)
    if not drawn or max(len(line.x) for curve in drawn for line in curve.lines) < 2:
        return None
    values = [y for curve in drawn for line in curve.lines for y in line.y]
    return Convergence(sweep.metric, "epoch", drawn, not sweep.maximize and min(values) > 0)


def timeline_figure(folder: str | Path) -> Timeline | None:
    """Which trial trained in which row, when; None without `slots.jsonl`."""
    path = Path(folder) / "slots.jsonl"
    rows = list(read_records(path)) if path.is_file() else []
    if not rows:
        return None
    several = len({row["group"] for row in rows}) > 1
    lanes: dict[tuple[int, int], str] = {}
    free: dict[int, list[float]] = {}  # for executors without rows: when each lane of a group becomes free
    placed = []
    for row in sorted(rows, key=lambda row: (row["group"], row["began_s"], row["trial"])):
        at = row["row"]
        if at is None:
            at = _free_lane(free.setdefault(row["group"], []), row)
        key = (row["group"], at)
        lanes[key] = f"group {row['group']}, row {at}" if several else f"row {at}"
        placed.append((key, row))
    order = {key: place for place, key in enumerate(sorted(lanes))}
    stays = [Stay(row["trial"], order[key], row["began_s"], row["ended_s"], row["status"]) for key, row in placed]
    return Timeline(tuple(lanes[key] for key in order), tuple(stays))


def _free_lane(free: list[float], row: Mapping[str, Any]) -> int:
    for place, until in enumerate(free):
        if until <= row["began_s"]:
            free[place] = row["ended_s"]
            return place
    free.append(row["ended_s"])
    return len(free) - 1


def _one_option(metric: str, name: str, points: Sequence[Point]) -> OneOption:
    values = [_value(point, name) for point in points]
    numeric = all(_is_number(value) for value in values)
    if numeric:
        points = sorted(points, key=lambda point: float(_value(point, name)))
    marks = []
    for point in points:
        assert point.mean is not None
        value = _value(point, name)
        x = float(value) if numeric else format_value(value)
        marks.append(Mark(x, point.mean, point.low, point.high, tuple(score.value for score in point.scores)))
    log = numeric and _is_log([float(mark.x) for mark in marks])
    return OneOption(metric, name, tuple(marks), numeric, log)


def _map(sweep: Sweep, names: Sequence[str], points: Sequence[Point]) -> Map:
    x, y = names
    columns, rows = (_ordered([_value(point, name) for point in points]) for name in names)
    known = {(_key(_value(point, x)), _key(_value(point, y))): point.mean for point in points}
    means = [[known.get((_key(c), _key(r))) for c in columns] for r in rows]
    cells = tuple(tuple(math.nan if mean is None else mean for mean in row) for row in means)
    named = tuple(tuple(map(format_value, values)) for values in (columns, rows))
    return Map(sweep.metric, sweep.maximize, x, y, named[0], named[1], cells)


def _fills_a_grid(points: Sequence[Point], names: Sequence[str]) -> bool:
    sizes = [len({_key(_value(point, name)) for point in points}) for name in names]
    return max(sizes) <= 12 and len(points) >= 0.6 * sizes[0] * sizes[1]


def _parallel(sweep: Sweep, names: Sequence[str], points: Sequence[Point]) -> Parallel:
    axes, columns = [], []
    for name in names:
        axis, places = _axis(name, [_value(point, name) for point in points])
        axes.append(axis)
        columns.append(places)
    axis, places = _axis(sweep.metric, [point.mean for point in points], most=0)
    return Parallel(sweep.metric, sweep.maximize, (*axes, axis), tuple(zip(*columns, places, strict=True)))


def _axis(name: str, values: Sequence[Any], most: int = 8) -> tuple[Axis, list[float]]:
    """Numbers are placed by size, other values evenly; of more than `most` numbers only the ends get ticks."""
    if all(_is_number(value) for value in values):
        numbers = [float(value) for value in values]
        scale = math.log if _is_log(numbers) else float
        low, high = min(numbers), max(numbers)
        width = scale(high) - scale(low)
        shown = _ordered(numbers) if len(set(numbers)) <= most else [low, high]
        place = [0.5 if not width else (scale(value) - scale(low)) / width for value in (*shown, *numbers)]
        ticks = tuple((at, format_value(value)) for at, value in zip(place, shown, strict=False))
        return Axis(name, ticks), place[len(shown) :]
    shown = _ordered(values)
    at = {_key(value): (place + 0.5) / len(shown) for place, value in enumerate(shown)}
    return Axis(name, tuple((at[_key(v)], format_value(v)) for v in shown)), [at[_key(v)] for v in values]


def _curve(point: Point, outcomes: Sequence[Outcome], metric: str) -> Curve | None:
    lines = []
    for outcome in outcomes:
        known = [(e.epoch, e.loss if metric == "loss" else e.metrics.get(metric, math.nan)) for e in outcome.history]
        spots = [(epoch, value) for epoch, value in known if math.isfinite(value)]
        if spots:
            x, y = zip(*spots, strict=True)
            lines.append(Line(outcome.trial.number, x, y))
    if not lines:
        return None
    # Beyond the shortest trial the median would be over fewer trials.
    length = min(len(line.x) for line in lines)
    ys = [[line.y[k] for line in lines] for k in range(length)]
    middle = tuple(map(median, ys))
    return Curve(point.name, lines[0].x[:length], middle, tuple(map(min, ys)), tuple(map(max, ys)), tuple(lines))


def _value(point: Point, name: str) -> Any:
    """An option of a point; a list of one number is that number."""
    value = point.options.get(name)
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _ordered(values: Sequence[Any]) -> list[Any]:
    """Each value once: numbers sorted, other values in order of appearance."""
    once = list({_key(value): value for value in values}.values())
    return sorted(once) if all(_is_number(value) for value in once) else once


def _is_log(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) > WIDE * min(values)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _key(value: Any) -> str:
    return json.dumps(value, sort_keys=True, default=str)
