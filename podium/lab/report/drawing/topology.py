"""Ranks with their bytes, and lines between those that communicated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.lab.report.drawing.base import COLOURS, layout_of
from podium.lab.report.figures.topology import Edge, Station, Topology

ROLES = {"worker": (COLOURS[0], "o", "circle"), "server": (COLOURS[1], "s", "square")}
"""Colour of a role, and its mark on paper and on the screen."""
GREY = "#777777"
SIDES = {
    "above": ("top center", 0, 1, "center", "bottom"),
    "below": ("bottom center", 0, -1, "center", "top"),
    "left": ("middle left", -1, 0, "right", "center"),
    "right": ("middle right", 1, 0, "left", "center"),
}
"""Label positions: plotly's name, offsets across and up, and matplotlib's alignments."""


def screen(figure: Topology, order: Mapping[str, int]) -> dict[str, Any]:
    at = {station.rank: station for station in figure.stations}
    brief = _is_crowded(figure)
    traces: list[dict[str, Any]] = []
    for edge in figure.edges:
        a, b = at[edge.first], at[edge.second]
        line = {"color": GREY, "width": 1, "dash": "dash" if edge.messages is None else "solid"}
        said = {"text": _edge(edge), "hovertemplate": "%{text}<extra></extra>", "showlegend": False}
        # A line shows its hover text at its points only, so it gets one in the middle.
        middle = {"x": [a.x, (a.x + b.x) / 2, b.x], "y": [a.y, (a.y + b.y) / 2, b.y]}
        traces.append({**middle, **said, "mode": "lines", "line": line})
    for role, (colour, _, symbol) in ROLES.items():
        some = [station for station in figure.stations if station.role == role]
        if some:
            # With many ranks the screen shows names only, and the rest on hover.
            words = [_lines(s, brief)[0] if brief else "<br>".join(_lines(s, brief)) for s in some]
            whole = ["<br>".join(_lines(station, brief=False)) for station in some]
            marks = {"size": 16, "color": colour, "symbol": symbol}
            where = {"x": [s.x for s in some], "y": [s.y for s in some], "mode": "markers+text", "marker": marks}
            told = {"text": words, "textposition": [SIDES[s.side][0] for s in some], "textfont": {"size": 10}}
            hover = {"customdata": whole, "hovertemplate": "%{customdata}<extra></extra>"}
            traces.append({**where, **told, **hover, "name": role, "cliponaxis": False})
    layout = layout_of("", "", log=False)
    layout["xaxis"] |= {"visible": False, "range": [-0.5, 1.5]}  # room for words on a narrow screen
    layout["yaxis"] |= {"visible": False, "range": [-0.2, 1.2]}
    layout |= {"height": round(100 * size(figure)[1]), "showlegend": len({s.role for s in figure.stations}) > 1}
    layout["legend"] = {"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0}
    return {"data": traces, "layout": layout}


def paper(canvas: Any, figure: Topology, order: Mapping[str, int]) -> None:
    axes = canvas.add_subplot()
    at = {station.rank: station for station in figure.stations}
    for edge in figure.edges:
        a, b = at[edge.first], at[edge.second]
        dash = "--" if edge.messages is None else "-"
        axes.plot([a.x, b.x], [a.y, b.y], color=GREY, linewidth=0.7, linestyle=dash, zorder=1)
    brief = _is_crowded(figure)
    for station in figure.stations:
        colour, mark, _ = ROLES.get(station.role, ROLES["worker"])
        axes.plot(station.x, station.y, mark, color=colour, markersize=9 if brief else 14, zorder=2)
        _, aside, up, across, along = SIDES[station.side]
        place = (station.x + (0.03 if brief else 0.05) * aside, station.y + 0.07 * up)
        words = "\n".join(_lines(station, brief))
        axes.text(*place, words, fontsize=5.5 if brief else 7.5, ha=across, va=along)
    axes.set(xlim=(-0.1, 1.1), ylim=(-0.2, 1.2))
    axes.set_axis_off()


def size(figure: Topology) -> tuple[float, float]:
    return 6.4 if len(figure.stations) > 8 else 4.8, 4.2 if len(figure.stations) > 4 else 2.6


def _is_crowded(figure: Topology) -> bool:
    return len(figure.stations) > 8


def _lines(station: Station, brief: bool) -> list[str]:
    """The label of a rank: name, node and bytes; `brief` for figures with many ranks."""
    named = [f"{station.role[0]}{station.rank}" if brief else f"{station.role} {station.rank}"]
    named += [_cut(station.node) if brief else station.node] if station.node else []
    if station.sent_mb is None or station.received_mb is None:
        return named
    sent, received = f"↑{station.sent_mb:.3g}", f"↓{station.received_mb:.3g}"
    return [*named, sent, received] if brief else [*named, f"{sent} {received} MB"]


def _cut(name: str, most: int = 9) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _edge(edge: Edge) -> str:
    how = "inferred from the strategy" if edge.messages is None else f"{edge.messages:,} pushes counted"
    return f"rank {edge.first} and rank {edge.second}: {how}"
