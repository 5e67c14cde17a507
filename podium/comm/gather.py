"""All-gather around a ring, for tensors that cannot be summed, such as packed ones; and broadcast along a line.

Parts of n bytes, p members: (p-1) alpha + (p-1) n beta. A part travels in segments, so that a member forwards the
beginning of a part before its end has arrived. A broadcast of n bytes along the members in s segments: (p-2+s) (alpha +
n/s beta). In rank order both cross from one host to another as few times as there are hosts.

Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication operations in MPICH".
"""

from __future__ import annotations

from podium.comm.moves import Span, in_turn, segments
from podium.comm.schedule import Chain, Move


def gather_schedule(index: int, size: int, numel: int, itemsize: int = 1, segment_bytes: int = 1 << 20) -> list[Chain]:
    """The moves of member `index` over a tensor of size * numel elements; member i's part begins at i * numel."""
    if size == 1:
        return []
    cut = [
        [(part, span) for span in segments(part * numel, (part + 1) * numel, itemsize, segment_bytes)]
        for part in range(size)
    ]
    return [_pass_on(index, size, part, span) for part, span in in_turn(cut)]


def _pass_on(index: int, size: int, part: int, span: Span) -> Chain:
    hop = (index - part) % size
    moves = Chain()
    if hop > 0:
        moves.append(Move("put", (index - 1) % size, hop - 1, *span))
    if hop < size - 1:
        moves.append(Move("send", (index + 1) % size, hop, *span))
    return moves


def broadcast_schedule(
    index: int, size: int, source: int, numel: int, itemsize: int = 1, segment_bytes: int = 1 << 20
) -> list[Chain]:
    """The moves of member `index` to copy all elements of member `source`."""
    if size == 1 or numel == 0:
        return []
    hop = (index - source) % size
    chains = []
    for span in segments(0, numel, itemsize, segment_bytes):
        got = [Move("put", (index - 1) % size, hop - 1, *span)] if hop > 0 else []
        chains.append([*got, *([Move("send", (index + 1) % size, hop, *span)] if hop < size - 1 else [])])
    return chains
