"""The gate: no interleaving of pushes, rests and losses opens it too far, or keeps anybody before it for ever."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from podium.errors import ConfigError
from podium.servers.gate import Clocks, Gathering, Push, Rules

# Clocks.


class Race:
    """Workers that push, wait at the gate, rest and die, by chance; each does only what the gate allows."""

    def __init__(self, rules: Rules, workers: int, chance: random.Random) -> None:
        self.clocks, self.chance = Clocks(rules, set(range(workers))), chance
        self.computing, self.held = set(range(workers)), set[int]()
        self.began = dict.fromkeys(range(workers), 0)  # the lead with which a worker began its present clock
        self.rested: set[int] = set()
        self.now = 0

    def happen(self) -> None:
        self.now += self.chance.randrange(1, 50)
        worker = self.chance.choice(sorted(self.computing | self.held | self.clocks.resting))
        what = self.chance.random()
        if what < 0.03 and len(self.clocks.workers) > 1:
            self.clocks.workers.discard(worker)
            for kept in (self.computing, self.held, self.clocks.resting):
                kept.discard(worker)
        elif worker in self.clocks.resting - self.computing:
            self.computing.add(worker)  # a lease came back, and is lent to it
        elif worker in self.computing and what < 0.1 and len(self.computing) > 1:
            self.computing.discard(worker)
            self.rested.add(worker)
            self.clocks.resting.add(worker)
        elif worker in self.computing:
            self.clocks.tick(worker, self.now)
            self.computing.discard(worker)
            self.held.add(worker)
        for waiting in sorted(self.held):
            if self.clocks.may_go(waiting):
                self.held.discard(waiting)
                self.computing.add(waiting)
                self.began[waiting] = self.clocks.lead(waiting)

    def gap(self) -> int:
        """Between the clocks of any worker that computes and any that works, those left out that have rested."""
        pushes = {w: self.clocks.pushes.get(w, 0) for w in self.clocks.workers - self.rested}
        ahead = [pushes[w] for w in self.computing if w in pushes]
        return max(ahead, default=0) - min(pushes.values(), default=0)


@given(st.integers(1, 5), st.integers(0, 4), st.integers(0, 2**32))
def test_the_clock_gap_never_exceeds_the_bound(workers: int, bound: int, seed: int) -> None:
    race = Race(Rules(bound=bound), workers, random.Random(seed))
    for _ in range(120):
        race.happen()
        assert race.gap() <= bound
        assert all(lead <= bound for lead in race.began.values())


@given(st.integers(2, 5), st.integers(0, 3), st.integers(0, 4), st.integers(0, 2**32))
def test_a_dynamic_bound_stays_between_its_two(workers: int, low: int, more: int, seed: int) -> None:
    race = Race(Rules(bound=low, bound_high=low + more), workers, random.Random(seed))
    for _ in range(120):
        race.happen()
        assert race.gap() <= low + more
        assert all(low <= allowed <= low + more for allowed in race.clocks.allowed.values())
        for worker in race.held:
            assert race.clocks.lead(worker) > low, "nobody is kept who is within the lower bound"


@given(st.integers(1, 5), st.integers(0, 4), st.booleans(), st.integers(0, 2**32))
def test_somebody_may_always_go(workers: int, bound: int, dynamic: bool, seed: int) -> None:
    race = Race(Rules(bound=bound, bound_high=bound + 2 if dynamic else None), workers, random.Random(seed))
    for _ in range(120):
        race.happen()
        assert race.computing or not race.held


def test_with_a_bound_a_worker_runs_exactly_so_far_ahead() -> None:
    clocks = Clocks(Rules(bound=2), {0, 1})
    clocks.tick(1, 0)
    went = 0
    while clocks.may_go(0):
        clocks.tick(0, went)
        went += 1
    assert went == 4, "level with the other, and three clocks beyond it, begun with leads of 0, 1 and 2"
    clocks.tick(1, 9)
    assert clocks.may_go(0)


def test_without_a_bound_all_may_go_and_so_may_one_that_is_not_known() -> None:
    free, bounded = Clocks(Rules(), {0, 1}), Clocks(Rules(bound=0), {0, 1})
    for n in range(20):
        free.tick(0, n)
        bounded.tick(7, n)
    assert free.may_go(0)
    assert bounded.may_go(7)


@pytest.mark.parametrize("how", ["rests", "is lost", "catches up"])
def test_a_worker_is_let_go_when_the_slowest(how: str) -> None:
    clocks = Clocks(Rules(bound=0), {0, 1, 2})
    clocks.tick(0, 1)
    clocks.tick(1, 1)
    assert not clocks.may_go(0)
    if how == "rests":
        clocks.resting.add(2)
    elif how == "is lost":
        clocks.workers.discard(2)
    else:
        clocks.tick(2, 2)
    assert clocks.may_go(0)


def test_a_worker_that_pushes_rests_no_longer() -> None:
    clocks = Clocks(Rules(bound=0), {0, 1})
    clocks.resting.add(1)
    clocks.tick(1, 1)
    clocks.tick(0, 1)
    clocks.tick(0, 2)
    assert not clocks.may_go(0)


def waits(now: int, mine: int, then: int, theirs: int, clocks: range) -> list[int]:
    """How long a worker would wait for the slowest's next push after each number of further clocks."""
    arrivals = [then + theirs * n for n in range(1, 2000)]
    return [next(at - here for at in arrivals if at >= here) for here in (now + mine * n for n in clocks)]


