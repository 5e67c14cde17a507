"""Halving and doubling: swap halves with ever farther members, then the same in reverse.

n bytes, p members, a power of two: 2 log2(p) alpha + 2(p-1)/p n beta + (p-1)/p n gamma. A ring's volume in fewer
rounds. Small tensors are sent whole: log2(p) (alpha + n beta + n gamma).

Not a power of two: let 2^k be the largest below p. The first 2(p - 2^k) members form pairs, and each pair acts as one
node: its members swap halves, each sums one half, and in the first round of halving each handles the half it has. After
that only one of them continues. The way back is the mirror image. Adds 2 alpha + n beta + n/2 gamma, where sending all
to one member would cost 2 alpha + 2 n beta + n gamma. With many segments in flight the pair's two members work side by
side, and the busiest link carries (5/2 - 2/2^k) n each way. Small tensors are folded whole: 2 (alpha + n beta).

All members end with the same bits: an element is summed by one member and copied; in recursive doubling all members
add along the same tree, and x + y is y + x.

Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication operations in MPICH"; Rabenseifner and
Träff, 2004, "More efficient reduction algorithms for non-power-of-two number of processors".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.comm.moves import Span, folded, in_window, require_positive, segments
from podium.comm.schedule import Chain, Move
from podium.errors import ConfigError
from podium.exchange.collectives.base import Scheduled


@final
@dataclass(frozen=True, kw_only=True)
class HalvingDoubling(Scheduled):
    """Recursive halving and doubling."""

    name: ClassVar[str] = "halving-doubling"

    segment_bytes: int = 1 << 20
    """The tensor is cut into segments of at most this size, each halved on its own."""
    window: int = 6
    """Segments in flight. Without a bound, the first rounds fill the links and the last rounds wait."""
    small_bytes: int = 64 << 10
    """Tensors up to this size are sent whole, in half as many rounds."""

    def __post_init__(self) -> None:
        require_positive("halving-doubling", segment_bytes=self.segment_bytes, window=self.window)
        if self.small_bytes < 0:
            raise ConfigError(f"halving-doubling: small_bytes must not be negative, got {self.small_bytes}")

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if size == 1 or numel == 0:
            return []
        nodes = folded(size)
        if numel * itemsize <= self.small_bytes:
            return [_double(index, nodes, (0, numel))]
        chains = [_halve(index, nodes, span) for span in segments(0, numel, itemsize, self.segment_bytes)]
        return in_window(chains, self.window, rounds=2 * len(nodes).bit_length())


def _double(index: int, nodes: list[tuple[int, int]], span: Span) -> Chain:
    """Whole tensors: a pair's second member sends its tensor to the first and receives the sum at the end."""
    depth = len(nodes).bit_length() - 1
    at = next(v for v, node in enumerate(nodes) if index in node)
    first, second = nodes[at]
    if index != first:
        return [Move("send", first, 0, *span), Move("put", first, depth + 1, *span)]
    moves = [Move("add", second, 0, *span)] if second != first else Chain()
    for t in range(depth):
        peer = nodes[at ^ 1 << t][0]
        moves += [Move("send", peer, 1 + t, *span), Move("add", peer, 1 + t, *span)]
    if second != first:
        moves.append(Move("send", second, depth + 1, *span))
    return moves


def _halve(index: int, nodes: list[tuple[int, int]], span: Span) -> Chain:
    """Halves, quarters … and back. A pair's first member has the lower half, its second the upper."""
    depth = len(nodes).bit_length() - 1
    at = next(v for v, node in enumerate(nodes) if index in node)
    paired = nodes[at][0] != nodes[at][1]
    middle = (span[0] + span[1]) // 2
    lower, upper = (span[0], middle), (middle, span[1])
    there, back = Chain(), Chain()

    mate = sum(nodes[at]) - index
    mine, others = (lower, upper) if index == nodes[at][0] else (upper, lower)
    if paired:
        there += [Move("send", mate, 0, *others), Move("add", mate, 0, *mine)]

    # The even node keeps the lower half, the odd one the upper; each half travels between the members that have it.
    even, odd = nodes[at & ~1], nodes[at | 1]
    halves = ((even[0], odd[0], lower), (odd[1], even[1], upper))
    there += [Move("send", keeper, 1, *half) for keeper, giver, half in halves if index == giver]
    there += [Move("add", giver, 1, *half) for keeper, giver, half in halves if index == keeper]
    back += [Move("send", giver, 2 * depth, *half) for keeper, giver, half in halves if index == keeper]
    back += [Move("put", keeper, 2 * depth, *half) for keeper, giver, half in halves if index == giver]

    start, stop = upper if at & 1 else lower
    if index == nodes[at][at & 1]:  # a member that keeps nothing waits for the last round back
        for t in range(1, depth):
            peer = nodes[at ^ 1 << t][at & 1]
            middle = (start + stop) // 2
            keep, give = ((middle, stop), (start, middle)) if at >> t & 1 else ((start, middle), (middle, stop))
            there += [Move("send", peer, 1 + t, *give), Move("add", peer, 1 + t, *keep)]
            back[:0] = [Move("send", peer, 2 * depth - t, *keep), Move("put", peer, 2 * depth - t, *give)]
            start, stop = keep

    if paired:
        back += [Move("send", mate, 2 * depth + 1, *mine), Move("put", mate, 2 * depth + 1, *others)]
    return [move for move in there + back if move.start < move.stop]
