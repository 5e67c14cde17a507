"""The figures of a study's own page: curves or bars from a pandas table, a panel for each level of a factor."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd

from podium.errors import MissingExtra
from podium.lab.report.drawing.base import COLOURS, DASHES, paper_settings
from podium.lab.report.format import plain
from podium.lab.stats.statistics import Mean

MARKERS = "os^vD*PX"


def draw_curves(
    some: pd.DataFrame,
    *,
    x: str,
    y: str,
    by: str,
    panel: str = "",
    labels: Sequence[str] = (),
    log: str = "",
    lines: bool = True,
) -> bytes:
    """An SVG: `y` over `x`, one line per level of `by`. `log` names the logarithmic axes: `x`, `y` or `xy`.

    `labels` are those of the axes. The interval of a `Mean` is drawn as an error bar.
    """
    looks = _looks(some[by])

    def draw(axes: Any, mine: pd.DataFrame) -> None:
        for level, line in mine.groupby(by, sort=False):
            colour, marker, dash = looks[level]
            values = [_middle(value) for value in line[y]]
            ends = [_half(value) for value in line[y]]
            places = [_middle(value) for value in line[x]]
            style = {"color": colour, "marker": marker, "linestyle": dash if lines else "none", "label": str(level)}
            axes.errorbar(places, values, yerr=ends if any(ends) else None, linewidth=1, markersize=4, **style)
        for axis in log:
            getattr(axes, f"set_{axis}scale")("log")
        _name_axes(axes, labels or (x, y))
        axes.legend(fontsize=6, edgecolor="none", loc="upper left", bbox_to_anchor=(1.0, 1.0))

    return _svg(_panels(some, panel), draw, height=3.6)


def draw_bars(
    some: pd.DataFrame, *, value: str, by: str, panel: str = "", label: str = "", log: bool = False, hint: str = ""
) -> bytes:
    """An SVG: a bar of `value` per level of `by`, in ascending order. Bars whose column `hint` is true are hatched."""
    looks = _looks(some[by])

    def draw(axes: Any, mine: pd.DataFrame) -> None:
        ordered = mine.assign(_at=mine[value].map(_middle)).dropna(subset="_at").sort_values("_at")
        for place, bar in enumerate(ordered.to_dict("records")):
            colour, at, open_ = looks[bar[by]][0], bar["_at"], bool(hint and bar[hint])
            face = "white" if open_ else colour
            axes.barh(place, at, color=face, edgecolor=colour, hatch="///" if open_ else None, height=0.7)
            axes.annotate(plain(at), (at, place), (3, -3), textcoords="offset points", fontsize=7)
        axes.set_yticks(range(len(ordered)), [str(level) for level in ordered[by]])
        axes.invert_yaxis()
        if log:
            axes.set_xscale("log")
        axes.margins(x=0.15)
        _name_axes(axes, (label or value, ""))

    return _svg(_panels(some, panel), draw, height=3.4)


def _looks(levels: pd.Series) -> dict[Any, tuple[str, str, str]]:
    """Colour, marker and dash of each level, the same in every panel."""
    names = list(dict.fromkeys(levels))
    return {
        name: (COLOURS[i % len(COLOURS)], MARKERS[i % len(MARKERS)], DASHES[i // len(COLOURS) % len(DASHES)][0])
        for i, name in enumerate(names)
    }


def _panels(some: pd.DataFrame, panel: str) -> list[tuple[str, pd.DataFrame]]:
    return [(str(level), mine) for level, mine in some.groupby(panel, sort=False)] if panel else [("", some)]


def _name_axes(axes: Any, labels: Sequence[str]) -> None:
    axes.set(xlabel=labels[0], ylabel=labels[1])
    axes.grid(alpha=0.25, linewidth=0.5)


def _middle(value: Any) -> float | None:
    return value.mean if isinstance(value, Mean) else None if pd.isna(value) else float(value)


def _half(value: Any) -> float:
    known = isinstance(value, Mean) and value.low is not None and value.high is not None
    return (value.high - value.low) / 2 if known else 0.0


def _svg(panels: Sequence[tuple[str, pd.DataFrame]], draw: Callable[[Any, pd.DataFrame], None], height: float) -> bytes:
    try:
        matplotlib = importlib.import_module("matplotlib")
        backend = importlib.import_module("matplotlib.backends.backend_svg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        raise MissingExtra("matplotlib", "study", "drawing figures") from None
    with matplotlib.rc_context(paper_settings("#000000")):
        canvas = figures.Figure(figsize=(4.4 * len(panels) + 0.4, height), layout="constrained")
        backend.FigureCanvasSVG(canvas)
        for place, (title, mine) in enumerate(panels, 1):
            axes = canvas.add_subplot(1, len(panels), place)
            axes.set_title(title, fontsize=9)
            draw(axes, mine)
        out = io.StringIO()
        canvas.savefig(out, format="svg", metadata={"Date": None})
    return ("\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n").encode()
