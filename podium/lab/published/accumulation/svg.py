"""The figure: the time of an epoch over nodes, one panel per model and link; and errors of the models of time."""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping, Sequence
from typing import Any

from podium.lab.published.accumulation.tables import Panel

_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#d55e00")
"""Of Okabe and Ito's, which colour-blind readers can tell apart."""


def figure(panels: Sequence[Panel], titles: Mapping[str, str]) -> str:
    """An SVG: a row of panels for each link, errors at the right."""
    matplotlib = importlib.import_module("matplotlib")
    backend = importlib.import_module("matplotlib.backends.backend_svg")
    figures = importlib.import_module("matplotlib.figure")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9, "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "font.family": "DejaVu Sans"}
    models = list(dict.fromkeys(line.model for panel in panels for line in panel.lines))
    with matplotlib.rc_context(settings):
        wide = len(models) + 1
        canvas = figures.Figure(figsize=(3.7 * wide, 3.3 * len(panels)), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        for down, panel in enumerate(panels):
            for right, model in enumerate(models):
                axes = canvas.add_subplot(len(panels), wide, down * wide + right + 1)
                _times(axes, panel, model, titles.get(model, model))
            _errors(canvas.add_subplot(len(panels), wide, (down + 1) * wide), panel)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _times(axes: Any, panel: Panel, model: str, title: str) -> None:
    mine = [line for line in panel.lines if line.model == model]
    for i, batch in enumerate(dict.fromkeys(line.batch for line in mine)):
        some = sorted((line for line in mine if line.batch == batch), key=lambda line: line.nodes)
        nodes, colour = [line.nodes for line in some], _COLOURS[i % len(_COLOURS)]
        often, seldom = [line.often_s.mean for line in some], [line.seldom_s.mean for line in some]
        axes.plot(nodes, often, "o-", color=colour, markersize=4, linewidth=1.2, label=f"batch {batch}, every batch")
        label = f"batch {batch}, every {some[0].every}"
        axes.plot(nodes, seldom, "s--", color=colour, markersize=4, linewidth=1.2, fillstyle="none", label=label)
    axes.set_yscale("log")
    axes.set_xticks(sorted({line.nodes for line in mine}))
    axes.set_title(f"{title}, {panel.mbit} Mbit/s", fontsize=9)
    axes.set(xlabel="nodes", ylabel="an epoch, virtual s")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.margins(y=0.3)  # room for the legend
    axes.legend(fontsize=6, framealpha=0.9, edgecolor="none", ncols=2, loc="upper center")


def _errors(axes: Any, panel: Panel) -> None:
    names = [one.model for one in panel.judged]
    for place, one in enumerate(panel.judged):
        errors = [max(100 * abs(error), 0.01) for error in one.errors.values()]
        axes.plot(errors, [place] * len(errors), "|", color=_COLOURS[place % len(_COLOURS)], markersize=12)
        axes.plot(100 * one.median_error, place, "o", color="#000000", markersize=4)
    axes.set_xscale("log")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(f"Left-out cells, {panel.mbit} Mbit/s", fontsize=9)
    axes.set_xlabel("error of the prediction, % (dot: median)")
    axes.grid(alpha=0.25, linewidth=0.5)
