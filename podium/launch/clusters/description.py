"""The cluster file: nodes, links and placement, as plain frozen data.

    [cluster]
    sharing = "fifo"             # how messages share a link in virtual time: one after another, or "fair"
    jitter = 0.05
    seconds_per_sample = 1e-4

    [[node]]
    name = "fast"                # with a count: fast-0, fast-1
    count = 2
    up_mbit = 1000
    down_mbit = 1000

    [[node]]
    name = "slow"
    speed = 0.25

    [[link]]                     # between two nodes, in both directions; overrides the nodes' own values
    between = ["fast-0", "slow"]
    mbit = 100

    [[change]]                   # from this time of the run on, a node computes at another speed
    node = "slow"
    at_s = 60.0
    speed = 1.0

    [placement]                  # worker 0 on the first name, and so on, from the front again when there are more
    workers = ["fast-0", "fast-1"]
    servers = ["slow"]

The shaped launcher builds this cluster out of network namespaces, virtual time models it, and both read only this file.
This module knows no strategy, no clock and no torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

from podium.config import build
from podium.errors import ConfigError, UnknownName

BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True, kw_only=True)
class Node:
    """One machine: how fast it computes and how it is attached to the network."""

    name: str
    speed: float = 1.0
    """Compute speed; 0.5 takes twice as long. Below 1, the shaped launcher slows passes down by sleeping."""
    cpus: float | None = None
    """CPU quota of the node's ranks together under the shaped launcher; None sets none."""
    up_mbit: float | None = None
    """Sending rate; None leaves it unshaped: in virtual time, the same-node rate."""
    down_mbit: float | None = None
    """Receiving rate; None as above."""
    latency_us: float = 50.0
    """One-way latency to a node of the same latency; between others, the mean of both."""
    flops: float = 3e10
    """Operations per second that training sustains; used where the cluster gives no seconds_per_sample."""
    memory_gbs: float = 4.0
    """GB per second at which an optimizer passes over parameters."""

    def __post_init__(self) -> None:
        who = f"node {self.name!r}"
        if not isinstance(self.name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", self.name):
            raise ConfigError(f"{who}: name must be letters, digits, '_', '.' and '-', got {self.name!r}")
        for name in ("speed", "flops", "memory_gbs"):
            _need_above(getattr(self, name), 0, who, name)
        for name in ("up_mbit", "down_mbit"):
            _need_above(getattr(self, name), 0, who, name, optional=True)
        # The kernel takes no quota below a millisecond per period.
        _need_at_least(self.cpus, 0.01, who, "cpus", optional=True)
        _need_at_least(self.latency_us, 0, who, "latency_us")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Values for one pair of nodes, in both directions, which override the nodes' own."""

    mbit: float | None = None
    latency_us: float | None = None

    def __post_init__(self) -> None:
        _need_above(self.mbit, 0, "link", "mbit", optional=True)
        _need_at_least(self.latency_us, 0, "link", "latency_us", optional=True)


@dataclass(frozen=True, kw_only=True)
class Change:
    """From a time of the run on, a node computes at another speed."""

    node: int
    at_s: float
    """Seconds since the run began, on the world's clock; a pass under way at that time keeps its old speed."""
    speed: float

    def __post_init__(self) -> None:
        _need_at_least(self.at_s, 0, "change", "at_s")
        _need_above(self.speed, 0, "change", "speed")


class PathCost(NamedTuple):
    """Rates and latency between two nodes."""

    bytes_per_s_up: float
    bytes_per_s_down: float
    latency_ns: int


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, links and placement. A forward and backward pass over b samples on a node takes, jitter aside,
    `(seconds_per_step + b * seconds_per_sample) / speed`.
    """

    nodes: tuple[Node, ...]
    workers: tuple[int, ...] = ()
    """Node of each worker, from the front again when there are more; empty: worker i on node i modulo the nodes."""
    servers: tuple[int, ...] = ()
    """Node of each dedicated server, likewise; empty: the node with the fewest ranks, the first among equals."""
    sharing: Literal["fifo", "fair"] = "fifo"
    """Whether messages at one end of a link wait for one another or divide its rate equally."""
    jitter: float = 0.0
    """Coefficient of variation of the compute time, which is lognormal and seeded."""
    seconds_per_sample: float | None = None
    """Compute time of a sample at speed 1; None: estimated from the task's operations and the node's flops."""
    seconds_per_step: float = 5e-4
    """Compute time of a pass at speed 1 that does not depend on its samples."""
    local_gbs: float = 5.0
    """GB per second between ranks on one node."""
    local_latency_us: float = 5.0
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict, hash=False)
    """By pair of node indices, the lower first."""
    servers_by_link: bool = False
    """Whether dedicated servers are placed on the nodes with the best links to the workers, instead of `servers`."""
    changes: tuple[Change, ...] = ()
    """Those of one node in order of time."""

    def __post_init__(self) -> None:
        if not self.nodes:
            raise ConfigError("cluster: there must be at least one node, got none")
        twice = [name for name, count in Counter(self.names).items() if count > 1]
        if twice:
            raise ConfigError(f"cluster: node names must differ, got {twice[0]!r} more than once")
        if self.sharing not in ("fifo", "fair"):
            raise UnknownName("sharing of cluster", self.sharing, ("fifo", "fair"))
        for name in ("jitter", "seconds_per_step", "local_latency_us"):
            _need_at_least(getattr(self, name), 0, "cluster", name)
        _need_above(self.seconds_per_sample, 0, "cluster", "seconds_per_sample", optional=True)
        _need_above(self.local_gbs, 0, "cluster", "local_gbs")
        ends, changed = (end for pair in self.links for end in pair), (change.node for change in self.changes)
        for index in (*self.workers, *self.servers, *ends, *changed):
            self._need_node(index)
        self._need_order()
        for a, b in self.links:
            if a >= b:
                raise ConfigError(f"cluster: a link joins two nodes, the lower index first, got {(a, b)}")

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(node.name for node in self.nodes)

    def place(
        self, workers: int, servers: int = 0, colocated: bool = False, hosts: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The node of every rank, workers first. A colocated server m is placed with worker m modulo the workers.

        `hosts`: only these workers have servers beside them, round-robin.
        """
        if workers < 1 or servers < 0:
            raise ConfigError(f"cluster: placement needs 1 worker and 0 servers or more, got {workers} and {servers}")
        placed = _cycle(self.workers or range(len(self.nodes)), workers)
        if colocated:
            return (*placed, *_cycle([placed[w] for w in hosts] or placed, servers))
        if self.servers:
            return (*placed, *_cycle(self.servers, servers))
        if self.servers_by_link and servers:
            from podium.balance.placement import best_server_nodes

            return (*placed, *best_server_nodes(self, placed, servers))
        load = [placed.count(node) for node in range(len(self.nodes))]
        for _ in range(servers):
            emptiest = load.index(min(load))
            load[emptiest] += 1
            placed = (*placed, emptiest)
        return placed

    def changes_of(self, node: int) -> tuple[Change, ...]:
        """How a node's speed changes, in order of time."""
        return tuple(change for change in self.changes if change.node == node)

    def speed_at(self, node: int, now_ns: int) -> float:
        """How fast a node computes at this time of the run."""
        speed = self.nodes[node].speed
        for change in self.changes_of(node):
            if now_ns >= change.at_s * 1e9:
                speed = change.speed
        return speed

    def path(self, a: int, b: int) -> PathCost:
        """For a message from node `a` to node `b`: a's sending rate, b's receiving rate, one-way latency."""
        self._need_node(a)
        self._need_node(b)
        if a == b:
            return PathCost(self.local_gbs * 1e9, self.local_gbs * 1e9, round(self.local_latency_us * 1e3))
        link = self.links.get((min(a, b), max(a, b)), Link())
        up, down = self.rates(a)[0], self.rates(b)[1]
        if link.mbit is not None:
            up = down = link.mbit * BYTES_PER_MBIT
        latency_us = link.latency_us
        if latency_us is None:
            latency_us = (self.nodes[a].latency_us + self.nodes[b].latency_us) / 2
        return PathCost(up, down, round(latency_us * 1e3))

    def rates(self, node: int) -> tuple[float, float]:
        """Bytes per second that a node's own link sends and receives; the same-node rate where it is unshaped."""
        mbits = (self.nodes[node].up_mbit, self.nodes[node].down_mbit)
        up, down = (self.local_gbs * 1e9 if mbit is None else mbit * BYTES_PER_MBIT for mbit in mbits)
        return up, down

    def ring_seconds(self, nbytes: float, nodes: Sequence[int]) -> float:
        """How long a ring all-reduce of `nbytes` takes among ranks on these nodes, in ring order; 0 for one rank.

        The alpha-beta model (Thakur, Rabenseifner and Gropp, 2005, "Optimization of Collective Communication
        Operations in MPICH") with the slowest hop taken for all, since in a ring all ranks wait for it:

            2 (N - 1) * max over neighbours of (latency + (nbytes / N) / min(up, down))

        With one rank per node, `up` and `down` are the nodes' rates. Where k hops of the ring leave (or enter) one
        node, each has a k-th of its rate: all hops happen at once. The additions are assumed to overlap the transfers.
        """
        ranks = len(nodes)
        if ranks <= 1:
            return 0.0
        hops = list(pairwise((*nodes, nodes[0])))
        leaving = Counter(a for a, b in hops if a != b)
        entering = Counter(b for a, b in hops if a != b)

        def hop_seconds(a: int, b: int) -> float:
            up, down, latency_ns = self.path(a, b)
            rate = up if a == b else min(up / leaving[a], down / entering[b])
            return latency_ns / 1e9 + nbytes / ranks / rate

        return 2 * (ranks - 1) * max(hop_seconds(a, b) for a, b in set(hops))

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON types, with nodes named rather than numbered; `changes` where there are any."""
        plain = {f.name: _as_float(getattr(self, f.name)) for f in dataclasses.fields(self)}
        plain["nodes"] = [{k: _as_float(v) for k, v in dataclasses.asdict(node).items()} for node in self.nodes]
        plain["workers"] = [self.names[i] for i in self.workers]
        plain["servers"] = [self.names[i] for i in self.servers]
        plain["links"] = [
            {
                "between": [self.names[a], self.names[b]],
                "mbit": _as_float(x.mbit),
                "latency_us": _as_float(x.latency_us),
            }
            for (a, b), x in sorted(self.links.items())
        ]
        del plain["changes"]
        if not self.servers_by_link:
            del plain["servers_by_link"]
        if self.changes:  # otherwise absent, so that fingerprints of older files stay the same
            plain["changes"] = [
                {"node": self.names[x.node], "at_s": _as_float(x.at_s), "speed": _as_float(x.speed)}
                for x in sorted(self.changes, key=lambda x: (x.at_s, x.node))
            ]
        return plain

    def fingerprint(self) -> str:
        """Sixteen hex digits that change when, and only when, the description changes."""
        text = json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def _need_order(self) -> None:
        for node in {change.node for change in self.changes}:
            for before, after in pairwise(self.changes_of(node)):
                if after.at_s <= before.at_s:
                    raise ConfigError(
                        f"change of node {self.names[node]!r}: at_s must be later than that of the change before it "
                        f"({before.at_s:g}), got {after.at_s:g}"
                    )

    def _need_node(self, index: int) -> None:
        if not 0 <= index < len(self.nodes):
            raise ConfigError(f"cluster: a node index must be from 0 to {len(self.nodes) - 1}, got {index}")


def uniform(
    nodes: int,
    *,
    mbit: float | None = 1000.0,
    latency_us: float = 50.0,
    speed: float = 1.0,
    jitter: float = 0.0,
    sharing: Literal["fifo", "fair"] = "fifo",
    seconds_per_sample: float | None = None,
    seconds_per_step: float = Cluster.seconds_per_step,
) -> Cluster:
    """A cluster of equal nodes, the default of virtual time without a file."""
    if nodes < 1:
        raise ConfigError(f"cluster: there must be at least one node, got {nodes}")
    return Cluster(
        nodes=tuple(
            Node(name=f"node-{i}", speed=speed, up_mbit=mbit, down_mbit=mbit, latency_us=latency_us)
            for i in range(nodes)
        ),
        sharing=sharing,
        jitter=jitter,
        seconds_per_sample=seconds_per_sample,
        seconds_per_step=seconds_per_step,
    )


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster file; raises for an unknown key or a value out of range, naming file and key."""
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not a TOML file: {error}") from error
    try:
        return _parse(table)
    except UnknownName as error:
        raise UnknownName(f"{error.what} in {path}", error.name, error.known) from None
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


_CLUSTER_KEYS = (
    "sharing",
    "jitter",
    "seconds_per_sample",
    "seconds_per_step",
    "local_gbs",
    "local_latency_us",
)
_NODE_KEYS = tuple(f.name for f in dataclasses.fields(Node))
_LINK_KEYS = tuple(f.name for f in dataclasses.fields(Link))
_CHANGE_KEYS = tuple(f.name for f in dataclasses.fields(Change))


def _parse(table: Mapping[str, Any]) -> Cluster:
    _refuse_unknown(table, ("cluster", "node", "link", "change", "placement"), "table")
    settings = _one_table(table, "cluster")
    _refuse_unknown(settings, _CLUSTER_KEYS, "key of [cluster]")
    placement = _one_table(table, "placement")
    _refuse_unknown(placement, ("workers", "servers"), "key of [placement]")
    nodes = tuple(node for entry in _tables(table, "node") for node in _parse_node(entry))
    index = {node.name: i for i, node in enumerate(nodes)}
    by_link = placement.get("servers") == "by-link"
    values = {
        **settings,
        "nodes": nodes,
        "links": _parse_links(_tables(table, "link"), index),
        "changes": tuple(_parse_change(entry, index) for entry in _tables(table, "change")),
        "workers": _find_nodes(placement.get("workers", []), index, "[placement] workers"),
        "servers": () if by_link else _find_nodes(placement.get("servers", []), index, "[placement] servers"),
        "servers_by_link": by_link,
    }
    return build(Cluster, values, who="[cluster]")


def _parse_node(entry: Mapping[str, Any]) -> list[Node]:
    _refuse_unknown(entry, (*_NODE_KEYS, "count"), "key of [[node]]")
    if "name" not in entry:
        raise ConfigError(f"[[node]]: every node must have a name, got {dict(entry)}")
    values = {key: value for key, value in entry.items() if key != "count"}
    node = build(Node, values, who=f"node {entry['name']!r}")
    if "count" not in entry:
        return [node]
    count = entry["count"]
    if type(count) is not int or count < 1:
        raise ConfigError(f"node {node.name!r}: count must be a whole number of at least 1, got {count!r}")
    return [dataclasses.replace(node, name=f"{node.name}-{i}") for i in range(count)]


def _parse_links(entries: Sequence[Mapping[str, Any]], index: Mapping[str, int]) -> dict[tuple[int, int], Link]:
    links: dict[tuple[int, int], Link] = {}
    for entry in entries:
        pair, link = _parse_link(entry, index)
        if pair in links:
            raise ConfigError(f"[[link]]: a pair of nodes must be named once, got {entry['between']} again")
        links[pair] = link
    return links


def _parse_link(entry: Mapping[str, Any], index: Mapping[str, int]) -> tuple[tuple[int, int], Link]:
    _refuse_unknown(entry, (*_LINK_KEYS, "between"), "key of [[link]]")
    ends = _find_nodes(entry.get("between", []), index, "[[link]] between")
    if len(set(ends)) != 2:
        raise ConfigError(f"[[link]]: between must name two different nodes, got {entry.get('between')!r}")
    values = {key: value for key, value in entry.items() if key != "between"}
    if not values:
        raise ConfigError(f"[[link]] between {entry['between']}: must give mbit or latency_us, got neither")
    return (min(ends), max(ends)), build(Link, values, who=f"link {entry['between']}")


def _parse_change(entry: Mapping[str, Any], index: Mapping[str, int]) -> Change:
    _refuse_unknown(entry, _CHANGE_KEYS, "key of [[change]]")
    for key in _CHANGE_KEYS:
        if key not in entry:
            raise ConfigError(f"[[change]]: must give {key}, got {dict(entry)}")
    (node,) = _find_nodes([entry["node"]], index, "[[change]] node")
    return build(Change, {**entry, "node": node}, who=f"change of node {entry['node']!r}")


def _find_nodes(names: object, index: Mapping[str, int], who: str) -> tuple[int, ...]:
    if not isinstance(names, list):
        raise ConfigError(f"{who} must be a list of node names, got {names!r}")
    for name in names:
        if not isinstance(name, str) or name not in index:
            raise UnknownName(f"node of {who}", name, index)
    return tuple(index[name] for name in names)


def _tables(table: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(entry, Mapping) for entry in found):
        raise ConfigError(f"{key} must be written [[{key}]], got {found!r}")
    return found


def _one_table(table: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = table.get(key, {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{key} must be written [{key}], got {found!r}")
    return found


def _refuse_unknown(table: Iterable[str], known: Sequence[str], what: str) -> None:
    for key in table:
        if key not in known:
            raise UnknownName(what, key, known)


def _cycle(items: Sequence[int], count: int) -> tuple[int, ...]:
    return tuple(items[i % len(items)] for i in range(count))


def _as_float(value: Any) -> Any:
    """1000 and 1000.0 mean the same and must give the same fingerprint."""
    return float(value) if isinstance(value, int) else value


def _need_above(value: Any, bound: float, who: str, name: str, optional: bool = False) -> None:
    if not (optional and value is None) and not (_is_number(value) and value > bound):
        raise ConfigError(f"{who}: {name} must be a finite number above {bound}, got {value!r}")


def _need_at_least(value: Any, bound: float, who: str, name: str, optional: bool = False) -> None:
    if not (optional and value is None) and not (_is_number(value) and value >= bound):
        raise ConfigError(f"{who}: {name} must be a finite number of at least {bound}, got {value!r}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
