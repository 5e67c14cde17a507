"""A point per cell: its metric against its cost, both relative to a reference."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from podium.lab.report.drawing.base import COLOURS, INK, layout_of, stroke
from podium.lab.report.figures.tradeoff import Tradeoff

LETTER, LINE = 4.2, 9.0
"""Width of a letter and height of a line, in points."""


def screen(figure: Tradeoff, order: Mapping[str, int]) -> dict[str, Any]:
    places = figure.places
    ends = [(spot.y if end is None else end) - spot.y for spot in places for end in (spot.high, spot.low)]
    trace: dict[str, Any] = {"mode": "markers+text", "x": [spot.x for spot in places], "y": [spot.y for spot in places]}
    trace |= {"text": [spot.name for spot in places], "textposition": "top center", "textfont": {"size": 9}}
    trace |= {"marker": {"color": COLOURS[0]}, "hovertemplate": "%{text}: %{x:.4g}, %{y:.4g}<extra></extra>"}
    errors = {"type": "data", "symmetric": False, "array": ends[::2], "arrayminus": [-end for end in ends[1::2]]}
    layout = layout_of(f"{figure.cost}, ratio", f"{figure.metric}, difference", log=False)
    layout["xaxis"]["type"] = "log"
    across = {"xref": "paper", "x0": 0, "x1": 1}
    layout["shapes"] = [stroke({**across, "y0": y, "y1": y}, "dot") for y in _lines(figure)]
    return {"data": [{**trace, "error_y": errors}], "layout": layout}


def paper(canvas: Any, figure: Tradeoff, order: Mapping[str, int]) -> None:
    axes = canvas.add_subplot()
    for spot in figure.places:
        ends = [[spot.y - (spot.y if spot.low is None else spot.low)], [(spot.high or spot.y) - spot.y]]
        axes.errorbar(spot.x, spot.y, yerr=ends, fmt="o", markersize=4, color=COLOURS[0], elinewidth=0.7, alpha=0.9)
    for y in _lines(figure):
        axes.axhline(y, color=INK, linewidth=0.7, linestyle=":")
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=figure.margin or max(abs(spot.y) for spot in figure.places) or 1.0)
    axes.set(xlabel=f"{figure.cost}, ratio to {figure.reference}", ylabel=f"{figure.metric}, difference")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(importlib.import_module("matplotlib.ticker").StrMethodFormatter("{x:g}"))
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.margins(x=0.12, y=0.08)
    canvas.draw_without_rendering()  # positions are known only after this
    spots = [tuple(72 / canvas.dpi * end for end in axes.transData.transform((s.x, s.y))) for s in figure.places]
    for spot, aside in zip(figure.places, asides(spots, [spot.name for spot in figure.places]), strict=True):
        axes.annotate(spot.name, (spot.x, spot.y), aside, textcoords="offset points", fontsize=6.5, va="center")


def size(figure: Tradeoff) -> tuple[float, float]:
    return 6.4, 4.2


def asides(spots: Sequence[tuple[float, ...]], names: Sequence[str]) -> list[tuple[float, float]]:
    """The offset of each name from its point, in points: the nearest that does not overlap an earlier name."""
    taken: list[tuple[float, float, float]] = []
    found = []
    for (x, y), name in zip(spots, names, strict=True):
        width = LETTER * len(name)
        ways = [(side, LINE / 2 * up) for up in range(-40, 41) for side in (5.0, -5.0 - width)]
        free = (
            (side, up)
            for side, up in sorted(ways, key=lambda way: (abs(way[1]), way[0] < 0))
            if not any(abs(y + up - t) < LINE and x + side < b and a < x + side + width for t, a, b in taken)
        )
        side, up = next(free, (5.0, 0.0))
        taken.append((y + up, x + side, x + side + width))
        found.append((side, up))
    return found


def _lines(figure: Tradeoff) -> list[float]:
    return [0.0] if figure.margin is None else [0.0, -figure.margin]
