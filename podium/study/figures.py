"""The data of the figures, from rows alone; `drawing` puts them on paper and on the screen.

A convergence panel takes one quantity (loss, or the task's metric) against one axis. Its thick line is the median over
seeds at each validation, its band reaches from the lowest to the highest seed, its thin lines are the seeds themselves.
Seeds may reach their k-th validation at different times, so the median is taken of both coordinates.

A histogram of staleness has a column per value and, while there are few workers, a layer per worker.

A stack of panels shows phases: metric and loss against epochs with a mark where each run switched,
and below them the value of each rule that was in force, with its threshold.

A course shows one run whose workers differ: each worker's share of the steps and what computing its part took, with a
mark where the division changed. Of many workers, only the lowest, the middle and the highest value of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from podium.measure.staleness import Spread, bin_of
from podium.study.balance import Balanced, balanced_by_cell
from podium.study.rows import at_validation, cells, finished, number
from podium.study.staleness import staleness_by_cell
from podium.study.statistics import mean_interval
from podium.study.store import Row

AXES = {"seconds": "seconds of training", "epoch": "epoch", "step": "step", "mb": "MB sent by all ranks"}
"""What convergence is drawn against, and how the axis is called."""


@dataclass(frozen=True)
class Line:
    """One run."""

    seed: int
    x: tuple[float, ...]
    y: tuple[float, ...]


@dataclass(frozen=True)
class Curve:
    """One strategy: its runs, and their median with the band from lowest to highest."""

    cell: str
    x: tuple[float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    lines: tuple[Line, ...]


@dataclass(frozen=True)
class Convergence:
    """One panel: a quantity against an axis."""

    quantity: str
    axis: str
    """A key of AXES."""
    curves: tuple[Curve, ...]
    log: bool
    """Whether the quantity is drawn on a logarithmic scale."""
    assumed: bool = False
    """Whether bytes were spread evenly over samples, because validations did not record them."""

    @property
    def name(self) -> str:
        return f"{self.quantity} against {AXES[self.axis]}"


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


MOST_LAYERS = 8
"""Workers beyond this many would share colours, so they are then drawn as one."""


@dataclass(frozen=True)
class Layer:
    """One worker's part of a histogram's columns, or all workers' together."""

    name: str
    updates: tuple[int, ...]
    """One number per column."""


@dataclass(frozen=True)
class Histogram:
    """How stale one strategy's updates were: a column per staleness, made of a layer per worker."""

    cell: str
    columns: tuple[str, ...]
    """What each column counts: `3`, or `65–128`."""
    layers: tuple[Layer, ...]

    @property
    def name(self) -> str:
        return f"staleness, {self.cell}"


@dataclass(frozen=True)
class Panel:
    """One quantity of a stack."""

    quantity: str
    lines: tuple[Line, ...]
    """One per run; of a rule, one per run and phase that it was in force in."""
    log: bool
    threshold: float | None = None
    """Where a rule fires."""


@dataclass(frozen=True)
class Stack:
    """One strategy with phases: what it learned, when it switched, and what the rules in force made of it."""

    cell: str
    panels: tuple[Panel, ...]
    marks: tuple[tuple[int, float], ...]
    """Seed and epoch of each switch."""

    @property
    def name(self) -> str:
        return f"phases, {self.cell}"


@dataclass(frozen=True)
class Trace:
    """One worker's values, or one value of all workers'; None where it took no part."""

    name: str
    x: tuple[int, ...]
    """Steps."""
    y: tuple[float | None, ...]


@dataclass(frozen=True)
class Strip:
    """One quantity of a course."""

    quantity: str
    traces: tuple[Trace, ...]
    whole: Trace | None = None
    """What the workers share: the step as a whole."""


@dataclass(frozen=True)
class Course:
    """One run of uneven workers: who had how much of each step, and how long they took."""

    cell: str
    seed: int
    strips: tuple[Strip, ...]
    marks: tuple[int, ...]
    """The first steps under another division."""

    @property
    def name(self) -> str:
        return f"shares and step times, {self.cell}, seed {self.seed}"


Figure = Convergence | Bars | Histogram | Stack | Course


