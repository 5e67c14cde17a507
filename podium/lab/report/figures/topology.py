"""Topologies: the ranks of a run on their nodes, the bytes each sent, and which pairs communicated.

The data come from `podium.lab.report.topology`; the row of each cell's first run contains them. With servers, workers
are drawn in a row above them; otherwise ranks form a ring. Of more than 16 workers the middle ones are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.study.results import cells, finished, number
from podium.lab.study.store import Row

MOST_DRAWN = 16
"""The most workers that are drawn, and the most servers."""


@dataclass(frozen=True)
class Station:
    """One rank, at a position in the unit square."""

    rank: int
    role: str
    x: float
    y: float
    node: str
    sent_mb: float | None
    received_mb: float | None
    side: str
    """Where its label goes: `above`, `below`, `left` or `right`."""


@dataclass(frozen=True)
class Edge:
    """Two ranks that communicated."""

    first: int
    second: int
    messages: int | None
    """Pushes that a server counted; None: inferred from the strategy."""


@dataclass(frozen=True)
class Topology:
    """One run's ranks and which pairs communicated."""

    cell: str
    seed: int
    stations: tuple[Station, ...]
    edges: tuple[Edge, ...]
    patterns: tuple[str, ...]
    """In words, one per phase."""
    places: str
    """Nodes and links, in words."""
    left_out: int
    """How many ranks are not drawn."""

    @property
    def name(self) -> str:
        return f"topology, {self.cell}, seed {self.seed}"

    @property
    def caption(self) -> str:
        parts = [self.places, *self.patterns]
        if self.edges:
            parts.append("solid lines: messages that servers counted; dashed: inferred from the strategy")
        parts.append("MB sent (↑) and received (↓), as counted by each rank")
        if self.left_out:
            parts.append(f"{self.left_out} more ranks are not drawn")
        return ". ".join(part[:1].upper() + part[1:] for part in parts) + "."


def topologies(rows: Sequence[Row]) -> dict[str, Topology]:
    """By cell: the topology of its first run that has one."""
    found: dict[str, Topology] = {}
    done = finished(rows)
    for cell in cells(done):
        row = next((row for row in done if row["cell"] == cell and row.get("topology")), None)
        if row is not None:
            found[cell] = _topology(cell, int(row["seed"]), row["topology"])
    return found


def _topology(cell: str, seed: int, facts: Mapping[str, Any]) -> Topology:
    workers = [rank for rank in facts["ranks"] if rank["role"] != "server"]
    servers = [rank for rank in facts["ranks"] if rank["role"] == "server"]
    drawn = [*_some(workers), *_some(servers)]
    places = _two_rows(len(_some(workers)), len(_some(servers))) if servers else _ring(len(drawn))
    stations = tuple(_station(rank, place, facts["nodes"]) for rank, place in zip(drawn, places, strict=True))
    here = {station.rank for station in stations}
    edges: dict[tuple[int, int], Edge] = {}
    for pattern in facts["patterns"]:
        for first, second, messages in pattern["edges"]:
            if first in here and second in here and (messages is not None or (first, second) not in edges):
                edges[first, second] = Edge(int(first), int(second), messages)
    return Topology(
        cell,
        seed,
        stations,
        tuple(edges.values()),
        tuple(_pattern(pattern, len(facts["patterns"]) > 1) for pattern in facts["patterns"]),
        _places(facts),
        len(facts["ranks"]) - len(drawn),
    )


def _some(ranks: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All ranks, or the first and last half of `MOST_DRAWN`."""
    half = MOST_DRAWN // 2
    return list(ranks) if len(ranks) <= MOST_DRAWN else [*ranks[:half], *ranks[-half:]]


def _ring(count: int) -> list[tuple[float, float]]:
    """Clockwise from the top; two ranks side by side."""
    if count <= 2:
        return [(0.5, 0.5)] if count == 1 else [(0.25, 0.5), (0.75, 0.5)][:count]
    turns = [math.pi / 2 - 2 * math.pi * k / count for k in range(count)]
    return [(0.5 + 0.4 * math.cos(turn), 0.5 + 0.4 * math.sin(turn)) for turn in turns]


def _two_rows(workers: int, servers: int) -> list[tuple[float, float]]:
    return [((k + 0.5) / count, y) for count, y in ((workers, 0.76), (servers, 0.24)) for k in range(count)]


def _side(x: float, y: float) -> str:
    """Outwards, so that labels do not cover lines."""
    if abs(x - 0.5) > abs(y - 0.5) and 0.3 < y < 0.7:
        return "above" if y == 0.5 and abs(x - 0.5) < 0.3 else "left" if x < 0.5 else "right"
    return "above" if y >= 0.5 else "below"


def _station(rank: Mapping[str, Any], place: tuple[float, float], nodes: Sequence[Mapping[str, Any]]) -> Station:
    node = rank.get("node")
    name = str(nodes[node]["name"]) if node is not None and len(nodes) > 1 else ""
    sent, received = _mb(rank.get("sent")), _mb(rank.get("received"))
    return Station(int(rank["rank"]), str(rank["role"]), *place, name, sent, received, _side(*place))


def _mb(value: Any) -> float | None:
    known = number(value)
    return None if known is None else known / 1e6


def _pattern(pattern: Mapping[str, Any], many: bool) -> str:
    how = "counted" if pattern["counted"] else "inferred"
    said = (
        f"{pattern['pattern']} ({how}{'' if pattern['edges'] or not pattern['pairs'] else ', too many pairs to draw'})"
    )
    return f"{str(pattern['phase']).partition(':')[0]}: {said}" if many else said


def _places(facts: Mapping[str, Any]) -> str:
    nodes = facts["nodes"]
    if not facts["described"]:
        return "all ranks on one machine; no cluster file describes its links"
    kinds = list(dict.fromkeys(_link(node) for node in nodes))
    said = f"{len(nodes)} node{'s' if len(nodes) > 1 else ''}, "
    if len(kinds) == 1:
        said += f"each with {kinds[0]}"
    else:
        said += "; ".join(
            f"{_named([str(node['name']) for node in nodes if _link(node) == kind])} with {kind}" for kind in kinds
        )
    for link in facts["links"]:
        said += f"; {' to '.join(link['between'])}: " + ", ".join(
            f"{value:g} {unit}"
            for value, unit in ((link.get("mbit"), "Mbit/s"), (link.get("latency_us"), "µs"))
            if value
        )
    return said + ("; servers run beside workers" if facts["colocated"] else "")


def _named(names: Sequence[str]) -> str:
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} to {names[-1]}"


def _link(node: Mapping[str, Any]) -> str:
    up, down = node.get("up_mbit"), node.get("down_mbit")
    if up is None and down is None:
        rate = "an unshaped link"
    elif up == down:
        rate = f"{up:g} Mbit/s"
    else:
        rate = " and ".join(f"{x:g} Mbit/s {way}" for x, way in ((up, "up"), (down, "down")) if x is not None)
    speed = number(node.get("speed"))
    return rate if speed in (None, 1.0) else f"{rate} and speed {speed:g}"