@given(st.integers(1, 30), st.integers(1, 90), st.integers(0, 3), st.integers(0, 5), st.data())
def test_a_dynamic_bound_lets_go_on_only_where_that_shortens_the_wait(
    mine: int, theirs: int, low: int, more: int, data: st.DataObject
) -> None:
    clocks, high = Clocks(Rules(bound=low, bound_high=low + more), {0, 1}), low + more
    clocks.tick(1, 0)
    clocks.tick(1, theirs)
    lead = data.draw(st.integers(low + 1, high + 1))
    last = theirs + data.draw(st.integers(0, 200))
    for n in reversed(range(lead + 2)):
        clocks.tick(0, last - n * mine)
    assert clocks.lead(0) == lead
    further = range(high - lead + 2)
    wait = waits(last, mine, theirs, theirs, further)
    best = wait.index(min(wait))
    assert clocks.may_go(0) == (best > 0), f"after {list(further)} clocks it would wait for {wait}"
    assert clocks.allowed[0] == lead + best - 1


def test_a_dynamic_bound_waits_for_one_that_is_about_to_push() -> None:
    clocks = Clocks(Rules(bound=1, bound_high=8), {0, 1})
    clocks.tick(1, 0)
    clocks.tick(1, 100)
    for at in (169, 179, 189, 199):
        clocks.tick(0, at)
    assert not clocks.may_go(0), "the other comes in 1, and after one more clock would come in 91"
    clocks.tick(1, 200)
    assert clocks.may_go(0)


# Gathering.

IN_STEP = Rules(bound=0, all_workers=True, wait=True)


@st.composite
def rules_that_gather(draw: st.DrawFn) -> Rules:
    """Those of the modes of the parameter server that gather."""
    freshest = draw(st.one_of(st.none(), st.integers(0, 2)))
    pushes, samples = draw(st.integers(1, 5)), draw(st.integers(1, 40))
    return draw(
        st.sampled_from(
            [
                IN_STEP,
                Rules(pushes=pushes, freshest=freshest),
                Rules(pushes=pushes, wait=True, freshest=0),
                Rules(samples=samples, freshest=freshest),
                Rules(wait=True, freshest=freshest),
            ]
        )
    )


class Crowd:
    """Workers that push, rest and die, by chance; under `wait` one that has pushed does nothing before its answer."""

    def __init__(self, rules: Rules, workers: int, chance: random.Random) -> None:
        self.gathering, self.chance = Gathering(rules, range(workers)), chance
        self.working, self.blocked = set(range(workers)), set[int]()
        self.leases = 0
        self.pushed, self.ended = Counter[int](), Counter[int]()
        self.updates: list[list[Push]] = []

    def happen(self) -> None:
        free = sorted(self.working - self.blocked)
        assert free, "all who work wait for an update that never comes"
        what = self.chance.random()
        if what < 0.04 and len(self.working) > 1:
            worker = self.chance.choice(sorted(self.working))
            self.working.discard(worker)
            self.blocked.discard(worker)
            self.gathering.forget(worker)
            self.take()
        elif what < 0.08 and len(self.working) > 1:
            self.rest(self.chance.choice(free))
        else:
            self.push(self.chance.choice(free))

    def push(self, worker: int) -> None:
        self.leases += 1
        self.pushed[self.leases] += 1
        push = Push(worker, self.leases, samples=self.chance.randrange(0, 9), staleness=self.chance.randrange(4))
        if not self.gathering.add(push):
            freshest = self.gathering.rules.freshest
            assert freshest is not None and push.staleness > freshest
            self.ended[push.lease] += 1
            return
        if self.gathering.rules.wait:
            self.blocked.add(worker)
        self.take()

    def rest(self, worker: int) -> None:
        self.working.discard(worker)
        self.gathering.resting.add(worker)
        self.take()

    def take(self, last: bool = False) -> None:
        taken = self.gathering.take(last)
        if taken:
            self.updates.append(taken)
        self.ended.update(push.lease for push in taken)
        self.blocked -= {push.source for push in taken}


