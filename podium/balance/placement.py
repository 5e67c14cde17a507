"""Which nodes servers should live on, by the links between them and the workers.

Cost model, for one synchronous step: every worker sends each of M servers an M-th of n bytes, all at once, and each
server sends as much back to every worker. A node's network card carries one transfer after the other, at the rate of
the path at that end; transfers within a node go through memory and occupy no card. Each direction takes as long as the
busiest card, plus the longest latency:

    push_s = max over nodes of (sum of its transfers' bytes / rate, out or in) + max latency
    step_s = push_s + pull_s

All servers are assumed to hold equal ranges; `podium.balance.ranges` chooses the sizes on given nodes. The nodes'
processors are ignored: a server on a worker's node is judged by its links alone.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import combinations_with_replacement
from typing import TYPE_CHECKING

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.launch.clusters.description import Cluster

Path = Callable[[int, int], tuple[float, float, int]]
"""From one node to another: rates up and down, latency in nanoseconds."""
Key = tuple[float, int, tuple[int, ...]]
"""Order of placements, best first: seconds, ranks on its nodes, and the nodes themselves."""

MOST_TRANSFERS = 200_000
"""All placements are tried up to this many transfers, about half a second. Beyond, servers are placed one by one."""
STEP_BYTES = 4 << 20
"""Default bytes per step: a model of a million parameters."""


def step_seconds(cluster: Cluster, workers: Sequence[int], servers: Sequence[int], nbytes: int = STEP_BYTES) -> float:
    """Predicted seconds of a synchronous step's exchange, with workers and servers on these nodes."""
    return _step_seconds(cluster.path, Counter(workers), servers, nbytes)


def _step_seconds(path: Path, workers: Mapping[int, int], servers: Sequence[int], nbytes: int) -> float:
    part = nbytes / len(servers)
    there = [(w, s, n * m) for s, m in Counter(servers).items() for w, n in workers.items()]
    return _way_seconds(path, there, part) + _way_seconds(path, [(s, w, n) for w, s, n in there], part)


def _way_seconds(path: Path, transfers: Sequence[tuple[int, int, int]], part: float) -> float:
    """Seconds of one direction; transfers are (from, to, count) of `part` bytes each."""
    out: dict[int, float] = defaultdict(float)
    into: dict[int, float] = defaultdict(float)
    longest, memory = 0.0, 0.0
    for a, b, count in transfers:
        up, down, latency_ns = path(a, b)
        longest = max(longest, latency_ns / 1e9)
        if a == b:
            memory = max(memory, count * part / min(up, down))
        else:
            out[a] += count * part / up
            into[b] += count * part / down
    return max([memory, *out.values(), *into.values()]) + longest


def best_server_nodes(
    cluster: Cluster, workers: Sequence[int], servers: int, nbytes: int = STEP_BYTES
) -> tuple[int, ...]:
    """The nodes for this many servers that make a synchronous step's exchange shortest, in order.

    `workers`: the node of each worker. Several servers may share a node. Among placements that take equally long, the
    one on nodes with the fewest ranks wins, then the one on the first nodes. All placements are tried where they are
    few; otherwise servers are placed one after the other, each on its best node, and moved as long as that helps.
    """
    if not workers or servers < 0:
        raise ConfigError(f"placement: there must be a worker and 0 servers or more, got {len(workers)} and {servers}")
    if servers == 0:
        return ()
    path, load = cache(cluster.path), Counter(workers)

    def key(nodes: tuple[int, ...]) -> Key:
        """Seconds are rounded, so that sums in another order compare equal."""
        seconds = float(f"{_step_seconds(path, load, nodes, nbytes):.9e}")
        return seconds, sum(load[node] + nodes.count(node) for node in nodes), nodes

    placements = math.comb(len(cluster.nodes) + servers - 1, servers)
    kinds = len(set(workers)) * min(servers, len(cluster.nodes))
    if placements * kinds <= MOST_TRANSFERS:
        return min(combinations_with_replacement(range(len(cluster.nodes)), servers), key=key)
    return _placed_in_turn(len(cluster.nodes), servers, key)


def _placed_in_turn(nodes: int, servers: int, key: Callable[[tuple[int, ...]], Key]) -> tuple[int, ...]:
    placed: tuple[int, ...] = ()
    for _ in range(servers):
        placed = min((_sorted(*placed, node) for node in range(nodes)), key=key)
    while True:
        moved = min(_moves(placed, nodes), key=key)
        if key(moved) >= key(placed):
            return placed
        placed = moved


def _moves(placed: tuple[int, ...], nodes: int) -> Iterator[tuple[int, ...]]:
    """All placements with one server moved to another node."""
    for place in {node: i for i, node in enumerate(placed)}.values():
        for node in range(nodes):
            yield _sorted(*placed[:place], node, *placed[place + 1 :])


def _sorted(*nodes: int) -> tuple[int, ...]:
    return tuple(sorted(nodes))


def describe(cluster: Cluster, workers: Sequence[int], servers: Sequence[int], nbytes: int = STEP_BYTES) -> str:
    """A sentence: where servers are, how long a step's exchange takes there, and how long on the best nodes."""
    if not servers:
        return "no servers to place"
    here = step_seconds(cluster, workers, servers, nbytes)
    best = best_server_nodes(cluster, workers, len(servers), nbytes)
    least = step_seconds(cluster, workers, best, nbytes)
    text = (
        f"servers on {_names(cluster, servers)}: the exchange of a step ({nbytes / 1e6:g} MB) takes "
        f"{here * 1e3:.3g} ms by the links"
    )
    if least < 0.99 * here:
        return f"{text}; on {_names(cluster, best)} it would take {least * 1e3:.3g} ms"
    return f"{text}, and no other nodes would make it shorter"


def _names(cluster: Cluster, nodes: Sequence[int]) -> str:
    return ", ".join(cluster.names[node] for node in nodes)
