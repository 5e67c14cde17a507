"""The cursor: every slice is lent until it is applied, and none is forgotten."""

from __future__ import annotations

import json
import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from podium.data.order import GlobalOrder, share_of
from podium.servers.leases.cursor import Cursor
from podium.servers.leases.lease import Lease, number_of


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
    assert [(x.slice.position, x.slice.count, x.slice.epoch) for x in leases] == [
        (0, 4, 0),
        (4, 4, 0),
        (8, 2, 0),
        (10, 4, 1),
        (14, 4, 1),
        (18, 2, 1),
    ]
    assert [lease.number for lease in leases] == [x.slice.position for x in leases]


def test_it_begins_and_ends_where_it_is_told() -> None:
    leases = drain(cursor(position=6, end=13))
    assert [(x.slice.position, x.slice.count) for x in leases] == [(6, 2), (8, 2), (10, 3)]


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
            applied += range(lease.slice.position, lease.slice.position + lease.slice.count)
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


# Shares.


def cut(samples: int, end: int, batch: int, parts: int, empty: bool) -> Cursor:
    return Cursor(GlobalOrder(samples, seed=0), 0, end, batch, parts, empty)


SHAPES = (st.integers(1, 30), st.integers(0, 60), st.integers(1, 12), st.integers(1, 6), st.booleans())
"""Samples of an epoch, the end, the global batch, parts of it, and whether empty ones are lent."""


@given(*SHAPES)
def test_the_slices_of_a_step_are_the_shares_that_workers_would_have(
    samples: int, end: int, batch: int, parts: int, empty: bool
) -> None:
    source, order, position = cut(samples, end, batch, parts, empty), GlobalOrder(samples, seed=0), 0
    while position < end:
        step = order.slice_at(position, min(batch, end - position))
        shares = [share_of(step, [1.0] * parts, i) for i in range(parts)]
        for i, share in enumerate(shares):
            if share.count or empty:
                assert source.draw(0) == Lease(number_of(share, i), share, step.count, share=i)
        position += step.count
    assert source.draw(0) is None
    assert source.position == position


@given(*SHAPES)
def test_every_slice_has_a_name_of_its_own(samples: int, end: int, batch: int, parts: int, empty: bool) -> None:
    leases = drain(cut(samples, end, batch, parts, empty))
    names = [lease.number for lease in leases]
    assert len(set(names)) == len(names)
    assert -1 not in names, "that says 'none'"
    assert [n for n in names if n >= 0] == [x.slice.position for x in leases if x.slice.count]


@given(*SHAPES, st.integers(0, 2**32))
def test_closing_keeps_what_came_back_and_drops_what_was_never_lent(
    samples: int, end: int, batch: int, parts: int, empty: bool, seed: int
) -> None:
    source, chance = cut(samples, end, batch, parts, empty), random.Random(seed)
    lent = [lease for lease in (source.draw(chance.randrange(3)) for _ in range(chance.randrange(12))) if lease]
    done = {lease.number for lease in lent if chance.random() < 0.4}
    for number in done:
        source.applied(number)
    source.lost(0)
    source.close()
    source.lost(1)
    again = [lease.number for lease in drain(source, worker=2)]
    source.lost(2)
    again += [lease.number for lease in drain(source, worker=3)]
    assert sorted([*again, *done]) == sorted(lease.number for lease in lent)
    assert source.drained
    assert source.position == sum(lease.slice.count for lease in lent)


# A restart from a copy that is out of date.


class Restarted:
    """Workers that lease, push and die by chance, while their cursor is lost and comes back as it once was."""

    def __init__(self, source: Cursor, chance: random.Random, workers: int = 4) -> None:
        self.source, self.chance = source, chance
        self.alive, self.danger = set(range(workers)), chance.choice([0.02, 0.2])
        self.held: dict[int, Lease] = {}
        self.pushing: set[int] = set()
        self.finished: dict[int, int] = {}  # what a worker has done and not yet told
        self.done: set[int] = set()
        self.restarted = False

    def happen(self) -> None:
        worker = self.chance.choice(sorted(self.alive))
        if self.chance.random() < self.danger and len(self.alive) > 1:
            self.alive.discard(worker)
            self.pushing.discard(worker)
            self.held.pop(worker, None)
            self.source.lost(worker)
        elif worker not in self.held:
            self.hear(worker, ())
            self.draw(worker)
        elif worker not in self.pushing:
            self.hear(worker, (self.held[worker].number,))  # the first unit of its push
            self.pushing.add(worker)
        else:
            self.finish(worker)

    def hear(self, worker: int, holds: tuple[int, ...]) -> None:
        if self.restarted:
            self.source.heard_of(worker, holds)

    def draw(self, worker: int) -> None:
        self.source.applied(self.finished.pop(worker, -1))
        lease = self.source.draw(worker)
        if lease is not None:
            self.held[worker] = lease

    def finish(self, worker: int) -> None:
        """All servers have applied it; its last unit tells what the worker did before, and brings a new lease."""
        self.pushing.discard(worker)
        lease = self.held.pop(worker)
        self.hear(worker, (lease.number,))
        self.done.add(lease.number)
        if self.chance.random() < 0.5:
            self.draw(worker)
        self.source.applied(self.finished.pop(worker, -1))
        self.finished[worker] = lease.number

    def come_back(self, source: Cursor, state: dict[str, Any]) -> None:
        self.source, self.restarted = source, True
        source.load(json.loads(json.dumps(state)))
        for worker in sorted(set(self.held) - self.pushing):
            if self.chance.random() < 0.3:
                del self.held[worker]  # it was lent, and the answer was lost
        self.pushing.clear()  # what was under way is sent again
        for worker in set(range(4)) - self.alive:
            source.lost(worker)