@given(rules_that_gather(), st.integers(1, 5), st.integers(0, 2**32))
def test_every_push_ends_in_one_update_or_is_dropped(rules: Rules, workers: int, seed: int) -> None:
    crowd = Crowd(rules, workers, random.Random(seed))
    for _ in range(60):
        crowd.happen()
    while crowd.working:
        crowd.rest(min(crowd.working - crowd.blocked))
    if not rules.wait:  # nobody waits, so nobody is kept; the server says when nothing more can come
        crowd.take(last=True)
    assert crowd.ended == crowd.pushed
    assert crowd.gathering.waiting == []


@given(st.integers(1, 5), st.integers(0, 2**32))
def test_in_step_an_update_holds_one_push_of_each_who_works(workers: int, seed: int) -> None:
    crowd = Crowd(IN_STEP, workers, random.Random(seed))
    for _ in range(60):
        before, working = len(crowd.updates), set(crowd.working)
        crowd.happen()
        for update in crowd.updates[before:]:
            sources = [push.source for push in update]
            assert len(sources) == len(set(sources))
            assert set(sources) >= working & crowd.working


@given(rules_that_gather(), st.integers(1, 5), st.integers(0, 2**32))
def test_an_update_is_no_larger_than_it_has_to_be(rules: Rules, workers: int, seed: int) -> None:
    crowd = Crowd(rules, workers, random.Random(seed))
    for _ in range(60):
        crowd.happen()
    for update in crowd.updates:
        if rules.samples is not None:
            samples = [push.samples for push in sorted(update, key=lambda push: push.lease)]
            assert sum(samples) >= rules.samples > sum(samples[:-1])
        elif not rules.all_workers:
            assert len(update) <= rules.pushes
            assert rules.wait or len(update) == rules.pushes


def test_an_update_is_in_the_order_of_the_slices_whoever_comes_first() -> None:
    gathering = Gathering(IN_STEP, range(3))
    for push in (Push(2, 0), Push(0, 8), Push(1, 4)):
        gathering.add(push)
    assert [push.lease for push in gathering.take()] == [0, 4, 8]


def test_what_a_lost_worker_has_pushed_counts() -> None:
    gathering = Gathering(Rules(pushes=2, wait=True, freshest=0), range(3))
    gathering.add(Push(0, 0))
    gathering.forget(0)
    assert gathering.take() == []
    gathering.add(Push(1, 4))
    assert [push.source for push in gathering.take()] == [0, 1]


def test_backups_are_not_waited_for_and_come_too_late() -> None:
    gathering = Gathering(Rules(pushes=2, wait=True, freshest=0), range(3))
    assert gathering.add(Push(0, 0)) and gathering.add(Push(2, 4))
    assert len(gathering.take()) == 2
    assert not gathering.add(Push(1, 8, staleness=1))
    assert gathering.take(last=True) == []


# Rules.


@settings(max_examples=20)
@given(rules_that_gather())
def test_rules_travel_as_plain_values(rules: Rules) -> None:
    assert Rules.from_dict(rules.to_dict()) == rules
    assert not rules.immediate or rules == Rules(wait=rules.wait)


@pytest.mark.parametrize("fields", [{"tempo": 3}, None, [1]])
def test_rules_that_do_not_fit_are_refused(fields: object) -> None:
    with pytest.raises(ConfigError, match="rules that came with the seed"):
        Rules.from_dict(fields)
