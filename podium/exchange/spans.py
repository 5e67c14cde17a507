"""Spans for codecs: a bucket or a server's range, with the matrices in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.exchange.codecs.base import Matrix, Span

if TYPE_CHECKING:
    from podium.engine.flat import Flat, Piece
    from podium.servers.ranges import Range


def spans_of(flat: Flat) -> list[Span]:
    """One span per bucket."""
    spans = []
    for bucket in flat.buckets:
        parts = [(flat.pieces[i], 0, flat.pieces[i].stop - flat.pieces[i].start) for i in bucket.pieces]
        matrices = matrices_of([(p, a, b, p.start - bucket.start) for p, a, b in parts])
        spans.append(Span(bucket.buffer, bucket.start, bucket.stop, matrices))
    return spans


def span_of(flat: Flat, part: Range) -> Span:
    """The span of a server's range."""
    pieces = [(flat.pieces[p.piece], p.start, p.stop, p.offset) for p in part.parts]
    return Span(part.buffer, part.start, part.stop, matrices_of(pieces))


def matrices_of(pieces: Sequence[tuple[Piece, int, int, int]]) -> tuple[Matrix, ...]:
    """The matrices among parts of parameters, each given as (piece, start and stop in it, offset in the span)."""
    found = []
    for piece, start, stop, offset in pieces:
        rows = piece.shape[0] if len(piece.shape) >= 2 else 0
        cols = (piece.stop - piece.start) // rows if rows else 0
        if cols < 2 or piece.stride[0] != cols:  # a vector, or rows that are not contiguous
            continue
        first, last = -(-start // cols), stop // cols
        if last - first >= 2:
            at = offset + first * cols - start
            found.append(Matrix(f"{piece.name}@{first}", at, last - first, cols))
    return tuple(found)
