"""A bar per strategy."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import INK, faded, layout_of, style
from podium.lab.report.figures import Bars

LABEL = 28
"""Characters per line of a strategy's name beside its bar; a name takes up to three lines."""


def screen(figure: Bars, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for bar in figure.bars:
        colour, *_ = style(bar.cell, order)
        trace: dict[str, Any] = {"type": "bar", "x": [bar.mean], "y": [bar.cell], "orientation": "h"}
        trace |= {"marker": {"color": faded(colour, 0.75)}, "hovertemplate": "mean %{x:.4g}<extra></extra>"}
        if bar.low is not None and bar.high is not None:
            up, down = bar.high - bar.mean, bar.mean - bar.low
            trace["error_x"] = {"type": "data", "array": [up], "arrayminus": [down], "symmetric": False}
        traces.append(trace)
        dots = {"x": bar.points, "y": [bar.cell] * len(bar.points), "mode": "markers"}
        traces.append({**dots, "marker": {"color": "#777", "size": 6, "symbol": "circle-open"}, "hoverinfo": "x"})
    layout = layout_of("", "", log=False)  # the caption has the same text, and a narrow screen has no room for it
    layout["height"] = 70 + 45 * len(figure.bars)
    layout["yaxis"] |= {"autorange": "reversed", "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
    named = {bar.cell: "<br>".join(_label(bar.cell)) for bar in figure.bars if len(bar.cell) > LABEL}
    if named:  # a long name would leave no room for the bars
        layout["yaxis"] |= {"tickvals": [bar.cell for bar in figure.bars]}
        layout["yaxis"] |= {"ticktext": [named.get(bar.cell, bar.cell) for bar in figure.bars]}
    layout["xaxis"] |= {"rangemode": "tozero", "nticks": 5, "tickangle": 0}
    return {"data": traces, "layout": layout}


def paper(canvas: Any, figure: Bars, order: Mapping[str, int]) -> None:
    axes = canvas.add_subplot()
    for place, bar in enumerate(figure.bars):
        colour, *_ = style(bar.cell, order)
        axes.barh(place, bar.mean, color=colour, alpha=0.75, height=0.6)
        if bar.low is not None and bar.high is not None:
            axes.errorbar(bar.mean, place, xerr=[[bar.mean - bar.low], [bar.high - bar.mean]], color=INK, capsize=3)
        axes.plot(bar.points, [place] * len(bar.points), "o", markersize=3.5, markerfacecolor="none", color=INK)
    axes.set_yticks(range(len(figure.bars)), ["\n".join(_label(bar.cell)) for bar in figure.bars])
    axes.set(xlabel=figure.name)
    axes.set_xlim(left=0)
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.25, linewidth=0.5)


def size(figure: Bars) -> tuple[float, float]:
    return 4.8, 0.55 + 0.42 * len(figure.bars)


def _label(cell: str) -> list[str]:
    """A strategy's name in at most three lines, broken before its options; the tables have it in full."""
    lines = [line for part in cell.replace(":", ":\n", 1).split("\n") for line in textwrap.wrap(part, LABEL)]
    return lines if len(lines) <= 3 else [*lines[:2], lines[2][: LABEL - 2] + " …"]
