"""Which part of the flat parameters lives on which server.

Servers hold stretches of the flat buffers, balanced by bytes to the element and cut wherever the balance says, not at
layers: one huge layer is simply shared. A stretch never mixes two parameter groups, so one set of hyper-parameters
rules it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from podium.flat import Piece


class Part(NamedTuple):
    """The elements of one piece (parameter) that lie on a server, and where they lie in its range."""

    piece: int
    start: int  # inside the piece, in memory order
    stop: int
    offset: int  # inside the range


class Range(NamedTuple):
    """Elements `start` to `stop` of a flat buffer, all of one parameter group."""

    buffer: int
    start: int
    stop: int
    group: int
    parts: tuple[Part, ...]

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """This range of the flat buffers."""
        return flats[self.buffer][self.start : self.stop]


def divide_ranges(pieces: Sequence[Piece], element_bytes: Sequence[int], servers: int) -> list[list[Range]]:
    """Ranges of each server; every element lies in exactly one, and servers differ by a few elements at most."""
    sizes = [(p.stop - p.start) * element_bytes[p.buffer] for p in pieces]
    total, before = sum(sizes), 0
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in range(servers)]  # (piece, start, stop)
    for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        width, start = element_bytes[piece.buffer], 0
        for m in range(servers):
            ends_at = total * (m + 1) // servers - before  # in bytes from this piece's start
            stop = piece.stop - piece.start if m == servers - 1 else min(piece.stop - piece.start, ends_at // width)
            if stop > start:
                cuts[m].append((i, start, stop))
                start = stop
        before += size
    return [_join(pieces, cut) for cut in cuts]


def _join(pieces: Sequence[Piece], cuts: Sequence[tuple[int, int, int]]) -> list[Range]:
    """Neighbouring cuts of one buffer and group become one range."""
    ranges: list[Range] = []
    for i, start, stop in cuts:
        piece = pieces[i]
        place = piece.start + start
        last = next((r for r in reversed(ranges) if r.buffer == piece.buffer), None)
        if last is not None and last.stop == place and last.group == piece.group:
            grown = last._replace(
                stop=place + stop - start, parts=(*last.parts, Part(i, start, stop, place - last.start))
            )
            ranges[ranges.index(last)] = grown
        else:
            ranges.append(Range(piece.buffer, place, place + stop - start, piece.group, (Part(i, start, stop, 0),)))
    return ranges