@given(*SHAPES, st.integers(0, 40), st.integers(0, 30), st.integers(0, 2**32))
def test_after_a_restart_every_slice_is_lent_until_it_is_done(
    samples: int, end: int, batch: int, parts: int, empty: bool, before: int, lag: int, seed: int
) -> None:
    everything = {lease.number for lease in drain(cut(samples, end, batch, parts, empty))}
    for again in range(10):  # what is interesting is rare
        crowd = Restarted(cut(samples, end, batch, parts, empty), random.Random(seed + again))
        for _ in range(before):
            crowd.happen()
        copy = crowd.source.state()
        for _ in range(lag):
            crowd.happen()
        crowd.come_back(cut(samples, end, batch, parts, empty), copy)
        for _ in range(3000):
            if crowd.source.drained:
                break
            crowd.happen()
        assert crowd.source.drained, "draws that find nothing have to come to an end"
        assert crowd.done == everything


@given(*SHAPES, st.integers(0, 40), st.integers(0, 2**32))
def test_a_cursor_is_saved_and_loaded_as_it_is(
    samples: int, end: int, batch: int, parts: int, empty: bool, events: int, seed: int
) -> None:
    crowd = Restarted(cut(samples, end, batch, parts, empty), random.Random(seed))
    for _ in range(events):
        crowd.happen()
    again = cut(samples, end, batch, parts, empty)
    again.load(json.loads(json.dumps(crowd.source.state())))
    assert again.state() == crowd.source.state()
    assert again.open == crowd.source.open
    assert (again.exhausted, again.drained) == (crowd.source.exhausted, crowd.source.drained)
    assert drain(again) == drain(crowd.source)


def test_a_slice_that_the_copy_does_not_know_is_lent_again_if_its_worker_dies() -> None:
    """Heard of in the middle of its push, it is not done yet."""
    source = cursor(end=8)
    source.load(source.state())
    source.heard_of(0, (4,))
    first = source.draw(1)
    source.lost(0)
    assert [first.slice.position if first else None] + [x.number for x in drain(source, 1)] == [0, 4]


def test_a_slice_that_the_copy_does_not_know_is_waited_for() -> None:
    source = cursor(end=8)
    source.load(source.state())
    source.heard_of(0, (4,))
    assert [lease.number for lease in drain(source, 1)] == [0]
    assert not source.drained, "worker 0 has not said that it is done"
    source.applied(4)
    assert source.drained


def test_a_slice_that_came_back_in_the_copy_belongs_to_the_worker_that_has_it() -> None:
    source, lost = cursor(end=4), 0
    source.draw(lost)
    source.lost(lost)
    copy = source.state()
    restored = cursor(end=4)
    restored.load(copy)
    restored.heard_of(1, (0,))
    assert restored.draw(2) is None
    restored.lost(1)
    assert [lease.number for lease in drain(restored, 2)] == [0]


def test_closing_after_a_restart_goes_as_far_as_anything_was_lent() -> None:
    """Were it to end before, the next segment would begin there and use those samples a second time."""
    source = cursor(end=20)
    source.load(source.state())
    source.heard_of(0, (8,))
    source.close()
    assert source.position == 10, "slices 0, 4 and 8 were lent, the last with the two samples that the epoch had left"
    assert [lease.number for lease in drain(source, 1)] == [0, 4]
    assert not source.drained
    source.applied(8)
    assert source.drained


def test_a_worker_that_is_heard_of_again_after_it_is_through_changes_nothing() -> None:
    source = cursor(end=8)
    source.load(source.state())
    source.heard_of(0, (4,))
    source.applied(4)
    source.heard_of(0, (4,))
    assert [lease.number for lease in drain(source, 1)] == [0]
    assert source.drained
