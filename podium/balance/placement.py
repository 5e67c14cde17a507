"""Which nodes servers should live on, by the links between them and the workers.

Cost model, for one synchronous step: every worker sends each of M servers an M-th of n bytes, all at once, and each
server sends as much back to every worker. A node's card is busy with one transfer after the other, at the rate that
the path has at that end; what stays on a node goes through memory and occupies no card. Each way takes as long as the
busiest card, and the longest latency:

    push_s = max over nodes of (sum of its transfers' bytes / rate, out or in) + max latency
    step_s = push_s + pull_s

Servers of equal ranges are assumed; how large ranges should be on given nodes is what `podium.balance.ranges` says. Of
the nodes' processors nothing is known here: a server on a worker's node is judged by its links alone.
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
"""What a message from one node to another meets: rates up and down, latency in nanoseconds."""
Key = tuple[float, int, tuple[int, ...]]
"""What the best placement is least in: seconds, ranks on its nodes, and the nodes themselves."""

MOST_TRANSFERS = 200_000
"""Transfers that may be looked at to try all placements: about half a second. Beyond, servers are placed in turn."""
STEP_BYTES = 4 << 20
"""What a step is taken to move, where nobody says: a model of a million parameters."""


def step_seconds(cluster: Cluster, workers: Sequence[int], servers: Sequence[int], nbytes: int = STEP_BYTES) -> float:
    """What the exchange of a synchronous step takes by the links, with workers and servers on these nodes."""
    return _step_seconds(cluster.path, Counter(workers), servers, nbytes)


def _step_seconds(path: Path, workers: Mapping[int, int], servers: Sequence[int], nbytes: int) -> float:
    part = nbytes / len(servers)
    there = [(w, s, n * m) for s, m in Counter(servers).items() for w, n in workers.items()]
    return _way_seconds(path, there, part) + _way_seconds(path, [(s, w, n) for w, s, n in there], part)


def _way_seconds(path: Path, transfers: Sequence[tuple[int, int, int]], part: float) -> float:
    """One way: (from, to, how many of them) of `part` bytes each."""
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
    one on nodes with the fewest ranks, then on the first. All are tried where they are few; where they are many,
    servers are placed one after the other, each where it is best, and moved as long as that helps.
    """
    if not workers or servers < 0:
        raise ConfigError(f"placement: there must be a worker and 0 servers or more, got {len(workers)} and {servers}")
    if servers == 0:
        return ()
    path, load = cache(cluster.path), Counter(workers)

    def key(nodes: tuple[int, ...]) -> Key:
        """Seconds are rounded: sums in another order are no difference."""
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
    """With one server elsewhere."""
    for place in {node: i for i, node in enumerate(placed)}.values():
        for node in range(nodes):
            yield _sorted(*placed[:place], node, *placed[place + 1 :])


def _sorted(*nodes: int) -> tuple[int, ...]:
    return tuple(sorted(nodes))


def describe(cluster: Cluster, workers: Sequence[int], servers: Sequence[int], nbytes: int = STEP_BYTES) -> str:
    """In words: where servers are, what a step's exchange takes there, and what the best nodes would save."""
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
