"""Drawing: matplotlib for paper, plotly for the screen, both from the same figure data.

Paper figures are SVG in the page's text colour, readable on light and dark; without dates and random identifiers, so
that the same study gives the same bytes. Screen figures are plain JSON for plotly's script, which is copied from the
installed package into the page: nothing is fetched. Either package may be missing.

One file per kind of figure, each with `screen` (plotly's JSON), `paper` (onto a matplotlib figure) and `size` (of the
paper, in inches).
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from podium.lab.report.drawing import bars, course, curves, histogram, interaction, stack, timeline, topology, tradeoff
from podium.lab.report.drawing.base import COLOURS, DASHES, INK, WIDTHS, embed, paper_settings, style
from podium.lab.report.figures import (
    Bars,
    Convergence,
    Course,
    Figure,
    Histogram,
    Interaction,
    Stack,
    Timeline,
    Topology,
    Tradeoff,
)

__all__ = [
    "COLOURS",
    "DASHES",
    "INK",
    "WIDTHS",
    "embed",
    "plotly_script",
    "style",
    "to_pdf",
    "to_plotly",
    "to_svg",
    "to_svg_file",
]

_KINDS: dict[type[Any], ModuleType] = {
    Bars: bars,
    Convergence: curves,
    Course: course,
    Histogram: histogram,
    Interaction: interaction,
    Stack: stack,
    Timeline: timeline,
    Topology: topology,
    Tradeoff: tradeoff,
}


def plotly_script() -> str | None:
    """Plotly's script from the installed package; None if it is not installed."""
    try:
        return str(importlib.import_module("plotly.offline").get_plotlyjs())
    except ImportError:
        return None


def to_plotly(figure: Figure, order: Mapping[str, int]) -> dict[str, Any]:
    """A figure as plotly's JSON (`data`, `layout`)."""
    shown: dict[str, Any] = _KINDS[type(figure)].screen(figure, order)
    return shown


def to_svg(figure: Figure, order: Mapping[str, int]) -> str | None:
    """A figure as one `<svg>` element; None without matplotlib."""
    drawn = _on_paper(figure, order, "svg", INK)
    return None if drawn is None else embed(drawn.decode())


def to_svg_file(figure: Figure, order: Mapping[str, int]) -> bytes | None:
    """A figure as an SVG file, in black; None without matplotlib."""
    return _on_paper(figure, order, "svg", "#000000")


def to_pdf(figure: Figure, order: Mapping[str, int]) -> bytes | None:
    """A figure as a PDF of one page, in black, with the same bytes each time; None without matplotlib."""
    return _on_paper(figure, order, "pdf", "#000000")


_METADATA: dict[str, dict[str, Any]] = {"svg": {"Date": None}, "pdf": {"CreationDate": None, "Creator": "Podium"}}


def _on_paper(figure: Figure, order: Mapping[str, int], form: str, ink: str) -> bytes | None:
    try:
        matplotlib = importlib.import_module("matplotlib")
        backend = importlib.import_module("matplotlib.backends.backend_agg")
        figures = importlib.import_module("matplotlib.figure")
    except ImportError:
        return None
    settings = paper_settings(ink) | {"lines.solid_capstyle": "butt"}
    settings |= {"pdf.fonttype": 42}  # text can be searched and copied
    kind = _KINDS[type(figure)]
    # An rc context and no pyplot, so that the caller's figures and settings do not change.
    with matplotlib.rc_context(settings):
        canvas = figures.Figure(figsize=kind.size(figure), layout="constrained")
        backend.FigureCanvasAgg(canvas)
        kind.paper(canvas, figure, order)
        out = io.BytesIO()
        canvas.savefig(out, format=form, transparent=True, metadata=_METADATA[form])
    return out.getvalue()
