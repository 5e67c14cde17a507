"""What all drawings share: colours, dashes, axes, and SVG in the page's text colour."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d31", "#7f7f7f")
"""Okabe and Ito's colours, which colour-blind readers can tell apart; they repeat after eight strategies."""


DASHES = (("-", "solid"), ("--", "dash"), ("-.", "dashdot"), (":", "dot"))
"""Line styles as matplotlib and plotly name them; they distinguish strategies in black and white."""


INK = "#010203"
"""A placeholder that `embed` replaces by the page's text colour."""


WIDTHS = (4.2, 3.2, 2.4, 1.8)
"""Line widths. Later strategies are drawn on top and thinner, so that equal curves (of synchronous ones) all show."""


PANEL_PIXELS = 150
"""Height of one panel of a stack on the screen."""


def style(cell: str, order: Mapping[str, int]) -> tuple[str, tuple[str, str], float]:
    """A strategy's colour, dash and line width in pixels: the same in every figure of a report."""
    place = order[cell]
    return COLOURS[place % len(COLOURS)], DASHES[place % len(DASHES)], WIDTHS[min(place, len(WIDTHS) - 1)]


def stroke(ends: dict[str, Any], dash: str, colour: str = "#777") -> dict[str, Any]:
    return {"type": "line", **ends, "line": {"color": colour, "width": 1, "dash": dash}}


def layout_of(x: str, y: str, *, log: bool) -> dict[str, Any]:
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


def embed(svg: str) -> str:
    """The `<svg>` element, scalable, in the page's text colour, without group ids, which repeat in every figure."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r' xmlns(:xlink)?="[^"]*"', "", body)
    body = re.sub(r'<g id="[^"]*">', "<g>", body)
    body = re.sub(r'(<svg [^>]*?)width="[^"]*"', r"\1", body, count=1)
    body = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", body, count=1)
    body = body.replace("<svg ", '<svg aria-hidden="true" ', 1)
    return body.replace(INK, "currentColor")


def faded(colour: str, alpha: float) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


def paper_settings(ink: str) -> dict[str, Any]:
    """Settings of matplotlib for every figure: text as text, no random identifiers, all lines of one colour."""
    settings: dict[str, Any] = {"svg.fonttype": "none", "svg.hashsalt": "podium", "font.size": 9}
    settings |= {"text.parse_math": False}  # a dollar sign in a name is not math
    settings |= {"axes.spines.top": False, "axes.spines.right": False, "font.family": "DejaVu Sans"}
    inked = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    return settings | dict.fromkeys(inked, ink)
