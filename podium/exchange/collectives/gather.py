"""All-gather around a ring, for tensors that cannot be summed, such as packed ones.

Parts of n bytes, p members: (p-1) alpha + (p-1) n beta. A part travels in segments, so that a member forwards the
beginning of a part before its end has arrived.

Thakur, Rabenseifner and Gropp, 2005, "Optimization of collective communication operations in MPICH".
"""

from __future__ import annotations

from podium.comm.schedule import Chain, Move
from podium.exchange.collectives.moves import Span, in_turn, segments


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
