"""Shares and step times of uneven workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import COLOURS, DASHES, INK, PANEL_PIXELS, WIDTHS, layout_of, stroke
from podium.lab.report.figures import AXES, Course, Strip, Trace


def screen(figure: Course, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    layout = layout_of(AXES["step"], "", log=False)
    axis = layout.pop("yaxis")
    height, gap = 1 / len(figure.strips), 0.06
    for place, strip in enumerate(figure.strips):
        name = "y" if place == 0 else f"y{place + 1}"
        top, bottom = 1 - place * height, 1 - (place + 1) * height
        domain = [bottom + (gap if place < len(figure.strips) - 1 else 0), top]
        titled = {"title": {"text": strip.quantity}, "rangemode": "tozero", "domain": domain}
        layout[name.replace("y", "yaxis")] = {**axis, **titled}
        for trace, colour, (_, dash), width in _traced(strip):
            hover = f"{trace.name}, step %{{x}}: %{{y:.4g}} {strip.quantity}<extra></extra>"
            drawn = {"x": trace.x, "y": trace.y, "yaxis": name, "mode": "lines", "name": trace.name}
            shown = {"legendgroup": trace.name, "showlegend": place == 0 or trace is strip.whole}
            line = {"color": "#777" if colour == INK else colour, "width": width, "dash": dash}
            traces.append({**drawn, **shown, "line": line, "hovertemplate": hover})
    shapes = [stroke({"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}, "dash") for x in figure.marks]
    layout["xaxis"] |= {"anchor": "y" if len(figure.strips) == 1 else f"y{len(figure.strips)}"}
    layout |= {"showlegend": True, "shapes": shapes, "height": 60 + PANEL_PIXELS * len(figure.strips)}
    return {"data": traces, "layout": layout}


def paper(canvas: Any, figure: Course, order: Mapping[str, int]) -> None:
    grid = canvas.subplots(len(figure.strips), 1, sharex=True, squeeze=False)
    for axes, strip in zip(grid[:, 0], figure.strips, strict=True):
        for trace, colour, (dash, _), width in _traced(strip):
            values = [float("nan") if value is None else value for value in trace.y]  # a gap in the line
            named = trace.name if axes is grid[0, 0] or trace is strip.whole else None
            axes.plot(trace.x, values, color=colour, linestyle=dash, linewidth=0.75 * width, label=named)
        for step in figure.marks:
            axes.axvline(step, color="#777777", linestyle="--", linewidth=0.6)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(strip.quantity)
        axes.grid(alpha=0.25, linewidth=0.5)
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    grid[-1, 0].set_xlabel(AXES["step"])


def size(figure: Course) -> tuple[float, float]:
    return 4.8, 0.5 + 1.4 * len(figure.strips)


def _traced(strip: Strip) -> list[tuple[Trace, str, tuple[str, str], float]]:
    """Each trace with its colour, dash and width in pixels; a worker has the same colour in all strips.

    Later lines are thinner, so that equal lines are all visible.
    """
    found = [
        (trace, COLOURS[i % len(COLOURS)], DASHES[0], 0.7 * WIDTHS[min(i, len(WIDTHS) - 1)])
        for i, trace in enumerate(strip.traces)
    ]
    return found if strip.whole is None else [*found, (strip.whole, INK, DASHES[3], 1.2)]
