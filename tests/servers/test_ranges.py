"""Ranges: every element of the parameters lies on exactly one server, and servers hold equally much."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st

from podium.flat import Piece
from podium.servers.ranges import Range, divide_ranges

WIDTHS = (4, 8)


@st.composite
def pieces_of_a_model(draw: st.DrawFn) -> list[Piece]:
    """Parameters of up to three groups in up to two buffers, laid out as `Flat` does, with padding here and there."""
    ends = [0, 0]
    pieces = []
    for i in range(draw(st.integers(1, 12))):
        buffer, size = draw(st.integers(0, 1)), draw(st.integers(1, 60))
        group = draw(st.integers(0, 2))
        ends[buffer] += draw(st.sampled_from([0, 0, 5]))
        pieces.append(Piece(f"p{i}", buffer, ends[buffer], ends[buffer] + size, group, (size,), (1,)))
        ends[buffer] += size
    return pieces


def elements(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    return [(r.buffer, i) for r in ranges for i in range(r.start, r.stop)]


@given(pieces_of_a_model(), st.integers(1, 9))
def test_every_element_lies_on_exactly_one_server(pieces: list[Piece], servers: int) -> None:
    held = [e for ranges in divide_ranges(pieces, WIDTHS, servers) for e in elements(ranges)]
    wanted = [(p.buffer, i) for p in pieces for i in range(p.start, p.stop)]
    assert sorted(held) == sorted(wanted)


@given(pieces_of_a_model(), st.integers(1, 9))
def test_servers_hold_equally_many_bytes_within_an_element(pieces: list[Piece], servers: int) -> None:
    divided = divide_ranges(pieces, WIDTHS, servers)
    assert len(divided) == servers
    held = [sum((r.stop - r.start) * WIDTHS[r.buffer] for r in ranges) for ranges in divided]
    assert max(held) - min(held) <= 3 * max(WIDTHS)


@given(pieces_of_a_model(), st.integers(1, 9))
def test_no_range_mixes_groups_or_buffers(pieces: list[Piece], servers: int) -> None:
    for ranges in divide_ranges(pieces, WIDTHS, servers):
        for range_ in ranges:
            of = {(pieces[part.piece].group, pieces[part.piece].buffer) for part in range_.parts}
            assert of == {(range_.group, range_.buffer)}


@given(pieces_of_a_model(), st.integers(1, 9))
def test_parts_say_where_in_their_range_and_piece_they_lie(pieces: list[Piece], servers: int) -> None:
    for ranges in divide_ranges(pieces, WIDTHS, servers):
        for range_ in ranges:
            covered = 0
            for part in range_.parts:
                assert part.offset == covered
                assert pieces[part.piece].start + part.start == range_.start + part.offset
                covered += part.stop - part.start
            assert covered == range_.stop - range_.start


def test_neighbours_of_one_group_are_one_range() -> None:
    pieces = [
        Piece("a", 0, 0, 6, 0, (6,), (1,)),
        Piece("b", 0, 6, 10, 0, (4,), (1,)),
        Piece("c", 0, 10, 20, 1, (10,), (1,)),
    ]
    first, second = divide_ranges(pieces, WIDTHS, 2)
    assert [(r.start, r.stop, r.group) for r in first] == [(0, 10, 0)]
    assert [(r.start, r.stop, r.group) for r in second] == [(10, 20, 1)]


def test_a_range_is_a_view_of_the_buffer() -> None:
    flat = torch.arange(20.0)
    (range_,) = divide_ranges([Piece("a", 0, 0, 20, 0, (20,), (1,))], WIDTHS, 2)[1]
    range_.of([flat]).zero_()
    assert flat.tolist() == [*range(10), *[0] * 10]
