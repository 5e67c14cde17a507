"""From what was measured on hosts and between them to a cluster file, and to the names of slow hosts."""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.launch.clusters.description import BYTES_PER_MBIT, Cluster, Link, Node
from podium.launch.hosts.facts import HostFacts
from podium.launch.hosts.failure import Failure

SLOW = 1.25
"""A host whose computation takes this many times the median of all hosts is called slow."""
UNLIKE = 0.2
"""A pair of hosts gets a [[link]] of its own where it differs by more than this part from what its nodes say."""
_LEAST_US = 20.0  # and its latency by more than this


@dataclass(frozen=True, kw_only=True)
class HostReport:
    """One host, as found."""

    host: str
    """As the user has listed it."""
    failure: Failure | None = None
    """Why it cannot take part."""
    facts: HostFacts | None = None
    clock_skew_s: float | None = None
    """Its clock less this machine's."""
    cpu_ms: float | None = None
    """Median time of the computation that all hosts do."""
    gpus_ms: tuple[float, ...] = ()
    slow: tuple[str, ...] = ()
    """Which of its devices are slow, and how many times the median they take."""

    @property
    def ok(self) -> bool:
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        facts = {} if self.facts is None else self.facts._asdict()
        facts.pop("time", None)
        measured = {"clock_skew_s": self.clock_skew_s, "cpu_ms": self.cpu_ms, "gpus_ms": list(self.gpus_ms)}
        return {"host": self.host, "ok": self.ok, **_told(self.failure), **facts, **measured, "slow": list(self.slow)}


@dataclass(frozen=True, kw_only=True)
class LinkReport:
    """One direction between two hosts: `source` dialled, and sent the large messages."""

    source: str
    target: str
    failure: Failure | None = None
    round_trip_us: float | None = None
    """Median of small calls and their answers; None where only the connection was tried."""
    mbit: float | None = None
    """10⁶ bits of tensors per second."""

    @property
    def ok(self) -> bool:
        return self.failure is None

    def to_dict(self) -> dict[str, Any]:
        ends = {"source": self.source, "target": self.target, "ok": self.ok}
        return {**ends, **_told(self.failure), "round_trip_us": self.round_trip_us, "mbit": self.mbit}


def _told(failure: Failure | None) -> dict[str, Any]:
    return {"error": failure and failure.what, "fix": failure and failure.fix}


def slow_devices(cpu_ms: Mapping[str, float], gpus_ms: Mapping[str, Sequence[float]]) -> dict[str, tuple[str, ...]]:
    """By host: its devices that take `SLOW` times the median of their kind, or longer."""
    times = {(host, "CPU"): ms for host, ms in cpu_ms.items()}
    times |= {(host, f"GPU {n}"): ms for host, every in gpus_ms.items() for n, ms in enumerate(every)}
    found: dict[str, tuple[str, ...]] = {}
    for (host, device), ms in times.items():
        kind = [other for (_, name), other in times.items() if name[:3] == device[:3]]
        times_median = ms / statistics.median_low(kind)
        if times_median >= SLOW:
            found[host] = (*found.get(host, ()), f"{device}: {times_median:.1f} times the median")
    return found


def to_cluster(hosts: Sequence[HostReport], links: Sequence[LinkReport]) -> Cluster | None:
    """The hosts that can take part, as nodes; None where there are none.

    Speed 1 is the fastest of them. A node sends and receives at the best rate that was seen, and its latency is the
    median over its pairs: half a round trip. Pairs that differ have links of their own, with the slower direction's
    rate.
    """
    able = [host for host in hosts if host.ok]
    if not able:
        return None
    index = {host.host: n for n, host in enumerate(able)}
    paths = {(index[x.source], index[x.target]): x for x in links if x.source in index and x.target in index}
    mbits = {ends: path.mbit for ends, path in paths.items() if path.mbit is not None}
    one_way = _latencies(paths)
    names, speeds = node_names([host.host for host in able]), _speeds(able)
    nodes = []
    for n, name in enumerate(names):
        latencies = [us for pair, us in one_way.items() if n in pair]
        nodes.append(
            Node(
                name=name,
                speed=speeds[n],
                up_mbit=_rounded(max((mbit for (a, _), mbit in mbits.items() if a == n), default=None)),
                down_mbit=_rounded(max((mbit for (_, b), mbit in mbits.items() if b == n), default=None)),
                **({"latency_us": round(statistics.median(latencies), 1)} if latencies else {}),
            )
        )
    cluster = Cluster(nodes=tuple(nodes))
    own = {pair: _own_link(cluster, pair, mbits, one_way) for pair in one_way}
    return Cluster(nodes=cluster.nodes, links={pair: link for pair, link in own.items() if link != Link()})


def node_names(labels: Sequence[str]) -> list[str]:
    """Names that a cluster file takes: without the user, and each once."""
    names: list[str] = []
    for label in labels:
        plain = re.sub(r"[^A-Za-z0-9_.-]", "-", label.rpartition("@")[2]).lstrip("_.-") or "host"
        taken, name = 1, plain
        while name in names:
            taken += 1
            name = f"{plain}-{taken}"
        names.append(name)
    return names


def _latencies(paths: Mapping[tuple[int, int], LinkReport]) -> dict[tuple[int, int], float]:
    """One-way microseconds by pair, the lower index first: half of the shorter round trip."""
    found: dict[tuple[int, int], float] = {}
    for (a, b), path in paths.items():
        if path.round_trip_us is not None:
            pair = min(a, b), max(a, b)
            found[pair] = min(path.round_trip_us / 2, found.get(pair, path.round_trip_us / 2))
    return found


def _speeds(hosts: Sequence[HostReport]) -> list[float]:
    """By the GPUs where all hosts have some, else by the CPU; 1 where a host's computation was not measured."""
    by_gpu = all(host.gpus_ms for host in hosts)
    times = [statistics.median(host.gpus_ms) if by_gpu else host.cpu_ms for host in hosts]
    fastest = min((ms for ms in times if ms), default=1.0)
    return [max(0.01, round(fastest / ms, 2)) if ms else 1.0 for ms in times]


def _own_link(
    cluster: Cluster,
    pair: tuple[int, int],
    mbits: Mapping[tuple[int, int], float],
    one_way: Mapping[tuple[int, int], float],
) -> Link:
    a, b = pair
    both = [(ends, mbits[ends]) for ends in ((a, b), (b, a)) if ends in mbits]
    slower = any(mbit < (1 - UNLIKE) * _expected(cluster, ends) for ends, mbit in both)
    expected_us = cluster.path(a, b).latency_ns / 1e3
    differs = abs(one_way[pair] - expected_us)
    return Link(
        mbit=_rounded(min(mbit for _, mbit in both)) if slower else None,
        latency_us=round(one_way[pair], 1) if differs > max(_LEAST_US, UNLIKE * expected_us) else None,
    )


def _expected(cluster: Cluster, ends: tuple[int, int]) -> float:
    path = cluster.path(*ends)
    return min(path.bytes_per_s_up, path.bytes_per_s_down) / BYTES_PER_MBIT


def _rounded(mbit: float | None) -> float | None:
    """To three digits: more was not measured."""
    return None if mbit is None else float(f"{mbit:.3g}")
