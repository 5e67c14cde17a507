"""The figure: accuracy over virtual time, one panel per setting."""

from __future__ import annotations

import importlib
import io
from collections.abc import Sequence
from typing import Any

from podium.lab.published.switching.design import (
    ALL_REDUCE,
    ALL_REDUCE_FP16,
    ASYNC_FP16,
    SWITCH,
    SWITCH_FP16,
)
from podium.lab.published.switching.tables import Panel
from podium.lab.study.rows import deciding_rows
from podium.lab.study.store import Row

_COLOURS = {
    ALL_REDUCE.name: "#000000",
    ALL_REDUCE_FP16.name: "#7f7f7f",
    SWITCH.name: "#0072b2",
    SWITCH_FP16.name: "#56b4e9",
    ASYNC_FP16.name: "#d55e00",
}
"""Of Okabe and Ito's, which colour-blind readers can tell apart."""

_OTHERS = ("#009e73", "#cc79a7", "#8c6d31", "#e69f00", "#999933")


def figure(panels: Sequence[Panel], rows: Sequence[Row]) -> str:
    """An SVG with one panel per setting: time in parts of all-reduce's against accuracy."""
    matplotlib = importlib.import_module("matplotlib")
    backend = importlib.import_module("matplotlib.backends.backend_svg")
    figures = importlib.import_module("matplotlib.figure")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9, "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        canvas = figures.Figure(figsize=(4.6 * len(panels) + 0.4, 4.2), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        for place, panel in enumerate(panels, 1):
            mine = deciding_rows([row for row in rows if row["setting"] == panel.setting])
            _draw(canvas.add_subplot(1, len(panels), place), panel, mine)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _draw(axes: Any, panel: Panel, rows: Sequence[Row]) -> None:
    done = [row for row in rows if row["status"] == "finished"]
    whole = {row["seed"]: row["seconds"] for row in done if row["cell"] == ALL_REDUCE.name}
    arms = [line.arm for line in panel.lines if not line.arm.endswith("dropped")]
    spare = iter(_OTHERS * len(arms))
    finals = []
    for arm in arms:
        colour = _COLOURS.get(arm) or next(spare)
        for i, row in enumerate(row for row in done if row["cell"] == arm and row["seed"] in whole):
            history, unit = row["history"], whole[row["seed"]]
            times = [seconds / unit for seconds in history["seconds"]]
            accuracy = [100 * value for value in history["accuracy"]]
            axes.plot(times, accuracy, color=colour, linewidth=0.8, alpha=0.75, label=arm if i == 0 else None)
            axes.plot(times[-1], accuracy[-1], "o", color=colour, markersize=3)
            for switch in row["switches"]:
                axes.axvline(switch["seconds"] / unit, color=colour, linewidth=0.5, linestyle=":")
            finals.append(accuracy[-1])
    span = max(finals) - sorted(finals)[len(finals) // 4]
    axes.set_ylim(max(0.0, max(finals) - max(25.0, 3 * span)), min(100.0, max(finals) + 2))
    axes.set_xlim(0, None)
    axes.set_title(panel.title, fontsize=9)
    axes.set(xlabel="virtual time, in parts of all-reduce's", ylabel="test accuracy, %")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(fontsize=6, loc="lower right", framealpha=0.9, edgecolor="none")
