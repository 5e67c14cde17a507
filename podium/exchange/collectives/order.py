"""In which order a ring should visit the members, given the cost of each link.

A ring is as slow as its slowest link, so the slowest link is minimised first, then the sum of all links. This is the
bottleneck travelling salesman problem. Up to `EXACT` members it is solved exactly (Held and Karp, 1962, "A dynamic
programming approach to sequencing problems"). Beyond, tours are grown by nearest neighbour and improved by reversing
and by moving runs of members, until neither helps (Croes, 1958, "A method for solving traveling-salesman problems"; Or,
1976), under a bound on the slowest link that is then lowered as far as possible.

Costs may differ by direction. All members find the same order: the search is deterministic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from podium.errors import ConfigError

EXACT = 12
"""Up to this many members the search is exhaustive."""

Matrix = NDArray[np.float64]
Tour = NDArray[np.int64]


def best_ring(cost: Sequence[Sequence[float]] | Matrix) -> tuple[int, ...]:
    """The members in ring order, starting with 0. `cost[i][j]` is the cost to send from i to j, in any unit."""
    matrix = np.asarray(cost, dtype=np.float64)
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1] or not len(matrix):
        raise ConfigError(f"best_ring: cost must have a row and a column for each member, got shape {matrix.shape}")
    if not np.isfinite(matrix).all():
        raise ConfigError("best_ring: costs must be finite; give a link that is down a high cost")
    if len(matrix) <= 3 and np.array_equal(matrix, matrix.T):
        return tuple(range(len(matrix)))
    return solved_ring(matrix) if len(matrix) <= EXACT else searched_ring(matrix)


def ring_cost(cost: Sequence[Sequence[float]] | Matrix, order: Sequence[int]) -> tuple[float, float]:
    """The slowest link of a ring, and the sum of all its links."""
    matrix = np.asarray(cost, dtype=np.float64)
    if len(order) < 2:
        return 0.0, 0.0
    links = [float(matrix[a, b]) for a, b in pairwise([*order, order[0]])]
    return max(links), math.fsum(links)


def solved_ring(cost: Matrix) -> tuple[int, ...]:
    """The optimal order. Time and memory grow as 2^p: for small p."""
    if len(cost) < 2:
        return tuple(range(len(cost)))
    slowest, _ = ring_cost(cost, _shortest(cost, np.maximum))
    return _shortest(np.where(cost <= slowest, cost, np.inf), np.add)


def _shortest(cost: Matrix, join: np.ufunc) -> tuple[int, ...]:
    """The best tour through all members, where `join` combines link costs: by maximum or by sum."""
    p = len(cost)
    rest = p - 1  # the tour begins and ends at member 0; bit i is member i + 1
    best = np.full((1 << rest, rest), np.inf)
    came = np.zeros((1 << rest, rest), dtype=np.int64)
    for i in range(rest):
        best[1 << i, i] = cost[0, i + 1]
    for seen in range(1, 1 << rest):
        for i in range(rest):
            before = seen ^ 1 << i
            if seen >> i & 1 and before:
                ways = join(best[before], cost[1:, i + 1])
                came[seen, i] = ways.argmin()
                best[seen, i] = ways[came[seen, i]]
    seen = (1 << rest) - 1
    last = int(join(best[seen], cost[1:, 0]).argmin())
    way: list[int] = []
    while seen:
        way.append(last + 1)
        seen, last = seen ^ 1 << last, int(came[seen, last])
    return (0, *reversed(way))


def searched_ring(cost: Matrix) -> tuple[int, ...]:
    """A good order, never worse than 0, 1, 2, …. Takes a few seconds for hundreds of members."""
    p = len(cost)
    if p < 5:
        return solved_ring(cost)
    best = np.arange(p)
    for start in (best, *_grown(cost)):
        best = _better(cost, best, _polished(cost, start))
    best = _tightened(cost, best)
    for kick in range(min(200, 200_000 // p**2)):
        slowest = ring_cost(cost, best.tolist())[0]
        # Alternate: look for a smaller sum, and for a faster slowest link.
        bound = slowest if kick % 2 else math.nextafter(slowest, -math.inf)
        best = _better(cost, best, _polished(cost, _kicked(best, kick), bound))
    best = _tightened(cost, best)
    return tuple(np.roll(best, -int(np.argmin(best))).tolist())


def _better(cost: Matrix, a: Tour, b: Tour) -> Tour:
    return min(a, b, key=lambda tour: ring_cost(cost, tour.tolist()))


def _grown(cost: Matrix) -> Iterator[Tour]:
    """Nearest-neighbour tours from a few starting members."""
    p = len(cost)
    for start in range(0, p, max(1, p // (4 if p <= 100 else 1))):
        left = np.ones(p, dtype=bool)
        tour = [start]
        for _ in range(p - 1):
            left[tour[-1]] = False
            tour.append(int(np.where(left, cost[tour[-1]], np.inf).argmin()))
        yield np.array(tour)


def _kicked(tour: Tour, kick: int) -> Tour:
    """Swap two runs of members, which one reversal or move of a short run cannot undo; or shuffle all."""
    chance = np.random.default_rng(kick)
    if kick % 5 == 4:
        return chance.permutation(tour)
    a, b, c = np.sort(chance.choice(np.arange(1, len(tour)), size=3, replace=False))
    return np.concatenate((tour[:a], tour[b:c], tour[a:b], tour[c:]))


def _tightened(cost: Matrix, tour: Tour) -> Tour:
    """Lower the bound on the slowest link by bisection, as long as the search finds a tour within it."""
    off = np.where(np.eye(len(cost), dtype=bool), np.inf, cost)
    least = max(off.min(axis=0).max(), off.min(axis=1).max())  # each member sends once and receives once
    bounds = np.unique(cost[(cost >= least) & (off < np.inf)])
    low, high = 0, int(np.searchsorted(bounds, ring_cost(cost, tour.tolist())[0]))
    while low < high:
        middle = (low + high) // 2
        tried = _polished(cost, tour, float(bounds[middle]))
        slowest = ring_cost(cost, tried.tolist())[0]
        if slowest <= bounds[middle]:
            tour, high = tried, int(np.searchsorted(bounds, slowest))
        else:
            low = middle + 1
    return _better(cost, tour, _polished(cost, tour, float(bounds[high])))


def _polished(cost: Matrix, tour: Tour, bound: float = math.inf) -> Tour:
    """Apply the best change until none helps. A link above the bound weighs more than all others together."""
    span = float(np.ptp(cost)) or 1.0
    weight = (cost - cost.min()) / span + np.where(cost > bound, 2.0 * len(cost), 0.0)
    for _ in range(2 * len(cost)):
        changed = _changed(weight, tour)
        if changed is None:
            break
        tour = changed
    return tour


def _changed(weight: Matrix, tour: Tour) -> Tour | None:
    """Apply the best reversal of a run or move of a short run; None where nothing is gained.

    Below, w[i, j] is the weight from place i to place j of the ring.
    """
    p = len(tour)
    w = weight[np.ix_(tour, tour)]
    places = np.arange(p)
    after = (places + 1) % p
    along, against = w[places, after], w[after, places]
    best, change = -1e-9 * p, None

    turned = np.concatenate(
        ([0.0], np.cumsum(against - along)[:-1])
    )  # added weight of reversing all links before a place
    gain = w + w[np.ix_(after, after)] - along[:, None] - along + turned - turned[after][:, None]
    gain[np.tri(p, dtype=bool)] = np.inf
    i, j = divmod(int(gain.argmin()), p)
    if gain[i, j] < best:
        best, change = gain[i, j], np.concatenate((tour[: i + 1], tour[i + 1 : j + 1][::-1], tour[j + 1 :]))

    for length in range(1, min(3, p - 3) + 1):
        last, behind = (places + length - 1) % p, (places + length) % p
        closed = w[places - 1, behind] - along[places - 1] - along[last]
        gain = w.T + w[np.ix_(last, after)] - along + closed[:, None]
        for inside in range(-1, length):
            gain[places, (places + inside) % p] = np.inf
        i, j = divmod(int(gain.argmin()), p)
        if gain[i, j] < best:
            ring = np.roll(tour, -i)  # the moved run first
            cut = (j - i) % p + 1
            best, change = gain[i, j], np.concatenate((ring[length:cut], ring[:length], ring[cut:]))
    return change
