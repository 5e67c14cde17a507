"""Stacked panels of a strategy with phases: metrics, switches, and the values of the rules in force."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import PANEL_PIXELS, layout_of, stroke, style
from podium.lab.report.figures import AXES, Line, Panel, Stack

BOUND = "#b00020"
"""The colour of thresholds."""


def screen(figure: Stack, order: Mapping[str, int]) -> dict[str, Any]:
    colour, *_ = style(figure.cell, order)
    traces: list[dict[str, Any]] = []
    layout = layout_of(AXES["epoch"], "", log=False)
    axis = layout.pop("yaxis")
    height, gap = 1 / len(figure.panels), 0.05
    shapes = [stroke({"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}, "dash") for _, x in figure.marks]
    for place, panel in enumerate(figure.panels):
        name = "y" if place == 0 else f"y{place + 1}"
        top = 1 - place * height
        named = {"title": {"text": _short(panel.quantity)}, "type": "log" if panel.log else "-"}
        named |= {"dtick": "D2"} if panel.log else {}  # a panel is too low for all ticks of a decade
        bottom = 0.0 if place == len(figure.panels) - 1 else top - height + gap
        layout[name.replace("y", "yaxis")] = {**axis, **named, "domain": [bottom, top]}
        for line in panel.lines:
            hover = f"{panel.quantity}, seed {line.seed}: %{{y:.4g}}<extra></extra>"
            drawn = {"x": line.x, "y": line.y, "yaxis": name, "mode": _marked(line, panel), "hovertemplate": hover}
            traces.append({**drawn, "line": {"color": colour, "width": 1.5}, "marker": {"size": 4, "color": colour}})
        if panel.threshold is not None:
            shapes.append(
                stroke({"x0": 0, "x1": 1, "xref": "paper", "yref": name} | _level(panel.threshold), "dot", BOUND)
            )
    layout["xaxis"] |= {"anchor": "y" if len(figure.panels) == 1 else f"y{len(figure.panels)}"}
    return {"data": traces, "layout": {**layout, "shapes": shapes, "height": 60 + PANEL_PIXELS * len(figure.panels)}}


def paper(canvas: Any, figure: Stack, order: Mapping[str, int]) -> None:
    colour, *_ = style(figure.cell, order)
    grid = canvas.subplots(len(figure.panels), 1, sharex=True, squeeze=False)
    for axes, panel in zip(grid[:, 0], figure.panels, strict=True):
        for line in panel.lines:
            dot = "." if "markers" in _marked(line, panel) else None
            axes.plot(line.x, line.y, color=colour, linewidth=1, marker=dot, markersize=4)
        for _, epoch in figure.marks:
            axes.axvline(epoch, color="#777777", linestyle="--", linewidth=0.8)
        if panel.threshold is not None:
            axes.axhline(panel.threshold, color=BOUND, linestyle=":", linewidth=1)
        if panel.log:
            axes.set_yscale("log")
            axes.tick_params(axis="y", which="minor", labelsize=6)
        axes.set_ylabel(_short(panel.quantity))
        axes.grid(alpha=0.25, linewidth=0.5)
    grid[-1, 0].set_xlabel(AXES["epoch"])


def size(figure: Stack) -> tuple[float, float]:
    return 4.8, 0.5 + 1.25 * len(figure.panels)


def _level(y: float) -> dict[str, float]:
    return {"y0": y, "y1": y}


def _marked(line: Line, panel: Panel) -> str:
    """Markers for rules, which have few values, and for single points, which make no line."""
    return "lines+markers" if panel.threshold is not None or len(line.x) == 1 else "lines"


def _short(name: str) -> str:
    """A rule's name without its options, for which a panel has no room."""
    return name.partition(":")[0]
