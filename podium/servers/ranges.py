"""Which part of the flat parameters lies on which server.

Servers hold ranges of the flat buffers, balanced by bytes to the element and not cut at layers: one huge layer lies on
several servers. A range never mixes two parameter groups, so one set of hyper-parameters applies to it. Where servers
are unequal, weights give each server's fraction of the whole (`podium.balance.ranges`).

One message holds a unit: neighbouring ranges of one server, at most `unit_bytes` of them, ready when the last bucket
that they touch is. So gradients can leave while backward still runs, and parameters come back while other gradients
are still being sent.

An embedding that travels by rows is cut between rows, and each server's part of it is a separate range and unit, of
which only touched rows travel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from podium.engine.flat import Flat, Piece

T = TypeVar("T")

_ROW_UNIT_BYTES = 256 << 20
"""Embeddings that travel by rows are cut into units of this size, far below the largest message: usually few rows
travel, and all of them after a server was restored."""
_MOST_RANGES = 256
"""Ranges of one unit, each a tensor in its messages: a header of 64 KiB must describe them."""


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
    row: int = 0  # elements per row, where it travels by rows

    def of(self, flats: Sequence[Tensor]) -> Tensor:
        """This range of the flat buffers."""
        return flats[self.buffer][self.start : self.stop]


class Unit(NamedTuple):
    """Ranges that travel together: numbers `first` to `stop` of their server, ready with this bucket."""

    bucket: int
    first: int
    stop: int

    def of(self, each: Sequence[T]) -> Sequence[T]:
        """This unit's items of a list with one item per range."""
        return each[self.first : self.stop]


def groups_of(ranges: Sequence[Range]) -> list[int]:
    """The parameter groups of which these ranges hold a part."""
    return sorted({r.group for r in ranges})


class Layout(NamedTuple):
    """One server's ranges and units."""

    ranges: list[Range]
    units: list[Unit]


def lay_out(flat: Flat, servers: int, unit_bytes: int, weights: Sequence[float] | None = None) -> list[Layout]:
    """The ranges and units of every server: the same on every rank for the same model and weights."""
    sizes = [p.element_size() for p in flat.params]
    buckets = [[(b.start, b.stop) for b in flat.buckets if b.buffer == n] for n in range(len(flat.params))]
    numbers = {(b.buffer, b.start): n for n, b in enumerate(flat.buckets)}
    layouts = []
    for ranges in divide_ranges(flat.pieces, sizes, servers, weights):
        cut: list[tuple[int, Range]] = []
        for r in ranges:
            longest = max(1, unit_bytes // sizes[r.buffer])
            if r.row:
                longest = max(1, max(_ROW_UNIT_BYTES, unit_bytes) // (r.row * sizes[r.buffer])) * r.row
            for start, stop in buckets[r.buffer]:
                for a in range(max(start, r.start), min(stop, r.stop), longest):
                    b = min(a + longest, stop, r.stop)
                    cut.append((numbers[r.buffer, start], _clip(flat.pieces, r, a, b)))
        cut.sort(key=lambda item: (item[0], item[1].buffer, item[1].start))
        layouts.append(Layout([r for _, r in cut], _group(cut, sizes, unit_bytes)))
    return layouts


def _clip(pieces: Sequence[Piece], r: Range, start: int, stop: int) -> Range:
    """The part of a range between two positions of its buffer."""
    parts = []
    for part in r.parts:
        place = r.start + part.offset  # where the part begins in the buffer
        a, b = max(start, place), min(stop, place + part.stop - part.start)
        if a < b:
            parts.append(Part(part.piece, part.start + a - place, part.start + b - place, a - start))
    return r._replace(start=start, stop=stop, parts=tuple(parts))


def _group(cut: Sequence[tuple[int, Range]], sizes: Sequence[int], unit_bytes: int) -> list[Unit]:
    """Neighbouring ranges share a unit while they fit; a server without ranges has one empty unit."""
    units: list[Unit] = []
    room = 0
    for n, (bucket, r) in enumerate(cut):
        size = (r.stop - r.start) * sizes[r.buffer]
        if units and size <= room and not r.row and n - units[-1].first < _MOST_RANGES:
            units[-1] = units[-1]._replace(bucket=bucket, stop=n + 1)
        else:
            units.append(Unit(bucket, n, n + 1))
            room = 0 if r.row else unit_bytes
        room -= size
    return units or [Unit(0, 0, 0)]


def divide_ranges(
    pieces: Sequence[Piece], element_bytes: Sequence[int], servers: int, weights: Sequence[float] | None = None
) -> list[list[Range]]:
    """Ranges of each server; every element lies in exactly one.

    In proportion to the weights, one per server; without weights, equal. A server's part differs from that by a few
    elements at most, or by a row of an embedding that is cut between rows.
    """
    sizes = [(p.stop - p.start) * element_bytes[p.buffer] for p in pieces]
    ends, before = _ends(sum(sizes), servers, weights), 0
    cuts: list[list[tuple[int, int, int]]] = [[] for _ in range(servers)]  # (piece, start, stop)
    for i, (piece, size) in enumerate(zip(pieces, sizes, strict=True)):
        width, start = element_bytes[piece.buffer], 0
        for m in range(servers):
            ends_at = (ends[m] - before) // width  # elements from this piece's start
            if piece.row:  # between two rows
                ends_at = round(ends_at / piece.row) * piece.row
            stop = piece.stop - piece.start if m == servers - 1 else min(piece.stop - piece.start, ends_at)
            if stop > start:
                cuts[m].append((i, start, stop))
                start = stop
        before += size
    return [_join(pieces, cut) for cut in cuts]


def _ends(total: int, servers: int, weights: Sequence[float] | None) -> list[int]:
    """Where each server's part of these bytes ends."""
    if weights is None:
        return [total * (m + 1) // servers for m in range(servers)]
    assert len(weights) == servers and min(weights) > 0, weights
    whole = math.fsum(weights)
    return [int(total * (math.fsum(weights[: m + 1]) / whole)) for m in range(servers)]


def _join(pieces: Sequence[Piece], cuts: Sequence[tuple[int, int, int]]) -> list[Range]:
    """Neighbouring cuts of one buffer and group become one range."""
    ranges: list[Range] = []
    for i, start, stop in cuts:
        piece = pieces[i]
        place = piece.start + start
        last = next((r for r in reversed(ranges) if r.buffer == piece.buffer), None)
        dense = last is not None and not last.row and not piece.row
        if dense and last is not None and last.stop == place and last.group == piece.group:
            grown = last._replace(
                stop=place + stop - start, parts=(*last.parts, Part(i, start, stop, place - last.start))
            )
            ranges[ranges.index(last)] = grown
        else:
            parts = (Part(i, start, stop, 0),)
            ranges.append(Range(piece.buffer, place, place + stop - start, piece.group, parts, piece.row))
    return ranges