def convergence(rows: Sequence[Row], quantity: str, axis: str) -> Convergence | None:
    """A panel, or None when no run has both the quantity and the axis."""
    done = finished(rows)
    curves = [_curve(cell, [row for row in done if row["cell"] == cell], quantity, axis) for cell in cells(done)]
    # A strategy that sends nothing would be a stroke along the edge of "against MB".
    drawn = tuple(curve for curve in curves if curve is not None and (axis != "mb" or max(curve.x) > 0))
    if not drawn:
        return None
    log = quantity == "loss" and all(y > 0 for curve in drawn for line in curve.lines for y in line.y)
    return Convergence(quantity, axis, drawn, log, axis == "mb" and _bytes_assumed(done))


def convergence_panels(rows: Sequence[Row], metric: str) -> list[Convergence]:
    """Loss and metric against every axis, as far as they were recorded."""
    quantities = dict.fromkeys([metric, "loss"])
    panels = [convergence(rows, quantity, axis) for quantity in quantities for axis in AXES]
    return [panel for panel in panels if panel is not None]


def cost_bars(rows: Sequence[Row]) -> list[Bars]:
    """What each strategy cost: time, throughput, traffic, waiting."""
    return _drawn(
        [
            _bars("seconds of training", rows, lambda row: number(row.get("seconds"))),
            _bars("samples per second", rows, lambda row: number(row.get("samples_per_s"))),
            _bars("MB sent by all ranks", rows, lambda row: _scaled(row.get("sent_bytes"), 1e-6)),
            _bars("% of step time spent waiting", rows, lambda row: _scaled(row.get("wait_share"), 100)),
        ]
    )


def staleness_bars(rows: Sequence[Row]) -> list[Bars]:
    """Mean staleness of the strategies that can have any."""
    return _drawn(
        [_bars("mean staleness (updates)", rows, lambda row: number((row.get("staleness") or {}).get("mean")))]
    )


def staleness_histograms(rows: Sequence[Row]) -> dict[str, Histogram]:
    """By strategy: how stale its updates were, all seeds together; only those that made any."""
    found = {}
    for cell, tables in staleness_by_cell(rows).items():
        if tables.overall is None:
            continue
        parts = {f"worker {worker}": spread for worker, spread in tables.workers.items()}
        if len(parts) > MOST_LAYERS:
            parts = {"all workers": tables.overall}
        bins = _columns(tables.overall)
        layers = tuple(Layer(name, _heights(spread, bins)) for name, spread in parts.items())
        found[cell] = Histogram(cell, tuple(_column_name(*ends) for ends in bins), layers)
    return found


def phase_stacks(rows: Sequence[Row], metric: str) -> dict[str, Stack]:
    """By strategy: what its runs came to over the epochs, for those that have phases."""
    done = [row for row in finished(rows) if row.get("rules")]
    found = {}
    for cell in cells(done):
        runs = [row for row in done if row["cell"] == cell]
        panels = [_learned(quantity, runs) for quantity in dict.fromkeys([metric, "loss"])]
        panels += [_rule_panel(rule, runs) for rule in _rules_in_force(runs)]
        drawn = tuple(panel for panel in panels if panel.lines)
        if drawn:
            marks = [(int(row["seed"]), float(switch["epoch"])) for row in runs for switch in row["switches"]]
            found[cell] = Stack(cell, drawn, tuple(marks))
    return found


def balance_courses(rows: Sequence[Row]) -> dict[str, Course]:
    """By strategy: how its first run was divided over the steps, for those whose workers differ."""
    told = balanced_by_cell(rows)
    return {cell: _course(cell, found, found.course) for cell, found in told.items() if found.course}


def _course(cell: str, found: Balanced, course: Mapping[str, Any]) -> Course:
    x, workers = tuple(course["step"]), course["workers"]
    shares = {rank: [_scaled(value, 100) for value in told["share"]] for rank, told in workers.items()}
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


def _learned(quantity: str, runs: Sequence[Row]) -> Panel:
    lines = tuple(line for line in (_line(row, quantity, "epoch") for row in runs) if line.x)
    return Panel(quantity, lines, quantity == "loss" and all(y > 0 for line in lines for y in line.y))


