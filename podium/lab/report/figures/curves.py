"""Convergence: one quantity (loss, or the task's metric) against one axis.

The thick line is the median over seeds at each validation, the band reaches from the lowest to the highest seed, and
each thin line is a seed. Seeds may reach their k-th validation at different times, so the median is taken of both
coordinates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from podium.lab.report.figures.base import Line
from podium.lab.study.results import at_validation, cells, finished, number
from podium.lab.study.store import Row

AXES = {
    "seconds": "seconds of training",
    "epoch": "epoch",
    "step": "step",
    "mb": "MB sent by all ranks",
    "joules": "joules, measured",
}
"""Axes of convergence, and their labels. Joules are drawn only where they were measured."""


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


def convergence(rows: Sequence[Row], quantity: str, axis: str) -> Convergence | None:
    """A panel, or None when no run has both the quantity and the axis."""
    done = finished(rows)
    curves = [_curve(cell, [row for row in done if row["cell"] == cell], quantity, axis) for cell in cells(done)]
    # A strategy that sends nothing would be a vertical line at the edge of "against MB".
    drawn = tuple(curve for curve in curves if curve is not None and (axis != "mb" or max(curve.x) > 0))
    if not drawn:
        return None
    log = quantity == "loss" and all(y > 0 for curve in drawn for line in curve.lines for y in line.y)
    return Convergence(quantity, axis, drawn, log, axis == "mb" and _bytes_assumed(done))


def convergence_panels(rows: Sequence[Row], metric: str) -> list[Convergence]:
    """Loss and metric against every recorded axis."""
    quantities = dict.fromkeys([metric, "loss"])
    panels = [convergence(rows, quantity, axis) for quantity in quantities for axis in AXES]
    return [panel for panel in panels if panel is not None]


def energy_said(rows: Sequence[Row]) -> str:
    """A sentence: in how many runs energy was measured at validations."""
    done = finished(rows)
    known = sum(any(at_validation(point, "joules") is not None for point in row.get("history") or ()) for row in done)
    if not known:
        return "Energy was not measured."
    return (
        "Energy was measured in every run." if known == len(done) else f"Energy: {known} of {len(done)} runs measured."
    )


def _curve(cell: str, rows: Sequence[Row], quantity: str, axis: str) -> Curve | None:
    lines = tuple(line for line in (line_of(row, quantity, axis) for row in rows) if line.x)
    if not lines:
        return None
    # Beyond the shortest run the median would be over fewer runs.
    length = min(len(line.x) for line in lines)
    xs = [[line.x[k] for line in lines] for k in range(length)]
    ys = [[line.y[k] for line in lines] for k in range(length)]
    x, y = tuple(map(median, xs)), tuple(map(median, ys))
    return Curve(cell, x, y, tuple(map(min, ys)), tuple(map(max, ys)), lines)


def line_of(row: Mapping[str, Any], quantity: str, axis: str) -> Line:
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
