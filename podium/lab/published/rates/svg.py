"""The figure: bytes against accuracy, one panel per task."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Sequence
from typing import Any

from podium.lab.published.rates.tables import Line, Panel
from podium.lab.stats.statistics import Mean

_FAMILIES = {
    "dense": ("#000000", "*"),
    "fp16": ("#7f7f7f", "o"),
    "bf16": ("#7f7f7f", "s"),
    "int8": ("#7f7f7f", "D"),
    "sign": ("#d55e00", "o"),
    "ef-sign": ("#d55e00", "s"),
    "vote": ("#d55e00", "D"),
    "one-bit": ("#d55e00", "^"),
    "top-k": ("#0072b2", "o"),
    "random-k": ("#56b4e9", "s"),
    "dgc": ("#cc79a7", "D"),
    "power-sgd": ("#009e73", "^"),
}
"""Colour and marker by name: one colour per idea, of Okabe and Ito's, which colour-blind readers can tell apart."""

_SIZE = (320.0, 270.0)
"""Of a panel's inside, in typographic points, near enough to keep names apart."""

_LEAST_ERROR = 0.1
"""Percent; where an interval reaches over 100 %, it is cut here."""


def figure(panels: Sequence[Panel]) -> str:
    """An SVG with one panel per task: ratio on a logarithmic axis against accuracy."""
    matplotlib = importlib.import_module("matplotlib")
    backend = importlib.import_module("matplotlib.backends.backend_svg")
    figures = importlib.import_module("matplotlib.figure")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9, "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        canvas = figures.Figure(figsize=(5.2 * len(panels) + 0.4, 4.6), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        for place, panel in enumerate(panels, 1):
            _draw_panel(canvas.add_subplot(1, len(panels), place), panel)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _draw_panel(axes: Any, panel: Panel) -> None:
    """Errors on an inverted logarithmic axis, named by the accuracies that they leave."""
    points = [
        (line, line.ratio, line.accuracy)
        for line in panel.lines
        if line.ratio is not None and line.accuracy is not None
    ]
    errors = [_error(mean.mean) for _, _, mean in points]
    ratios = [ratio for _, ratio, _ in points]
    left, right, low, high = min(ratios) / 1.5, max(ratios) * 2.5, min(errors) / 1.25, min(100, max(errors) * 1.25)
    across, up = _SIZE[0] / math.log(right / left), _SIZE[1] / math.log(high / low)
    spots = [(across * math.log(r / left), up * math.log(high / e)) for r, e in zip(ratios, errors, strict=True)]
    names = [_short(line.codec) for line, _, _ in points]
    for (line, ratio, mean), name, offset in zip(points, names, place_names(spots, names), strict=True):
        _draw_point(axes, ratio, mean, line, name, offset)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(left, right)
    axes.set_ylim(high, low)
    ticks = [e for e in (0.1, 0.2, 0.5, 1, 2, 3, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90) if low <= e <= high]
    axes.set_yticks(ticks, [f"{100 - e:g}" for e in ticks])
    axes.set_yticks([], minor=True)
    failed = [line.codec for line in panel.lines if line.failed]
    axes.set_title(panel.title + (f"\nfailed with some seeds: {', '.join(failed)}" if failed else ""), fontsize=9)
    axes.set(xlabel="bytes sent over dense's bytes sent", ylabel="test accuracy, %")
    axes.grid(alpha=0.25, linewidth=0.5)


def _draw_point(axes: Any, ratio: float, mean: Mean, line: Line, name: str, offset: tuple[float, float]) -> None:
    colour, marker = _FAMILIES.get(line.codec.partition(":")[0], ("#8c6d31", "v"))
    error = _error(mean.mean)
    fill = "none" if line.feedback == "off" else colour
    if mean.low is not None and mean.high is not None:
        ends = [[error - _error(mean.high)], [_error(mean.low) - error]]
        axes.errorbar(ratio, error, yerr=ends, color=colour, linewidth=0.8, capsize=2, alpha=0.7)
    axes.plot(ratio, error, marker, color=colour, markerfacecolor=fill, markersize=6)
    far = {"arrowprops": {"arrowstyle": "-", "color": colour, "linewidth": 0.3}} if math.hypot(*offset) > 40 else {}
    axes.annotate(name, (ratio, error), offset, textcoords="offset points", fontsize=6, color=colour, **far)


def place_names(spots: Sequence[tuple[float, float]], names: Sequence[str]) -> list[tuple[float, float]]:
    """Where each name begins, from its point, in typographic points: the nearest place that is free, if there is one.

    A name keeps clear of all points and of the names placed before it; it may cross intervals.
    """
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in spots]
    offsets = []
    for (x, y), name in zip(spots, names, strict=True):
        width, height = 3.5 * len(name), 7.0
        tries = [
            (dx, float(dy)) for ring in range(0, 84, 4) for dx in (5.0, -width - 5) for dy in (ring + 1, -ring - 8)
        ]
        free = (t for t in tries if not any(_meet(_box(x + t[0], y + t[1], width, height), box) for box in taken))
        dx, dy = next(free, tries[0])
        taken.append(_box(x + dx, y + dy, width, height))
        offsets.append((dx, dy))
    return offsets


_Box = tuple[float, float, float, float]


def _box(x: float, y: float, width: float, height: float) -> _Box:
    return x, y, x + width, y + height


def _meet(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _short(codec: str) -> str:
    """What tells a point from its neighbours: the options, without those that its look tells."""
    name, _, options = codec.partition(":")
    kept = [part.partition("=")[2] for part in options.split(";") if part and not part.startswith("feedback")]
    return " ".join([name, *kept])


def _error(accuracy: float) -> float:
    return max(_LEAST_ERROR, min(100.0, 100 - accuracy))
