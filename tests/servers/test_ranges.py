"""Ranges: every element of the parameters lies on exactly one server, and servers hold equally much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

from podium.engine.flat import Bucket, Flat, Piece
from podium.servers.ranges import Range, divide_ranges, lay_out

T = TypeVar("T")

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


# Units.


class Numbers(nn.Module):
    """Parameters of given sizes and dtypes, and embeddings of given rows."""

    def __init__(self, sizes: Sequence[int], doubles: Sequence[bool], tables: Sequence[tuple[int, int]]) -> None:
        super().__init__()
        kinds = [torch.float64 if double else torch.float32 for double in doubles]
        self.all = nn.ParameterList(
            nn.Parameter(torch.randn(n, dtype=kind)) for n, kind in zip(sizes, kinds, strict=True)
        )
        self.tables = nn.ModuleList(nn.Embedding(rows, width, sparse=True) for rows, width in tables)


class Model(NamedTuple):
    sizes: list[int]
    doubles: list[bool]
    groups: list[int]
    bucket_bytes: int
    first_bucket_bytes: int
    tables: list[tuple[int, int]] = []  # noqa: RUF012  # nobody changes it
    """Rows and width of embeddings that travel by rows."""

    def flat(self) -> Flat:
        model = Numbers(self.sizes, self.doubles, self.tables)
        present = sorted(set(self.groups))
        groups = [[p for p, g in zip(model.all, self.groups, strict=True) if g == group] for group in present]
        groups[0] += list(model.tables.parameters())
        optimizer = SGD([{"params": group} for group in groups], lr=0.1)
        return Flat(model, optimizer, self.bucket_bytes, self.first_bucket_bytes, rows=True)


@st.composite
def models(draw: st.DrawFn) -> Model:
    count = draw(st.integers(1, 10))

    def several(each: st.SearchStrategy[T]) -> list[T]:
        return draw(st.lists(each, min_size=count, max_size=count))

    sizes = several(st.one_of(st.just(1), st.integers(0, 90), st.integers(200, 700)))
    assume(any(sizes))  # something to train
    return Model(
        sizes,
        several(st.booleans()),
        several(st.integers(0, 2)),
        draw(st.integers(1, 5000)),
        draw(st.integers(1, 3000)),
        draw(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 20)), max_size=2)),
    )


LAID_OUT = (models(), st.integers(1, 7), st.integers(1, 3000))
"""A model, servers, and the bytes of a unit."""


@settings(max_examples=40)
@given(*LAID_OUT)
def test_units_hold_every_element_once(model: Model, servers: int, unit_bytes: int) -> None:
    flat = model.flat()
    layouts = lay_out(flat, servers, unit_bytes)
    assert len(layouts) == servers
    held = []
    for ranges, units in layouts:
        by_units = [r for unit in units for r in unit.of(ranges)]
        assert by_units == ranges, "units follow one another, and leave no range out"
        held += elements(ranges)
    wanted = [(p.buffer, i) for p in flat.pieces for i in range(p.start, p.stop)]
    assert sorted(held) == sorted(wanted)


@settings(max_examples=40)
@given(*LAID_OUT)
def test_units_keep_to_their_size_and_are_ready_with_the_last_bucket_that_they_touch(
    model: Model, servers: int, unit_bytes: int
) -> None:
    flat = model.flat()
    for ranges, units in lay_out(flat, servers, unit_bytes):
        assert [unit.bucket for unit in units] == sorted(unit.bucket for unit in units)
        for unit in units:
            mine = unit.of(ranges)
            numbers = [r.stop - r.start for r in mine]
            nbytes = sum(r.of(flat.params).nbytes for r in mine)
            assert nbytes <= unit_bytes or numbers == [1] or (len(mine) == 1 and mine[0].row)
            buckets = [n for r in mine for n, b in enumerate(flat.buckets) if _holds(b, r)]
            assert len(buckets) == len(mine), "a range lies in one bucket"
            assert buckets == sorted(buckets)
            assert not buckets or unit.bucket == buckets[-1]


def _holds(bucket: Bucket, r: Range) -> bool:
    return bucket.buffer == r.buffer and bucket.start <= r.start < r.stop <= bucket.stop


@settings(max_examples=40)
@given(*LAID_OUT)
def test_parts_of_a_cut_range_still_say_where_they_lie(model: Model, servers: int, unit_bytes: int) -> None:
    flat = model.flat()
    for ranges, _ in lay_out(flat, servers, unit_bytes):
        for r in ranges:
            covered = 0
            for part in r.parts:
                piece = flat.pieces[part.piece]
                assert (piece.buffer, piece.group, part.offset) == (r.buffer, r.group, covered)
                assert 0 <= part.start < part.stop <= piece.stop - piece.start
                assert piece.start + part.start == r.start + part.offset
                covered += part.stop - part.start
            assert covered == r.stop - r.start


@settings(max_examples=40)
@given(*LAID_OUT)
def test_no_server_holds_a_twentieth_more_than_the_mean(model: Model, servers: int, unit_bytes: int) -> None:
    """Of any model with a hundred elements for each; where embeddings are cut between rows, but for one row."""
    flat = model.flat()
    assume(sum(model.sizes) >= 100 * servers)
    held = [sum(r.of(flat.params).nbytes for r in ranges) for ranges, _ in lay_out(flat, servers, unit_bytes)]
    row_bytes = max((4 * width for _, width in model.tables), default=0)
    assert max(held) <= 1.05 * sum(held) / servers + row_bytes


@settings(max_examples=40)
@given(*LAID_OUT)
def test_embeddings_that_travel_by_rows_are_cut_between_rows(model: Model, servers: int, unit_bytes: int) -> None:
    flat = model.flat()
    for ranges, units in lay_out(flat, servers, unit_bytes):
        for unit in units:
            by_rows = [r for r in unit.of(ranges) if r.row]
            assert not by_rows or len(unit.of(ranges)) == 1
            for r in by_rows:
                (part,) = r.parts
                assert r.row == flat.pieces[part.piece].row == flat.pieces[part.piece].shape[1]
                assert part.start % r.row == part.stop % r.row == 0
    assert sum(piece.row > 0 for piece in flat.pieces) == len(model.tables)


@settings(max_examples=40)
@given(*LAID_OUT)
def test_both_sides_come_to_the_same_layout(model: Model, servers: int, unit_bytes: int) -> None:
    assert lay_out(model.flat(), servers, unit_bytes) == lay_out(model.flat(), servers, unit_bytes)


def test_a_server_without_elements_has_one_empty_unit() -> None:
    """So that every push has a last unit on every server."""
    flat = Model([2], [False], [0], 100, 100).flat()
    layouts = lay_out(flat, 4, 100)
    empty = [layout for layout in layouts if not layout.ranges]
    assert len(empty) == 2
    assert all([unit.of(ranges) for unit in units] == [[]] for ranges, units in empty)
