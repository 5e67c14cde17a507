"""The two figures, drawn to SVG: microseconds per model-step over the number of trials, and joules per trial."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from podium.lab.published.one_gpu.design import TITLES
from podium.lab.published.one_gpu.tables import Panel, Spot, curves, main_panels
from podium.lab.report.format import plain
from podium.lab.study.store import Row

_LOOKS = {
    "eager": ("#999999", "o", "-"),
    "graph": ("#000000", "s", "-"),
    "compiled": ("#999999", "D", "--"),
    "processes": ("#e69f00", "o", "-"),
    "processes-graph": ("#e69f00", "s", "--"),
    "mps": ("#d55e00", "o", "-"),
    "mps-graph": ("#d55e00", "s", "--"),
    "ray": ("#cc79a7", "o", "-"),
    "ray-mps": ("#cc79a7", "s", "--"),
    "streams": ("#009e73", "^", "-"),
    "fused": ("#56b4e9", "o", "-"),
    "fused-compiled": ("#0072b2", "*", "-"),
}
"""Colour, marker and line by arm: one colour per idea, of Okabe and Ito's for colour-blind readers."""


class Curves(NamedTuple):
    """One panel of the first figure."""

    title: str
    precision: str
    arms: Mapping[str, Sequence[Spot]]


class Bar(NamedTuple):
    """One arm's joules per trial."""

    arm: str
    j: float
    j_over_idle: float | None
    is_hint: bool
    line: int


class Bars(NamedTuple):
    """One panel of the second figure."""

    title: str
    bars: Sequence[Bar]


def find_curves(rows: Sequence[Row]) -> list[Curves]:
    found = []
    for panel in main_panels(rows):
        arms = curves(rows, panel.task, panel.precision)
        if arms:
            found.append(Curves(TITLES.get(panel.task, panel.task), panel.precision, arms))
    return found


def find_bars(rows: Sequence[Row]) -> list[Bars]:
    """The arms of each main cell that have an energy, the least first; empty where no energy could be read."""
    found = [Bars(f"{panel.title}, {panel.trials} trials", _bars(panel)) for panel in main_panels(rows)]
    return [one for one in found if one.bars]


def _bars(panel: Panel) -> list[Bar]:
    bars = [
        Bar(line.arm, line.figures.j, line.figures.j_over_idle, line.figures.j_is_hint, line.line)
        for line in panel.lines
        if line.figures.j is not None
    ]
    return sorted(bars, key=lambda bar: bar.j)


def draw_curves(panels: Sequence[Curves]) -> str:
    return _svg(len(panels), 3.6, lambda axes, place: _draw_curves(axes, panels[place]))


def draw_bars(panels: Sequence[Bars]) -> str:
    return _svg(len(panels), 3.4, lambda axes, place: _draw_bars(axes, panels[place]))


def _svg(count: int, height: float, draw: Callable[[Any, int], None]) -> str:
    matplotlib = importlib.import_module("matplotlib")
    backend = importlib.import_module("matplotlib.backends.backend_svg")
    figures = importlib.import_module("matplotlib.figure")
    settings = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9, "axes.spines.top": False}
    settings |= {"axes.spines.right": False, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(settings):
        canvas = figures.Figure(figsize=(4.4 * count + 0.4, height), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        for place in range(count):
            draw(canvas.add_subplot(1, count, place + 1), place)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def _draw_curves(axes: Any, panel: Curves) -> None:
    for arm, spots in panel.arms.items():
        colour, marker, dashes = _LOOKS.get(arm, ("#8c6d31", "v", "-"))
        axes.plot([s.trials for s in spots], [s.us for s in spots], dashes, color=colour, linewidth=1, label=arm)
        for spot in spots:
            fill = colour if spot.measured else "white"
            axes.plot(spot.trials, spot.us, marker, color=colour, markerfacecolor=fill, markersize=5)
    counts = sorted({spot.trials for spots in panel.arms.values() for spot in spots})
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_xticks([], minor=True)
    axes.set_title(f"{panel.title}, {panel.precision}", fontsize=9)
    axes.set(xlabel="trials", ylabel="µs per model-step")
    axes.grid(alpha=0.25, linewidth=0.5)
    axes.legend(fontsize=6, edgecolor="none", loc="upper left", bbox_to_anchor=(1.0, 1.0))


def _draw_bars(axes: Any, panel: Bars) -> None:
    names = [bar.arm for bar in panel.bars]
    for place, bar in enumerate(panel.bars):
        colour = _LOOKS.get(bar.arm, ("#8c6d31", "v", "-"))[0]
        hatch = "///" if bar.is_hint else None
        axes.barh(place, bar.j, color="white" if bar.is_hint else colour, edgecolor=colour, hatch=hatch, height=0.7)
        if bar.j_over_idle is not None and bar.j_over_idle > 0:
            axes.plot([bar.j_over_idle] * 2, [place - 0.35, place + 0.35], color="black", linewidth=1)
        axes.annotate(plain(bar.j), (bar.j, place), (3, -3), textcoords="offset points", fontsize=7)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_title(panel.title, fontsize=9)
    axes.set(xlabel="joules per trial of 10 epochs, board")
    axes.grid(alpha=0.25, linewidth=0.5, axis="x")
