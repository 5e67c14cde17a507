"""A response against one factor, a line per level of another."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import COLOURS, DASHES, layout_of
from podium.lab.report.figures.interaction import Interaction, Spot, Thread

ROOM = 0.12
"""Horizontal offset between lines at a level that is not a number, so that their intervals do not overlap."""
FEW = 30
"""If means differ by less than this factor, ticks between powers of ten are labelled, too."""


def screen(figure: Interaction, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for place, thread in enumerate(figure.threads):
        colour, (_, dash) = _style(thread, place, order)
        named = f"{figure.by} {thread.level}"
        trace: dict[str, Any] = {"name": named, "mode": "lines+markers", "x": _places(figure, place)}
        trace |= {"y": [spot.mean for spot in thread.spots], "line": {"color": colour, "dash": dash}}
        trace |= {"error_y": {"type": "data", "symmetric": False, "color": colour, **_errors(thread)}}
        texts = [f"{named}, {figure.factor} {spot.x}: {spot.mean:.4g} ({spot.seeds} seeds)" for spot in thread.spots]
        traces.append({**trace, "text": texts, "hovertemplate": "%{text}<extra></extra>"})
    layout = layout_of(figure.factor, figure.response, log=figure.log)
    layout["xaxis"] |= {"tickvals": _ticks(figure), "ticktext": [str(level) for level in figure.levels]}
    layout |= {"showlegend": True, "legend": {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}}
    layout["margin"] = {**layout["margin"], "t": 40}
    return {"data": traces, "layout": layout}


def paper(canvas: Any, figure: Interaction, order: Mapping[str, int]) -> None:
    axes = canvas.add_subplot()
    for place, thread in enumerate(figure.threads):
        ends = _errors(thread)
        colour, (dash, _) = _style(thread, place, order)
        look: dict[str, Any] = {"color": colour, "linestyle": dash}
        look |= {"marker": "o", "markersize": 3.5, "linewidth": 1.4, "capsize": 3}
        means = [spot.mean for spot in thread.spots]
        bars = [ends["arrayminus"], ends["array"]]
        axes.errorbar(_places(figure, place), means, yerr=bars, label=str(thread.level), **look)
    if figure.log:
        axes.set_yscale("log")
        _plain_numbers(axes, figure)
    axes.set_xticks(_ticks(figure), [_cut(str(level)) for level in figure.levels])
    axes.set(xlabel=figure.factor, ylabel=figure.response)
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(title=figure.by, fontsize=7, title_fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))


def _plain_numbers(axes: Any, figure: Interaction) -> None:
    """Tick labels such as 20 instead of 2 × 10¹; between powers of ten only if means are close."""
    ticker = importlib.import_module("matplotlib.ticker")
    means = [spot.mean for thread in figure.threads for spot in thread.spots]
    axes.yaxis.set_major_formatter(ticker.StrMethodFormatter("{x:g}"))
    few = max(means) < FEW * min(means)
    axes.yaxis.set_minor_formatter(ticker.StrMethodFormatter("{x:g}") if few else ticker.NullFormatter())
    axes.tick_params(axis="y", which="minor", labelsize=6)


def size(figure: Interaction) -> tuple[float, float]:
    return 5.4, 2.9


def _style(thread: Thread, place: int, order: Mapping[str, int]) -> tuple[str, tuple[str, str]]:
    """Colour and dash of a line: those of its level in the rest of the report, if it has any."""
    place = order.get(str(thread.level), place)
    return COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)]


def _errors(thread: Thread) -> dict[str, list[float]]:
    """The interval above and below the mean; 0 with one seed."""

    def reach(spot: Spot, end: float | None) -> float:
        return 0.0 if end is None else abs(end - spot.mean)

    return {
        "array": [reach(spot, spot.high) for spot in thread.spots],
        "arrayminus": [reach(spot, spot.low) for spot in thread.spots],
    }


def _ticks(figure: Interaction) -> list[float]:
    return [float(level) for level in figure.levels] if figure.numeric else list(map(float, range(len(figure.levels))))


def _places(figure: Interaction, place: int) -> list[float]:
    ticks = dict(zip(figure.levels, _ticks(figure), strict=True))
    aside = 0.0 if figure.numeric else ROOM * (place - (len(figure.threads) - 1) / 2) / max(1, len(figure.threads) / 4)
    return [ticks[spot.x] + aside for spot in figure.threads[place].spots]


def _cut(level: str, most: int = 16) -> str:
    return level if len(level) <= most else f"{level[: most - 1]}…"
