"""The cursor: every slice is lent until it is applied, and none is forgotten."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.order import GlobalOrder
from podium.servers.cursor import Cursor, Lease


def cursor(samples: int = 10, end: int = 20, count: int = 4, position: int = 0) -> Cursor:
    return Cursor(GlobalOrder(samples, seed=0), position, end, count)


def drain(source: Cursor, worker: int = 0) -> list[Lease]:
    leases = []
    while (lease := source.draw(worker)) is not None:
        leases.append(lease)
        source.applied(lease.number)
    return leases


def test_slices_follow_one_another_and_stop_at_the_end_of_an_epoch() -> None:
    leases = drain(cursor())
    assert [(x.piece.position, x.piece.count, x.piece.epoch) for x in leases] == [
        (0, 4, 0),
        (4, 4, 0),
        (8, 2, 0),
        (10, 4, 1),
        (14, 4, 1),
        (18, 2, 1),
    ]
    assert [lease.number for lease in leases] == [x.piece.position for x in leases]


def test_it_begins_and_ends_where_it_is_told() -> None:
    leases = drain(cursor(position=6, end=13))
    assert [(x.piece.position, x.piece.count) for x in leases] == [(6, 4), (10, 3)]


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(0, 70), st.integers(1, 9), st.integers(0, 2**32))
def test_every_sample_is_applied_once_whoever_draws_dies_or_dawdles(
    samples: int, end: int, count: int, seed: int
) -> None:
    source, chance = cursor(samples, end, count), random.Random(seed)
    applied: list[int] = []
    held: dict[int, Lease] = {}
    while not source.drained:
        worker = chance.randrange(4)
        if worker in held and chance.random() < 0.2:
            source.lost(worker)
            del held[worker]
        elif worker in held:
            lease = held.pop(worker)
            source.applied(lease.number)
            applied += range(lease.piece.position, lease.piece.position + lease.piece.count)
        elif (lease := source.draw(worker)) is not None:
            held[worker] = lease
        assert source.drained == (not held and len(applied) == end)
    assert sorted(applied) == list(range(end))


def test_it_is_drained_only_when_every_lease_is_applied() -> None:
    source = cursor(end=8)
    first, second = source.draw(0), source.draw(1)
    assert first is not None and second is not None
    assert source.draw(2) is None
    assert not source.drained, "a lease is still open: its worker may die"
    source.applied(first.number)
    assert not source.drained
    source.applied(second.number)
    assert source.drained


def test_what_a_lost_worker_had_is_lent_again_under_its_own_number() -> None:
    source = cursor(end=8)
    lost, kept = source.draw(7), source.draw(8)
    source.lost(7)
    assert not source.drained
    assert source.draw(8) == lost != kept
    assert source.draw(8) is None


def test_closing_lends_nothing_more_and_waits_for_what_is_out() -> None:
    source = cursor()
    lease = source.draw(0)
    assert lease is not None
    source.close()
    assert source.draw(1) is None
    assert not source.drained
    source.applied(lease.number)
    assert source.drained
    assert source.position == 4


def test_applying_twice_or_nothing_does_no_harm() -> None:
    source = cursor(end=4)
    lease = source.draw(0)
    assert lease is not None
    source.applied(-1)
    source.applied(lease.number)
    source.applied(lease.number)
    assert source.drained
