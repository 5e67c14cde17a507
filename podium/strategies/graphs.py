"""The graphs on which workers gossip, and their weights.

    ring          the workers before and after
    exponential   the workers 1, 2, 4, … places away, on both sides; under push-sum, only those ahead
    one-peer      one of these per round, cyclically: to the worker 2^k places ahead, from the one 2^k behind
    complete      all other workers
    random        to one worker, drawn again each round: some workers receive several messages, some none

A round is x_i <- own x_i + sum over j of weight_j x_j. The weights of all workers form a matrix W, with a row for each
receiver. In all these graphs every worker sends to the same number of workers, d. So all Metropolis weights, which are
1 / (1 + the larger number of neighbours), equal 1 / (1 + d), and each column of W sums to 1: the sum over all workers
does not change. Where every worker also receives from d workers, each row sums to 1 too, and rounds converge to the
mean: each shrinks the distance from it by the second largest singular value of W. The rows of a `random` graph do not
sum to 1, so it needs push-sum.

One-peer rounds over a power of two of workers are exact: after log2 N of them every worker has the mean.

Ying et al., 2021, Exponential Graph is Provably Efficient for Decentralized Deep Learning, arXiv 2110.13363.
Xiao and Boyd, 2004, Fast linear iterations for distributed averaging (weights).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np

Graph = Literal["ring", "exponential", "one-peer", "complete", "random"]
NEEDS_PUSH_SUM: tuple[Graph, ...] = ("random",)


class Mixing(NamedTuple):
    """One worker's part of one round. Workers are identified by index, not by rank."""

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    weight: float  # of each vector that is received
    own: float


def mixing(graph: Graph, index: int, size: int, turn: int, *, directed: bool = False, seed: int = 0) -> Mixing:
    """The part of worker `index` of `size` in round `turn`; `seed` is for random graphs."""
    if graph == "random":
        targets = _draw(size, turn, seed)
        heard = tuple(i for i, target in enumerate(targets) if target == index)
        return Mixing(targets[index : index + 1], heard, 0.5, 0.5) if size > 1 else Mixing((), (), 0.0, 1.0)
    distances = _distances(graph, size, turn % max(1, (size - 1).bit_length()), directed)
    sends = tuple((index + d) % size for d in distances)
    receives = tuple((index - d) % size for d in distances)
    weight = 1 / (1 + len(distances))
    return Mixing(sends, receives, weight, weight)


@lru_cache(maxsize=256)
def _distances(graph: Graph, size: int, turn: int, directed: bool) -> tuple[int, ...]:
    """Distances from a worker to the workers it sends to, in places ahead."""
    hops = [1 << k for k in range((size - 1).bit_length())]  # all below `size`
    if graph == "ring":
        found = [1, -1]
    elif graph == "complete":
        found = list(range(1, size))
    elif graph == "one-peer":
        found = hops[turn : turn + 1]
    else:
        found = hops if directed else [d for hop in hops for d in (hop, -hop)]
    return tuple(sorted({d % size for d in found} - {0}))


@lru_cache(maxsize=256)
def _draw(size: int, turn: int, seed: int) -> tuple[int, ...]:
    """The worker that each one sends to, never itself. All workers draw the same."""
    if size == 1:
        return ()
    others = np.random.default_rng([seed, turn]).integers(0, size - 1, size)
    return tuple(int(other + (other >= i)) for i, other in enumerate(others))
