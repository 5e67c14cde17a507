"""What has moved a unit: every sample is remembered, in memory that does not grow with the pushes."""

from __future__ import annotations

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.errors import CommError
from podium.servers.applied import Applied, joined, span_of_lease


def empty(position: int, share: int) -> tuple[int, int]:
    """A lease without samples, as the cursor names it."""
    return span_of_lease(-2 - (position << 16) - share, 0)


@settings(deadline=None)
@given(st.integers(0, 50), st.lists(st.integers(1, 6), max_size=40), st.integers(0, 2**32))
def test_it_knows_what_a_set_of_samples_knows(start: int, sizes: list[int], seed: int) -> None:
    chance, at, spans = random.Random(seed), start, []
    for size in sizes:
        spans.append((at, at + size))
        at += size
    chance.shuffle(spans)
    applied, samples = Applied(start), set(range(start))
    for span in spans:
        assert not applied.has(span)
        applied.add(span)
        samples |= set(range(*span))
        for other in spans:
            assert applied.has(other) == (other[0] in samples)
        holes = sum(1 for x in samples if x + 1 not in samples)
        assert len(applied) <= holes + 2, "at most one interval for each hole"
        assert Applied.of(json.loads(json.dumps(applied.plain()))) == applied
    assert applied.mark == at and len(applied) == 1


def test_samples_that_came_in_order_are_one_number() -> None:
    applied = Applied(100)
    for lease in range(100, 1_000_100, 10):
        applied.add((lease, lease + 10))
    assert applied.plain() == [[1_000_100, 1_000_100]]


def test_a_lease_cut_otherwise_is_recognised_by_its_samples() -> None:
    applied = Applied()
    applied.add((0, 96))
    applied.add((96, 288))
    applied.add((480, 576))
    assert applied.has((0, 48)) and applied.has((48, 144)) and applied.has((192, 288)) and applied.has((500, 510))
    assert not applied.has((288, 480))


@pytest.mark.parametrize("span", [(192, 384), (384, 500), (200, 600), (560, 600)])
def test_a_lease_of_which_only_a_part_is_applied_is_refused(span: tuple[int, int]) -> None:
    """It can be neither applied nor left out."""
    applied = Applied()
    applied.add((0, 288))
    applied.add((480, 576))
    with pytest.raises(CommError, match=f"all or none are applied, got {span[0]} to {span[1]}"):
        applied.has(span)


def test_leases_without_samples_are_remembered_until_all_before_them_is_applied() -> None:
    applied = Applied()
    applied.add((0, 10))
    for share in (2, 3):
        assert not applied.has(empty(20, share))
        applied.add(empty(20, share))
        assert applied.has(empty(20, share))
    assert not applied.has(empty(20, 1))
    assert Applied.of(applied.plain()) == applied
    for lease in range(10, 10_000, 10):
        applied.add((lease, lease + 10))
        applied.add(empty(lease + 10, 3))
        assert len(applied) <= 4
    assert applied.has(empty(20, 1)), "below the mark: it moves nothing"


def test_a_message_names_samples_in_as_few_intervals_as_there_are() -> None:
    assert joined([(4, 8), empty(12, 1), (0, 4), (12, 16), (8, 10)]) == [list(empty(12, 1)), [0, 10], [12, 16]]
