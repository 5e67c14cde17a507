"""The cost of each collective in closed form, to choose between them.

alpha is seconds of latency per message, beta seconds per byte of a full-duplex link that is as fast up as down, gamma
seconds to add a byte. All links are alike and all members start together. Each formula is derived in its collective's
file and holds for its defaults. Work that is cut into k pieces overlaps: of transfers and additions the longer one and
1/k of the other remain.

For large tensors the result is within a few per cent of `simulate`. With few pieces, or gamma near beta, it is rougher.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from podium.comm.rank_order import SMALL_BYTES, each_alone, sum_in_rank_order
from podium.errors import UnknownName
from podium.exchange.collectives.butterfly import Butterfly
from podium.exchange.collectives.halving_doubling import HalvingDoubling
from podium.exchange.collectives.hierarchical import Hierarchical, nearest_divisor
from podium.exchange.collectives.reduce_to_one import ReduceToOne
from podium.exchange.collectives.ring import Ring
from podium.exchange.collectives.task_graph import TaskGraph
from podium.exchange.collectives.tree import DoubleTree, both_places, depth_of

Formula = Callable[[int, int, float, float, float], float]


def seconds(name: str, nbytes: int, size: int, alpha: float, beta: float, gamma: float = 0.0) -> float:
    """Seconds for `size` members to sum `nbytes` bytes with this collective."""
    if name not in FORMULAS:
        raise UnknownName("collective with a formula", name, FORMULAS)
    if size == 1 or nbytes == 0:
        return 0.0
    return FORMULAS[name](nbytes, size, alpha, beta, gamma)


def two_level_seconds(
    nbytes: int,
    size: int,
    group_size: int,
    inside: tuple[float, float],
    across: tuple[float, float],
    gamma: float = 0.0,
) -> float:
    """Hierarchical with unequal links: (alpha, beta) inside a group, and across groups for each member at once."""
    groups = size // group_size
    shard = nbytes / group_size
    shares = (group_size - 1) * shard
    chunks = (groups - 1) * shard / groups
    inner = 2 * (inside[0] + shares * inside[1]) if group_size > 1 else 0.0
    outer = 2 * ((groups - 1) * across[0] + chunks * across[1])
    pieces = _pieces(shard, Hierarchical().segment_bytes)
    meeting = max(0, group_size - 2) * shard / pieces * inside[1]
    hidden = shares * inside[1] + chunks * across[1]
    return inner + outer + meeting - hidden + _overlap(hidden, (shares + chunks) * gamma, pieces)


def _ring(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    ring = Ring()
    chunk = n / max(1, min(p, n // ring.least_bytes))
    once = (p - 1) * chunk
    adding = _overlap(once * beta, once * gamma, _pieces(chunk, ring.segment_bytes))
    return 2 * (p - 1) * alpha + adding + once * beta


def _halving_doubling(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    defaults = HalvingDoubling()
    depth = p.bit_length() - 1
    power = 1 << depth
    folds = p > power
    if n <= defaults.small_bytes:
        return depth * (alpha + n * beta + n * gamma) + folds * (2 * (alpha + n * beta) + n * gamma)
    pieces = _pieces(n, defaults.segment_bytes)
    once = (1 - 1 / power) * n
    # A pair's two members work side by side, except on the segments in flight at the beginning.
    fold = (1 / 2 + min(1, defaults.window / pieces) / 2) * n * folds
    adding = _overlap((once + fold / 2) * beta, (once + folds * n / 2) * gamma, pieces)
    return 2 * (depth + folds) * alpha + adding + (once + fold / 2) * beta


def _tree(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    defaults = DoubleTree()
    pieces = _pieces(n / 2, defaults.segment_bytes)
    segment = n / 2 / pieces
    both = [both_places(member, p) for member in range(p)]
    # A member sends one segment along each of its edges, and receives one.
    busiest = max(sum(len(place.children) + (place.parent is not None) for place in places) for places in both)
    adds = max(sum(len(place.children) for place in places) for places in both)
    fill = 2 * (depth_of(p) - 1) * (alpha + segment * beta) + 2 * alpha
    return fill + _overlap(busiest * n / 2 * beta, adds * n / 2 * gamma, pieces)


def _hierarchical(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    return two_level_seconds(n, p, nearest_divisor(p), (alpha, beta), (alpha, beta), gamma)


def _reduce_to_one(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    pieces = _pieces(n, ReduceToOne().segment_bytes)
    once = (p - 1) * n
    return 2 * alpha + _overlap(once * beta, once * gamma, pieces) + once * beta / pieces


def _butterfly(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    pieces = _pieces(n / p, Butterfly().segment_bytes)
    return _owners(n, p, pieces, n / p / pieces, alpha, beta, gamma)


def _rank_order(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    cut = sum_in_rank_order(0, each_alone(p), n, 1)
    if n <= SMALL_BYTES:
        return 2 * (alpha + (p - 1) * n * beta) + (p - 1) * n * gamma
    return _owners(n, p, -(-len(cut) // p), n / len(cut), alpha, beta, gamma)


def _task_graph(n: int, p: int, alpha: float, beta: float, gamma: float) -> float:
    chunks = TaskGraph().chunks(p, n, 1)
    return _owners(n, p, -(-chunks // p), n / chunks, alpha, beta, gamma)


def _owners(n: int, p: int, pieces: int, piece: float, alpha: float, beta: float, gamma: float) -> float:
    """Each owner sums `pieces` pieces and sends its other bytes to their owners."""
    share = pieces * piece
    once = (p - 1) * share
    meeting = (p - 2) * piece * beta
    return 2 * alpha + _overlap(once * beta, once * gamma, pieces) + (n - share) * beta + meeting


def _overlap(transfers: float, additions: float, pieces: int) -> float:
    """Seconds of two pipelined operations on each of `pieces` pieces."""
    return max(transfers, additions) + min(transfers, additions) / pieces


def _pieces(nbytes: float, largest: int) -> int:
    return max(1, math.ceil(nbytes / largest))


FORMULAS: dict[str, Formula] = {
    "ring": _ring,
    "halving-doubling": _halving_doubling,
    "tree": _tree,
    "hierarchical": _hierarchical,
    "rank-order": _rank_order,
    "reduce-to-one": _reduce_to_one,
    "butterfly": _butterfly,
    "task-graph": _task_graph,
}
"""Keyed by the names in `COLLECTIVES`."""
