"""The nodes of a run's ranks, the bytes they sent, and which pairs communicated, from its records and manifest.

Each rank counts its bytes. Placement follows from the cluster in the manifest; without one all ranks shared a machine.
Records of asynchronous servers name the worker of every push, so those pairs are counted; other pairs follow from the
strategy and the collective, and are marked as inferred. A backend may sum by another route than the ring by which its
bytes are counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from podium.errors import PodiumError
from podium.launch.base import hosts_of
from podium.launch.clusters.description import Cluster, Link, Node
from podium.records.recorder import Record
from podium.strategies import make_strategy
from podium.strategies.base import Strategy
from podium.strategies.phases import phases_of

MOST_EDGES = 300
"""The most pairs that a pattern lists; of more, only their number."""

RINGS = ("default", "auto", "backend", "ring", "shared")
"""Collectives whose bytes are those of a ring."""


def topology(records: Iterable[Record], manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Data for a figure and a table; empty if no rank began.

    `nodes`: name, and if a cluster was described `speed`, `up_mbit`, `down_mbit`, `latency_us` (null: unshaped).
    `links`: overrides for a pair of nodes (`between`, `mbit`, `latency_us`). `ranks`: `rank`, `role`, `node` (an index;
    null if it joined later), `device`, `sent` and `received` in bytes (null if unknown), `whole` (false: only of the
    steps before its loss). `patterns`, one per phase: `phase`, `pattern` (its description), `counted` (messages were
    counted, not inferred from the strategy), `edges` ([from, to, messages or null], both directions as one), `pairs`
    (their number, also if they are too many to list). `colocated`: servers run beside workers.

    """
    rows = list(records)
    begun = {row["rank"]: row for row in rows if row["kind"] == "begin"}
    if not begun:
        return {}
    config = manifest.get("config") or {}
    strategy = _strategy(config)
    roles = {rank: str(row.get("role", "worker")) for rank, row in sorted(begun.items())}
    nodes, links, placed = _places(manifest.get("cluster"), roles, strategy, int(config.get("workers") or 0))
    return {
        "nodes": nodes,
        "links": links,
        "described": manifest.get("cluster") is not None,
        "colocated": bool(strategy is not None and strategy.server_spec.colocated),
        "ranks": [
            {"rank": rank, "role": role, "node": placed.get(rank), "device": begun[rank].get("device")}
            | _bytes(rows, rank)
            for rank, role in roles.items()
        ],
        "patterns": _patterns(rows, roles, strategy, str(config.get("collective") or "default")),
    }


def _strategy(config: Mapping[str, Any]) -> Strategy[Any] | None:
    """The run's strategy; None if it cannot be loaded any more, such as one from a user's file."""
    try:
        found: Strategy[Any] = make_strategy(
            config["strategy"], config.get("strategy_options") or {}, config["workers"]
        )
    except (PodiumError, KeyError):
        return None
    return found


def _places(
    described: Mapping[str, Any] | None, roles: Mapping[int, str], strategy: Strategy[Any] | None, workers: int
) -> tuple[list[dict[str, Any]], list[dict[str, Any]], dict[int, int]]:
    if described is None:
        return [{"name": "this machine"}], [], dict.fromkeys(roles, 0)
    fields = ("name", "speed", "up_mbit", "down_mbit", "latency_us")
    nodes = [{name: node.get(name) for name in fields} for node in described["nodes"]]
    placed: tuple[int, ...] = ()
    if strategy is not None and workers:
        hosts = hosts_of(strategy, workers)
        placed = _cluster(described).place(workers, strategy.server_spec.count, strategy.server_spec.colocated, hosts)
    return nodes, list(described.get("links") or ()), {rank: placed[rank] for rank in roles if rank < len(placed)}


def _cluster(described: Mapping[str, Any]) -> Cluster:
    """The inverse of `Cluster.to_dict`, as far as placement needs it."""
    nodes = tuple(Node(**node) for node in described["nodes"])
    index = {node.name: place for place, node in enumerate(nodes)}
    links = {
        (min(ends), max(ends)): Link(mbit=link.get("mbit"), latency_us=link.get("latency_us"))
        for link in described.get("links") or ()
        for ends in [[index[name] for name in link["between"]]]
    }
    return Cluster(
        nodes=nodes,
        workers=tuple(index[name] for name in described.get("workers") or ()),
        servers=tuple(index[name] for name in described.get("servers") or ()),
        servers_by_link=bool(described.get("servers_by_link")),
        links=links,
    )


def _bytes(rows: Sequence[Record], rank: int) -> dict[str, Any]:
    """A rank's counters at its end; for a lost rank, the sum over its steps."""
    own = [row for row in rows if row["rank"] == rank]
    for row in own:
        if row["kind"] == "end":
            return {"sent": row["sent"], "received": row["received"], "whole": True}
    steps = [row for row in own if row["kind"] == "step" and "sent" in row]
    if not steps:
        return {"sent": None, "received": None, "whole": False}
    return {
        "sent": sum(row["sent"] for row in steps),
        "received": sum(row["received"] for row in steps),
        "whole": False,
    }


def _patterns(
    rows: Sequence[Record], roles: Mapping[int, str], strategy: Strategy[Any] | None, collective: str
) -> list[dict[str, Any]]:
    workers = [rank for rank, role in roles.items() if role == "worker"]
    servers = [rank for rank, role in roles.items() if role == "server"]
    if strategy is None:
        return []
    found = []
    for phase in phases_of(strategy):
        name, edges = _inferred(phase.strategy, workers, servers, collective.partition(":")[0])
        counts = _messages(rows, set(workers)) if phase.strategy.server_spec else Counter()
        told: list[list[int | None]] = [[a, b, counts.get((a, b))] for a, b in edges]
        found.append(
            {
                "phase": phase.text.partition(" until ")[0],
                "pattern": name,
                "counted": bool(counts) and all(messages is not None for _, _, messages in told),
                "edges": told if len(told) <= MOST_EDGES else [],
                "pairs": len(told),
            }
        )
    return found


def _messages(rows: Sequence[Record], workers: set[int]) -> Counter[tuple[int, int]]:
    """Pushes by worker and server, from the servers' records."""
    counts: Counter[tuple[int, int]] = Counter()
    for row in rows:
        source = row.get("worker") if row["kind"] in ("update", "dropped") else None
        source = row.get("source") if row["kind"] == "arrival" and row.get("what") == "push" else source
        if source in workers:
            counts[source, row["rank"]] += 1
    return counts


def _inferred(
    strategy: Strategy[Any], workers: Sequence[int], servers: Sequence[int], collective: str
) -> tuple[str, list[tuple[int, int]]]:
    """A strategy's communication pattern: a short description, and the pairs that communicate."""

    if not strategy.payload.is_sent or len(workers) + len(servers) < 2:
        return "nobody talks", []
    if strategy.server_spec and strategy.server_spec.role != "lender":
        return "workers and servers", [(worker, server) for worker in workers for server in servers]
    if strategy.payload.point_to_point:
        return "workers in pairs that change", []
    if len(workers) < 2:
        return "nobody talks", []
    if collective == "reduce-to-one":
        return "all through one worker", [(workers[0], worker) for worker in workers[1:]]
    if collective in RINGS:
        ends = [(workers[-1], workers[0])] if len(workers) > 2 else []
        return "a ring of workers", [*pairwise(workers), *ends]
    return f"workers among each other, by {collective}", []
