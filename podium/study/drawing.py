"""Drawing: matplotlib for paper, plotly for the screen, both from the same figure data.

Paper is an SVG that inherits the page's text colour, so that it reads on light and dark; it holds no date and no random
identifiers, so that the same study gives the same bytes. The screen's figures are plain JSON for plotly's script, which
comes from the installed package and is put into the page: nothing is fetched. Either package may be missing.
"""

from __future__ import annotations

import importlib
import io
import re
import textwrap
from collections.abc import Mapping
from typing import Any

from podium.study.figures import AXES, Bars, Convergence, Course, Figure, Histogram, Line, Panel, Stack, Strip, Trace

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
"""Okabe and Ito's, which colour-blind readers can tell apart; they repeat after eight strategies."""

DASHES = (("-", "solid"), ("--", "dash"), ("-.", "dashdot"), (":", "dot"))
"""Line styles in matplotlib's and plotly's words; with colours, they keep strategies apart in black and white."""

INK = "#010203"
"""Stands for the page's text colour until the SVG is made."""


STALENESS = "staleness (updates applied in between)"
"""How the axis of a histogram is called."""

MOST_TICKS = 16
"""As many columns of a histogram can be named on paper; of more, only some are."""

WIDTHS = (4.2, 3.2, 2.4, 1.8)
"""Later strategies are drawn over earlier ones and thinner, so that equal curves (synchronous ones are) all show."""


def style(cell: str, order: Mapping[str, int]) -> tuple[str, tuple[str, str], float]:
    """A strategy's colour, dash and line width in pixels: the same in every figure of a report."""
    place = order[cell]
    return COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], WIDTHS[min(place, len(WIDTHS) - 1)]


def plotly_script() -> str | None:
    """Plotly's own script, from the installed package; None without one."""
    try:
        return str(importlib.import_module("plotly.offline").get_plotlyjs())
    except ImportError:
        return None


def to_plotly(figure: Figure, order: Mapping[str, int]) -> dict[str, Any]:
    """A figure as plotly's JSON (`data`, `layout`)."""
    if isinstance(figure, Bars):
        return _plotly_bars(figure, order)
    if isinstance(figure, Histogram):
        return _plotly_histogram(figure, order)
    if isinstance(figure, Stack):
        return _plotly_stack(figure, order)
    if isinstance(figure, Course):
        return _plotly_course(figure)
    traces = []
    for curve in figure.curves:
        colour, (_, dash), width = style(curve.cell, order)
        band = {"x": [*curve.x, *reversed(curve.x)], "y": [*curve.high, *reversed(curve.low)], "fill": "toself"}
        quiet = {"mode": "lines", "hoverinfo": "skip", "showlegend": False}
        traces.append({**band, **quiet, "line": {"width": 0}, "fillcolor": _fade(colour, 0.15)})
        for line in curve.lines:
            thin = {"color": _fade(colour, 0.35), "width": 1}
            hover = f"{curve.cell}, seed {line.seed}: %{{y:.4g}}<extra></extra>"
            traces.append({**quiet, "x": line.x, "y": line.y, "line": thin, "hoverinfo": "all", "hovertemplate": hover})
        thick = {"color": colour, "width": width, "dash": dash}
        hover = f"{curve.cell}, median: %{{y:.4g}}<extra></extra>"
        traces.append({"x": curve.x, "y": curve.y, "mode": "lines", "line": thick, "hovertemplate": hover})
    return {"data": traces, "layout": _layout(AXES[figure.axis], figure.quantity, log=figure.log)}


LABEL = 28
"""Columns of a strategy's name beside its bar; a longer one goes on over three lines at most."""


def _label(cell: str) -> list[str]:
    """A strategy's name in lines, broken before its options; phases can be long, and the tables have them whole."""
    lines = [line for part in cell.replace(":", ":\n", 1).split("\n") for line in textwrap.wrap(part, LABEL)]
    return lines if len(lines) <= 3 else [*lines[:2], lines[2][: LABEL - 2] + " …"]


