"""Balancers: what they divide adds up, fits, and ends as soon as it can."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.balance import BALANCERS, find_balancer, make_balancer
from podium.balance.base import Balancer, Learning, Member, finish_s
from podium.balance.equal import Equal
from podium.balance.equal_finish import EqualFinish
from podium.balance.proportional import Proportional
from podium.balance.speed import Speed
from podium.errors import ConfigError, UnknownName

BOTH = [EqualFinish(), Proportional()]

times = st.floats(0, 10) | st.sampled_from([0.0, 1.0])
members_ = st.builds(
    lambda fixed, per_sample, most, exchange, samples: Member(
        0, Speed(fixed, per_sample, passes=5, samples=samples), most, exchange
    ),
    times,
    st.floats(1e-6, 10) | st.just(1.0),
    st.none() | st.integers(0, 12),
    times,
    st.integers(0, 20),
)


def groups(most: int) -> st.SearchStrategy[list[Member]]:
    return st.lists(members_, min_size=1, max_size=most).map(
        lambda found: [member._replace(rank=rank) for rank, member in enumerate(found)]
    )


def room(members: list[Member], count: int) -> int:
    return sum(count if m.most is None else min(count, m.most) for m in members)


def like(ratio: float, fixed: float = 0.0, **more: object) -> Member:
    return Member(0, Speed(fixed, 1 / ratio, passes=9), **more)  # type: ignore[arg-type]  # most, exchange_s


@pytest.mark.parametrize("balancer", BOTH, ids=lambda balancer: balancer.name)
@given(count=st.integers(0, 300), members=groups(9))
def test_parts_add_up_and_fit(balancer: Balancer, count: int, members: list[Member]) -> None:
    counts = balancer.divide(count, members)
    assert sum(counts) == count
    assert min(counts) >= 0
    if room(members, count) >= count:
        assert all(m.most is None or have <= m.most for m, have in zip(members, counts, strict=True))


@given(count=st.integers(1, 9), members=groups(4))
def test_no_division_ends_sooner_than_equal_finish(count: int, members: list[Member]) -> None:
    if room(members, count) < count:
        return
    ranges = [range((count if m.most is None else min(count, m.most)) + 1) for m in members]
    best = min(finish_s(counts, members) for counts in itertools.product(*ranges) if sum(counts) == count)
    assert finish_s(EqualFinish().divide(count, members), members) == pytest.approx(best, rel=1e-9)


@given(count=st.integers(0, 200), members=groups(8))
def test_one_sample_more_takes_nothing_from_anybody(count: int, members: list[Member]) -> None:
    if room(members, count + 1) < count + 1:
        return
    few, many = EqualFinish().divide(count, members), EqualFinish().divide(count + 1, members)
    assert all(a <= b for a, b in zip(few, many, strict=True))


@given(count=st.integers(1, 200), members=groups(8), slower=st.floats(1.0, 10.0))
def test_whoever_gets_slower_gets_no_more(count: int, members: list[Member], slower: float) -> None:
    if room(members, count) < count:
        return
    speed = members[0].speed
    changed = [members[0]._replace(speed=speed._replace(per_sample_s=speed.per_sample_s * slower)), *members[1:]]
    assert EqualFinish().divide(count, changed)[0] <= EqualFinish().divide(count, members)[0]


@given(count=st.integers(0, 500), size=st.integers(1, 9))
def test_those_who_are_alike_get_equal_parts(count: int, size: int) -> None:
    members = [like(3.0, 0.2)] * size
    for balancer in BOTH:
        assert balancer.divide(count, members) == Equal().divide(count, members)


def test_four_to_one_is_divided_four_to_one() -> None:
    for balancer in BOTH:
        assert balancer.divide(250, [like(4), like(1)]) == [200, 50]
        assert balancer.divide(240, [like(4), like(2), like(1), like(1)]) == [120, 60, 30, 30]


def test_whoever_would_be_late_with_its_first_sample_gets_none() -> None:
    assert EqualFinish().divide(100, [like(1), like(1, fixed=200.0)]) == [100, 0]
    assert EqualFinish().divide(100, [like(1), like(1, exchange_s=200.0)]) == [100, 0]
    assert EqualFinish().divide(300, [like(1), like(1, fixed=200.0)]) == [250, 50]


def test_a_slow_link_costs_samples() -> None:
    assert EqualFinish().divide(100, [like(1), like(1, exchange_s=20.0)]) == [60, 40]


@pytest.mark.parametrize("balancer", BOTH, ids=lambda balancer: balancer.name)
def test_what_does_not_fit_goes_to_the_others(balancer: Balancer) -> None:
    assert balancer.divide(90, [like(4, most=20), like(1), like(1)]) == [20, 35, 35]


@pytest.mark.parametrize("balancer", BOTH, ids=lambda balancer: balancer.name)
def test_where_not_all_fit_all_overflow_alike(balancer: Balancer) -> None:
    assert balancer.divide(90, [like(4, most=20), like(1, most=10)]) == [60, 30]
    assert balancer.divide(90, [like(4, most=0), like(1, most=0)]) == [45, 45]


def test_proportional_goes_by_what_was_last_seen() -> None:
    """The first has a fixed cost that weighs less as its part grows: each division is nearer to the same finish."""
    first, second, counts = Speed(60.0, 1.0), Speed(0.0, 2.0), [60, 60]
    apart = []
    for _ in range(12):
        seen = [s._replace(samples=have, passes=5) for s, have in zip((first, second), counts, strict=True)]
        members = [Member(i, speed) for i, speed in enumerate(seen)]
        apart.append(abs(members[0].finish_s(counts[0]) - members[1].finish_s(counts[1])))
        counts = Proportional().divide(120, members)
    assert counts == EqualFinish().divide(120, members) == [60, 60]

    first, counts, apart = Speed(20.0, 1.0), [60, 60], []
    for _ in range(12):
        seen = [s._replace(samples=have, passes=5) for s, have in zip((first, second), counts, strict=True)]
        members = [Member(i, speed) for i, speed in enumerate(seen)]
        apart.append(abs(members[0].finish_s(counts[0]) - members[1].finish_s(counts[1])))
        counts = Proportional().divide(120, members)
    assert apart[0] == 40
    assert apart[-1] <= 3
    assert apart == sorted(apart, reverse=True)


def test_hundreds_of_workers_take_milliseconds() -> None:
    members = [like(1 + i % 7, 0.01 * (i % 5), most=4000 if i % 3 else None) for i in range(256)]
    began = time.perf_counter()
    for _ in range(5):
        counts = EqualFinish().divide(100_000, members)
    assert (time.perf_counter() - began) / 5 < 0.1  # 1 ms on an idle machine
    assert sum(counts) == 100_000


@pytest.mark.parametrize("name", ["equal-finish", "proportional"])
def test_limits_by_rank_are_read(name: str) -> None:
    balancer = make_balancer(f"{name}:most=64/0/16")
    assert isinstance(balancer, Learning)
    assert [balancer.limit(rank) for rank in range(5)] == [64, None, 16, 16, 16]
    assert make_balancer(name).limit(3) is None  # type: ignore[attr-defined]  # it learns
    assert make_balancer(f"{name}:most=32").limit(7) == 32  # type: ignore[attr-defined]  # it learns


@pytest.mark.parametrize("most", ["64,16", "a", "-1", "64//16", "1.5", "²"])
def test_limits_that_are_no_numbers_are_refused(most: str) -> None:
    with pytest.raises(ConfigError, match="most must be whole numbers"):
        EqualFinish(most=most)


def test_every_name_leads_to_a_balancer_and_others_are_refused() -> None:
    for name in BALANCERS:
        assert find_balancer(name).name == name
    with pytest.raises(UnknownName, match="equal-finish"):
        make_balancer("equal-finsh")
