"""Histograms of staleness."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import COLOURS, faded, layout_of, style
from podium.lab.report.figures import Histogram

STALENESS = "staleness (updates applied in between)"
"""The label of the x axis."""


MOST_TICKS = 16
"""The most columns that are all labelled on paper; of more, only some are."""


def screen(figure: Histogram, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for layer, colour in zip(figure.layers, _layer_colours(figure, order), strict=True):
        columns = {"type": "bar", "name": layer.name, "x": figure.columns, "y": layer.updates}
        hover = f"{layer.name}, staleness %{{x}}: %{{y:,}}<extra></extra>"
        traces.append({**columns, "marker": {"color": faded(colour, 0.75)}, "hovertemplate": hover})
    layout = layout_of(STALENESS, "updates", log=False)
    layout["xaxis"] |= {"type": "category"}  # `65–128` is not a number
    layout |= {"barmode": "stack", "bargap": 0.1, "showlegend": len(figure.layers) > 1}
    return {"data": traces, "layout": layout}


def paper(canvas: Any, figure: Histogram, order: Mapping[str, int]) -> None:
    axes = canvas.add_subplot()
    places = range(len(figure.columns))
    floor = [0] * len(figure.columns)
    for layer, colour in zip(figure.layers, _layer_colours(figure, order), strict=True):
        axes.bar(places, layer.updates, bottom=floor, color=colour, alpha=0.75, width=0.9, label=layer.name)
        floor = [low + updates for low, updates in zip(floor, layer.updates, strict=True)]
    every = -(-len(places) // MOST_TICKS)
    named = [place for place in places if place % every == 0 or not figure.columns[place].isdecimal()]
    narrow = {} if len(named) == len(places) <= MOST_TICKS // 2 else {"rotation": 90, "fontsize": 6}
    axes.set_xticks(named, [figure.columns[place] for place in named], **narrow)
    room = max(0.6, (5 - len(places)) / 2)  # a single column would fill the whole width
    axes.set_xlim(-room, len(places) - 1 + room)
    axes.set(xlabel=STALENESS, ylabel="updates")
    axes.grid(axis="y", alpha=0.25, linewidth=0.5)
    if len(figure.layers) > 1:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # outside: it hides nothing


def size(figure: Histogram) -> tuple[float, float]:
    return 4.8, 2.9


def _layer_colours(figure: Histogram, order: Mapping[str, int]) -> list[str]:
    """One colour per worker; the strategy's colour if workers are drawn as one."""
    return list(COLOURS[: len(figure.layers)]) if len(figure.layers) > 1 else [style(figure.cell, order)[0]]