def _plotly_bars(figure: Bars, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for bar in figure.bars:
        colour, *_ = style(bar.cell, order)
        trace: dict[str, Any] = {"type": "bar", "x": [bar.mean], "y": [bar.cell], "orientation": "h"}
        trace |= {"marker": {"color": _fade(colour, 0.75)}, "hovertemplate": "mean %{x:.4g}<extra></extra>"}
        if bar.low is not None and bar.high is not None:
            up, down = bar.high - bar.mean, bar.mean - bar.low
            trace["error_x"] = {"type": "data", "array": [up], "arrayminus": [down], "symmetric": False}
        traces.append(trace)
        dots = {"x": bar.points, "y": [bar.cell] * len(bar.points), "mode": "markers"}
        traces.append({**dots, "marker": {"color": "#777", "size": 6, "symbol": "circle-open"}, "hoverinfo": "x"})
    layout = _layout(figure.name, "", log=False)
    layout["height"] = 70 + 45 * len(figure.bars)
    layout["yaxis"] |= {"autorange": "reversed", "ticks": "outside", "ticklen": 5, "tickcolor": "rgba(0,0,0,0)"}
    named = {bar.cell: "<br>".join(_label(bar.cell)) for bar in figure.bars if len(bar.cell) > LABEL}
    if named:  # one whole name would leave the bars no room
        layout["yaxis"] |= {"tickvals": [bar.cell for bar in figure.bars]}
        layout["yaxis"] |= {"ticktext": [named.get(bar.cell, bar.cell) for bar in figure.bars]}
    layout["xaxis"] |= {"rangemode": "tozero"}
    return {"data": traces, "layout": layout}


def _plotly_histogram(figure: Histogram, order: Mapping[str, int]) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for layer, colour in zip(figure.layers, _layer_colours(figure, order), strict=True):
        columns = {"type": "bar", "name": layer.name, "x": figure.columns, "y": layer.updates}
        hover = f"{layer.name}, staleness %{{x}}: %{{y:,}}<extra></extra>"
        traces.append({**columns, "marker": {"color": _fade(colour, 0.75)}, "hovertemplate": hover})
    layout = _layout(STALENESS, "updates", log=False)
    layout["xaxis"] |= {"type": "category"}  # `65–128` has no place on an axis of numbers
    layout |= {"barmode": "stack", "bargap": 0.1, "showlegend": len(figure.layers) > 1}
    return {"data": traces, "layout": layout}


PANEL_PIXELS = 150
"""How high one panel of a stack is on the screen."""


def _plotly_stack(figure: Stack, order: Mapping[str, int]) -> dict[str, Any]:
    colour, *_ = style(figure.cell, order)
    traces: list[dict[str, Any]] = []
    layout = _layout(AXES["epoch"], "", log=False)
    axis = layout.pop("yaxis")
    height, gap = 1 / len(figure.panels), 0.05
    shapes = [_stroke({"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}, "dash") for _, x in figure.marks]
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
                _stroke({"x0": 0, "x1": 1, "xref": "paper", "yref": name} | _level(panel.threshold), "dot", BOUND)
            )
    layout["xaxis"] |= {"anchor": "y" if len(figure.panels) == 1 else f"y{len(figure.panels)}"}
    return {"data": traces, "layout": {**layout, "shapes": shapes, "height": 60 + PANEL_PIXELS * len(figure.panels)}}


def _plotly_course(figure: Course) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    layout = _layout(AXES["step"], "", log=False)
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
    shapes = [_stroke({"x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper"}, "dash") for x in figure.marks]
    layout["xaxis"] |= {"anchor": "y" if len(figure.strips) == 1 else f"y{len(figure.strips)}"}
    layout |= {"showlegend": True, "shapes": shapes, "height": 60 + PANEL_PIXELS * len(figure.strips)}
    return {"data": traces, "layout": layout}


def _traced(strip: Strip) -> list[tuple[Trace, str, tuple[str, str], float]]:
    """Each trace with its colour, dash and width in pixels: a worker's colour is the same in all strips.

    Later ones are thinner, so that equal lines all show.
    """
    found = [
        (trace, COLOURS[i % len(COLOURS)], DASHES[0], 0.7 * WIDTHS[min(i, len(WIDTHS) - 1)])
        for i, trace in enumerate(strip.traces)
    ]
    return found if strip.whole is None else [*found, (strip.whole, INK, DASHES[3], 1.2)]


BOUND = "#b00020"
"""The colour of thresholds."""


def _stroke(ends: dict[str, Any], dash: str, colour: str = "#777") -> dict[str, Any]:
    return {"type": "line", **ends, "line": {"color": colour, "width": 1, "dash": dash}}


def _level(y: float) -> dict[str, float]:
    return {"y0": y, "y1": y}


def _marked(line: Line, panel: Panel) -> str:
    """A rule has few values, and a single one would make no line."""
    return "lines+markers" if panel.threshold is not None or len(line.x) == 1 else "lines"


def _short(name: str) -> str:
    """A rule's name without its options, which would not fit beside a panel."""
    return name.partition(":")[0]


def _layer_colours(figure: Histogram, order: Mapping[str, int]) -> list[str]:
    """One colour per worker; the strategy's own where workers are drawn as one."""
    return list(COLOURS[: len(figure.layers)]) if len(figure.layers) > 1 else [style(figure.cell, order)[0]]


def _layout(x: str, y: str, *, log: bool) -> dict[str, Any]:
    axis = {"automargin": True, "zeroline": False, "gridcolor": "rgba(128,128,128,0.25)"}
    return {
        "showlegend": False,
        "margin": {"l": 50, "r": 10, "t": 10, "b": 45},
        "height": 300,
        "hovermode": "closest",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "xaxis": {**axis, "title": {"text": x}},
        "yaxis": {**axis, "title": {"text": y}, "type": "log" if log else "-"},
    }


def to_svg(figure: Figure, order: Mapping[str, int]) -> str | None:
    """A figure as one `<svg>` element; None without matplotlib."""
    try:
        matplotlib = importlib.import_module("matplotlib")
        backend = importlib.import_module("matplotlib.backends.backend_svg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    settings = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9, "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "lines.solid_capstyle": "butt", "font.family": "DejaVu Sans"}
    settings |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK)
    # A context of its own, and no pyplot: the caller's figures and settings stay as they are.
    with matplotlib.rc_context(settings):
        canvas = figures.Figure(figsize=(4.8, _height(figure)), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        if isinstance(figure, Stack):
            _draw_stack(canvas, figure, order)
        elif isinstance(figure, Course):
            _draw_course(canvas, figure)
        elif isinstance(figure, Bars):
            _draw_bars(canvas.add_subplot(), figure, order)
        elif isinstance(figure, Histogram):
            _draw_histogram(canvas.add_subplot(), figure, order)
        else:
            _draw_curves(canvas.add_subplot(), figure, order)
        out = io.StringIO()
        canvas.savefig(out, format="svg", transparent=True, metadata={"Date": None})
    return _embed(out.getvalue())


def _height(figure: Figure) -> float:
    """In inches."""
    if isinstance(figure, Stack):
        return 0.5 + 1.25 * len(figure.panels)
    if isinstance(figure, Course):
        return 0.5 + 1.4 * len(figure.strips)
    return 0.55 + 0.42 * len(figure.bars) if isinstance(figure, Bars) else 2.9


def _draw_curves(axes: Any, figure: Convergence, order: Mapping[str, int]) -> None:
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


def _draw_bars(axes: Any, figure: Bars, order: Mapping[str, int]) -> None:
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


def _draw_histogram(axes: Any, figure: Histogram, order: Mapping[str, int]) -> None:
    places = range(len(figure.columns))
    floor = [0] * len(figure.columns)
    for layer, colour in zip(figure.layers, _layer_colours(figure, order), strict=True):
        axes.bar(places, layer.updates, bottom=floor, color=colour, alpha=0.75, width=0.9, label=layer.name)
        floor = [low + updates for low, updates in zip(floor, layer.updates, strict=True)]
    every = -(-len(places) // MOST_TICKS)
    named = [place for place in places if place % every == 0 or not figure.columns[place].isdecimal()]
    narrow = {} if len(named) == len(places) <= MOST_TICKS // 2 else {"rotation": 90, "fontsize": 6}
    axes.set_xticks(named, [figure.columns[place] for place in named], **narrow)
    room = max(0.6, (5 - len(places)) / 2)  # one column alone would fill the whole width
    axes.set_xlim(-room, len(places) - 1 + room)
    axes.set(xlabel=STALENESS, ylabel="updates")
    axes.grid(axis="y", alpha=0.25, linewidth=0.5)
    if len(figure.layers) > 1:
        axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))  # beside it: it hides nothing


def _draw_stack(canvas: Any, figure: Stack, order: Mapping[str, int]) -> None:
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


def _draw_course(canvas: Any, figure: Course) -> None:
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


def _embed(svg: str) -> str:
    """Only the element, scalable, in the page's ink; group names go, since they would repeat from figure to figure."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' xmlns(:xlink)?="[^"]*"', "", body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", body, count=1)
    body = body.replace("<svg ", '<svg aria-hidden="true" ', 1)
    return body.replace(INK, "currentColor")


def _fade(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"
