"""Convergence curves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import faded, layout_of, style
from podium.lab.report.figures import AXES, Convergence


def screen(figure: Convergence, order: Mapping[str, int]) -> dict[str, Any]:
    traces = []
    for curve in figure.curves:
        colour, (_, dash), width = style(curve.cell, order)
        band = {"x": [*curve.x, *reversed(curve.x)], "y": [*curve.high, *reversed(curve.low)], "fill": "toself"}
        quiet = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
        traces.append({**band, **quiet, "line": {"width": 0}, "fillcolor": faded(colour, 0.15)})
        for line in curve.lines:
            thin = {"color": faded(colour, 0.35), "width": 1}
            hover = f"{curve.cell}, seed {line.seed}: %{{y:.4g}}<extra></extra>"
            traces.append({**quiet, "x": line.x, "y": line.y, "line": thin, "hoverinfo": "all", "hovertemplate": hover})
        thick = {"color": colour, "width": width, "dash": dash}
        hover = f"{curve.cell}, median: %{{y:.4g}}<extra></extra>"
        traces.append({"x": curve.x, "y": curve.y, "mode": "lines", "line": thick, "hovertemplate": hover})
    return {"data": traces, "layout": layout_of(AXES[figure.axis], figure.quantity, log=figure.log)}


def paper(canvas: Any, figure: Convergence, order: Mapping[str, int]) -> None:
    axes = canvas.add_subplot()
    for curve in figure.curves:
        colour, (dash, _), width = style(curve.cell, order)
        axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
        for line in curve.lines:
            axes.plot(line.x, line.y, color=colour, alpha=0.35, linewidth=0.7)
        axes.plot(curve.x, curve.y, color=colour, linestyle=dash, linewidth=0.75 * width)
    if figure.log:
        axes.set_yscale("log")
    axes.set(xlabel=AXES[figure.axis], ylabel=figure.quantity)
    axes.grid(alpha=0.25, linewidth=0.5)


def size(figure: Convergence) -> tuple[float, float]:
    return 4.8, 2.9