def _rules_in_force(runs: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(rule["rule"] for row in runs for rule in row["rules"] if rule["in_force"]))


def _rule_panel(name: str, runs: Sequence[Row]) -> Panel:
    lines: list[Line] = []
    thresholds: list[float] = []
    for row in runs:
        for rule in row["rules"]:
            if rule["rule"] == name and rule["in_force"]:
                lines += _readings(int(row["seed"]), rule["readings"])
                thresholds += [bound for bound in [number(rule["threshold"])] if bound is not None]
    threshold = thresholds[-1] if thresholds else None
    values = [y for line in lines for y in line.y] + ([] if threshold is None else [threshold])
    return Panel(name, tuple(lines), bool(values) and min(values) > 0 and max(values) > WIDE * min(values), threshold)


WIDE = 10
"""A rule's values are drawn on a logarithmic scale where they differ by more than this factor."""


def _readings(seed: int, readings: Sequence[Mapping[str, Any]]) -> list[Line]:
    """A line per phase: between two phases the rule was not in force. A rule that has not seen enough has no value."""
    by_phase: dict[int, list[tuple[float, float]]] = {}
    for reading in readings:
        value = number(reading["value"])
        if value is not None:
            by_phase.setdefault(reading["phase"], []).append((float(reading["epoch"]), value))
    return [Line(seed, tuple(x for x, _ in some), tuple(y for _, y in some)) for some in by_phase.values()]


def _columns(spread: Spread) -> list[tuple[int, int]]:
    """All bins from the lowest to the highest, empty ones too: a gap has to show as one."""
    columns = [spread.histogram[0][:2]]
    while columns[-1][1] < spread.histogram[-1].high:
        columns.append(bin_of(columns[-1][1] + 1))
    return columns


def _column_name(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}–{high}"


def _heights(spread: Spread, columns: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    updates = {bin[:2]: bin.updates for bin in spread.histogram}
    return tuple(updates.get(ends, 0) for ends in columns)


def _curve(cell: str, rows: Sequence[Row], quantity: str, axis: str) -> Curve | None:
    lines = tuple(line for line in (_line(row, quantity, axis) for row in rows) if line.x)
    if not lines:
        return None
    # Beyond the shortest run a median would be of other runs than before it.
    length = min(len(line.x) for line in lines)
    xs = [[line.x[k] for line in lines] for k in range(length)]
    ys = [[line.y[k] for line in lines] for k in range(length)]
    x, y = tuple(map(median, xs)), tuple(map(median, ys))
    return Curve(cell, x, y, tuple(map(min, ys)), tuple(map(max, ys)), lines)


def _line(row: Mapping[str, Any], quantity: str, axis: str) -> Line:
    points = []
    for point in row.get("history") or ():
        x = _megabytes(row, point) if axis == "mb" else at_validation(point, axis)
        y = at_validation(point, quantity)
        if x is not None and y is not None:
            points.append((x, y))
    return Line(int(row["seed"]), tuple(x for x, _ in points), tuple(y for _, y in points))


def _megabytes(row: Mapping[str, Any], point: Mapping[str, Any]) -> float | None:
    """Bytes sent up to a validation: as recorded, else the run's total in proportion to samples."""
    recorded = at_validation(point, "sent_bytes")
    if recorded is not None:
        return recorded / 1e6
    total, samples, part = number(row.get("sent_bytes")), number(row.get("samples")), at_validation(point, "samples")
    if total is None or not samples or part is None:
        return None
    return total * part / samples / 1e6


def _bytes_assumed(rows: Sequence[Row]) -> bool:
    return any(at_validation(point, "sent_bytes") is None for row in rows for point in row.get("history") or ())


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


def _scaled(value: Any, scale: float) -> float | None:
    known = number(value)
    return None if known is None else known * scale


def _drawn(figures: Sequence[Bars]) -> list[Bars]:
    """Those with anything to show: a cost that is zero for everyone needs no picture."""
    return [figure for figure in figures if any(bar.mean for bar in figure.bars)]
