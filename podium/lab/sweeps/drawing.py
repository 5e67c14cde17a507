"""A sweep's figures as SVG by matplotlib, in the style of a comparison's; the same data give the same bytes."""

from __future__ import annotations

import importlib
import io
import math
from collections.abc import Callable
from typing import Any

from podium.lab.report import drawing
from podium.lab.report.drawing import COLOURS, INK
from podium.lab.report.drawing.base import embed, paper_settings
from podium.lab.report.figures import Convergence
from podium.lab.sweeps.figures import Figure, Map, OneOption, Parallel, Timeline

STATUS_COLOURS = {"finished": COLOURS[0], "stopped": COLOURS[4], "diverged": COLOURS[3], "failed": COLOURS[1]}
MOST_LANES = 24
"""The most lanes of a timeline that are all labelled; of more, only some are."""
_XMLNS = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" '


def to_svg(figure: Figure) -> str | None:
    """A figure as one `<svg>` element in the page's text colour; None without matplotlib."""
    if isinstance(figure, Convergence):
        return drawing.to_svg(figure, {curve.cell: place for place, curve in enumerate(figure.curves)})
    draw, size = _DRAWN[type(figure)]
    return _svg(lambda axes: draw(axes, figure), size(figure))


def standalone(svg: str) -> str:
    """The element as an SVG file, in black."""
    whole = svg.replace("<svg ", f"<svg {_XMLNS}", 1).replace("currentColor", "#000000")
    return f'<?xml version="1.0" encoding="utf-8"?>\n{whole}\n'


def _svg(draw: Callable[[Any], None], size: tuple[float, float]) -> str | None:
    try:
        matplotlib = importlib.import_module("matplotlib")
        backend = importlib.import_module("matplotlib.backends.backend_svg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    with matplotlib.rc_context(paper_settings(INK)):
        canvas = figures.Figure(figsize=size, layout="constrained")
        backend.FigureCanvasSVG(canvas)
        draw(canvas.add_subplot())
        out = io.StringIO()
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return embed(out.getvalue())


def _draw_one_option(axes: Any, figure: OneOption) -> None:
    places = [mark.x for mark in figure.marks] if figure.numeric else list(range(len(figure.marks)))
    for place, mark in zip(places, figure.marks, strict=True):
        axes.plot([place] * len(mark.values), mark.values, "o", markersize=3, markerfacecolor="none", color="#777777")
        if mark.low is not None and mark.high is not None:
            ends = [[mark.mean - mark.low], [mark.high - mark.mean]]
            axes.errorbar(place, mark.mean, yerr=ends, color=COLOURS[0], capsize=3)
    style = {"color": COLOURS[0], "marker": "o", "markersize": 4, "linestyle": "-" if figure.numeric else "none"}
    axes.plot(places, [mark.mean for mark in figure.marks], **style)
    if not figure.numeric:
        axes.set_xticks(places, [mark.x for mark in figure.marks])
        axes.set_xlim(-0.6, len(places) - 0.4)
    if figure.log:
        axes.set_xscale("log")
    axes.set(xlabel=figure.option, ylabel=figure.metric)
    axes.grid(alpha=0.25, linewidth=0.5)


def _draw_map(axes: Any, figure: Map) -> None:
    known = [value for row in figure.cells for value in row if math.isfinite(value)]
    colours = "viridis" if figure.maximize else "viridis_r"
    axes.pcolormesh(figure.cells, cmap=colours, vmin=min(known), vmax=max(known), edgecolors="white", linewidth=1)
    middle = (min(known) + max(known)) / 2
    best = (max if figure.maximize else min)(known)
    for at_row, row in enumerate(figure.cells):
        for at_column, value in enumerate(row):
            if math.isfinite(value):
                bright = (value > middle) == figure.maximize
                weight = "bold" if value == best else "normal"
                place = (at_column + 0.5, at_row + 0.5)
                ink = "#000000" if bright else "#ffffff"
                axes.text(*place, f"{value:.4g}", ha="center", va="center", color=ink, fontsize=7, fontweight=weight)
    axes.set_xticks([k + 0.5 for k in range(len(figure.columns))], figure.columns)
    axes.set_yticks([k + 0.5 for k in range(len(figure.rows))], figure.rows)
    axes.set(xlabel=figure.x, ylabel=figure.y)
    axes.tick_params(length=0)


def _draw_parallel(axes: Any, figure: Parallel) -> None:
    colormaps = importlib.import_module("matplotlib").colormaps["viridis"]
    for line in reversed(figure.lines):  # the best last, on top of all others
        good = line[-1] if figure.maximize else 1 - line[-1]
        is_best = line is figure.lines[0]
        colour = COLOURS[1] if is_best else colormaps(good)
        axes.plot(range(len(line)), line, color=colour, linewidth=2.2 if is_best else 0.9, alpha=1 if is_best else 0.6)
    for place, axis in enumerate(figure.axes):
        axes.axvline(place, color=INK, linewidth=0.7)
        for at, text in axis.ticks:
            axes.text(place + 0.03, at, text, fontsize=6.5, va="center")
    axes.set_xticks(range(len(figure.axes)), [axis.option for axis in figure.axes])
    axes.set_yticks([])
    axes.set_xlim(-0.1, len(figure.axes) - 0.6)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _draw_timeline(axes: Any, figure: Timeline) -> None:
    for status, colour in STATUS_COLOURS.items():
        stays = [stay for stay in figure.stays if stay.status == status]
        if stays:
            widths = [max(stay.ended_s - stay.began_s, 0.0) for stay in stays]
            begins, lanes = [stay.began_s for stay in stays], [stay.lane for stay in stays]
            bars = {"height": 0.8, "color": colour, "alpha": 0.75, "edgecolor": "white", "linewidth": 0.5}
            axes.barh(lanes, widths, left=begins, label=status, **bars)
    every = -(-len(figure.lanes) // MOST_LANES)
    named = range(0, len(figure.lanes), every)
    axes.set_yticks(list(named), [figure.lanes[place] for place in named], fontsize=6)
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set(xlabel="seconds since the sweep began")
    axes.grid(axis="x", alpha=0.25, linewidth=0.5)
    if len({stay.status for stay in figure.stays}) > 1:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _plain_size(figure: Any) -> tuple[float, float]:
    """In inches."""
    return 4.8, 3.0


def _map_size(figure: Map) -> tuple[float, float]:
    return min(9.0, 1.5 + 0.55 * len(figure.columns)), min(8.0, 1.0 + 0.35 * len(figure.rows))


def _parallel_size(figure: Parallel) -> tuple[float, float]:
    return max(4.8, 1.3 * len(figure.axes)), 3.4


def _timeline_size(figure: Timeline) -> tuple[float, float]:
    return 6.4, min(6.0, 0.9 + 0.12 * len(figure.lanes) + 0.1)


_DRAWN: dict[type, tuple[Callable[[Any, Any], None], Callable[[Any], tuple[float, float]]]] = {
    OneOption: (_draw_one_option, _plain_size),
    Map: (_draw_map, _map_size),
    Parallel: (_draw_parallel, _parallel_size),
    Timeline: (_draw_timeline, _timeline_size),
}
