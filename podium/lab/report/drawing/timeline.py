"""A lane per worker for a few steps of a run, and below it the whole run with its events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import COLOURS, layout_of
from podium.lab.report.figures.timeline import Event, Timeline
from podium.records.timeline import KINDS

KIND_COLOURS = dict(zip(KINDS, (COLOURS[i] for i in (0, 5, 1, 2, 3, 6, 7)), strict=True))
EVENTS = {"lost": "#b00020", "failed": "#b00020", "switch": COLOURS[3], "balance": COLOURS[4]}
"""Colours of events; those not named here are grey."""
LANE_PIXELS = 26


def screen(figure: Timeline, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for kind in figure.kinds:
        bars = [(lane.name, s) for lane in figure.lanes for s in lane.stretches if s.kind == kind]
        trace: dict[str, Any] = {"type": "bar", "orientation": "h", "name": KINDS[kind], "width": 0.8}
        trace |= {"y": [name for name, _ in bars], "base": [s.begin_ms for _, s in bars]}
        trace |= {"x": [s.end_ms - s.begin_ms for _, s in bars], "marker": {"color": KIND_COLOURS[kind]}}
        traces.append({**trace, "hovertemplate": f"{KINDS[kind]}, %{{x:.4g}} ms<extra>%{{y}}</extra>"})
    dots = {"x": [event.seconds for event in figure.events], "y": [0] * len(figure.events), "mode": "markers"}
    look = {"size": 11, "symbol": "line-ns-open", "color": [_colour(event) for event in figure.events]}
    words = [f"{event.kind} at {event.seconds:.4g} s: {event.text}" for event in figure.events]
    told = {"text": words, "hovertemplate": "%{text}<extra></extra>", "showlegend": False}
    traces.append({**dots, **told, "marker": {**look, "line": {"width": 2}}, "xaxis": "x2", "yaxis": "y2"})
    layout = layout_of(_below(figure), "", log=False)
    x, y = layout["xaxis"], layout["yaxis"]
    height = 190 + LANE_PIXELS * len(figure.lanes)
    strip = 30 / (height - 115)
    layout["xaxis"] = {**x, "range": [0, _width(figure)], "anchor": "y"}
    layout["yaxis"] = {**y, "autorange": "reversed", "domain": [strip + 58 / (height - 115), 1]}
    layout["xaxis2"] = {**x, "title": {"text": _whole(figure)}, "range": [0, figure.length_s], "anchor": "y2"}
    layout["yaxis2"] = {"domain": [0, strip], "range": [-1, 1], "visible": False, "anchor": "x2", "fixedrange": True}
    begin, end = figure.window
    shade = {
        "type": "rect",
        "xref": "x2",
        "yref": "y2",
        "x0": begin,
        "x1": end,
        "y0": -1,
        "y1": 1,
        "line": {"width": 0},
    }
    layout["shapes"] = [{**shade, "fillcolor": "rgba(128,128,128,0.35)"}]
    layout |= {"barmode": "overlay", "showlegend": True, "height": height, "bargap": 0.15}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    layout["margin"] = {**layout["margin"], "t": 50}
    return {"data": traces, "layout": layout}


def paper(canvas: Any, figure: Timeline, order: Mapping[str, int]) -> None:
    lanes = len(figure.lanes)
    top, bottom = canvas.subplots(2, 1, height_ratios=[max(2, lanes), 0.9])
    for kind in figure.kinds:
        for place, lane in enumerate(figure.lanes):
            bars = [(s.begin_ms, s.end_ms - s.begin_ms) for s in lane.stretches if s.kind == kind]
            if bars:
                named = {} if any(p.get_label() == KINDS[kind] for p in top.collections) else {"label": KINDS[kind]}
                top.broken_barh(bars, (place - 0.4, 0.8), facecolors=KIND_COLOURS[kind], linewidth=0, **named)
    top.set_yticks(range(lanes), [lane.name for lane in figure.lanes], fontsize=7 if lanes > 8 else None)
    top.set_ylim(lanes - 0.5, -0.5)
    top.set_xlim(0, _width(figure))
    top.set_xlabel(_below(figure))
    columns = 3 if len(figure.kinds) > 2 else 2
    top.legend(fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=columns)
    bottom.axvspan(*figure.window, color="#808080", alpha=0.35, linewidth=0)
    for event in figure.events:
        bottom.axvline(event.seconds, color=_colour(event), linewidth=1.2)
    bottom.set(xlim=(0, figure.length_s), yticks=[], xlabel=_whole(figure))
    bottom.spines["left"].set_visible(False)


def size(figure: Timeline) -> tuple[float, float]:
    return 6.4, 1.9 + 0.22 * len(figure.lanes)


def _width(figure: Timeline) -> float:
    """Of the window, in ms."""
    return (figure.window[1] - figure.window[0]) * 1e3


def _below(figure: Timeline) -> str:
    return f"ms since {figure.window[0]:.4g} s (steps {figure.steps[0]} to {figure.steps[1]})"


def _whole(figure: Timeline) -> str:
    kinds = list(dict.fromkeys(event.kind for event in figure.events))
    return f"seconds (grey: the window){', lines: ' + ', '.join(kinds) if kinds else ''}"


def _colour(event: Event) -> str:
    return EVENTS.get(event.kind, "#777777")
