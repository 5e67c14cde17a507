"""Advice: who had better leave."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.balance.advice import drop_advice
from podium.balance.base import Member, finish_s
from podium.balance.equal_finish import EqualFinish
from podium.balance.speed import Speed


def team(*per_sample_ms: float, fixed_ms: float = 0.0) -> list[Member]:
    return [
        Member(rank, Speed(fixed_ms / 1e3, each / 1e3, passes=20, samples=16))
        for rank, each in enumerate(per_sample_ms)
    ]


def step_s(members: list[Member], count: int, exchange: list[float]) -> float:
    return finish_s(EqualFinish().divide(count, members), members) + exchange[len(members)]


def test_nobody_should_leave_where_all_help() -> None:
    assert drop_advice(team(1, 1, 1, 1), 64, lambda size: 0.001) is None
    assert drop_advice(team(1), 64, lambda size: 0.001) is None


def test_a_worker_that_costs_more_than_it_brings_should_leave() -> None:
    advice = drop_advice(team(1, 1, 1, 50), 66, lambda size: 0.002 if size < 4 else 0.020)
    assert advice is not None
    assert advice.without == (3,)
    assert advice.counts == [22, 22, 22]
    assert advice.before_s == pytest.approx(0.042)
    assert advice.after_s == pytest.approx(0.024)
    assert advice.gain == pytest.approx(42 / 24 - 1)
    assert advice.reason == (
        "without worker 3 a step takes 24 ms instead of 42 ms: it does 0 of 66 samples, and the exchange takes 20 ms "
        "with it and 2 ms without"
    )


def test_several_should_leave_where_one_alone_changes_nothing() -> None:
    # The exchange gets cheaper only when two are gone, as where two switches become one.
    advice = drop_advice(team(1, 30, 1, 30), 64, lambda size: 0.002 if size < 3 else 0.040)
    assert advice is not None
    assert advice.without == (1, 3)
    assert "workers 1, 3" in advice.reason
    assert "they do" in advice.reason


def test_a_gain_next_to_nothing_is_not_worth_a_word() -> None:
    exchange = {1: 0.0, 2: 0.001, 3: 0.0012}
    assert drop_advice(team(1, 1, 1000), 64, lambda size: exchange[size]) is None


def test_nobody_should_leave_whose_part_fits_nowhere_else() -> None:
    slow = team(1, 40)
    assert drop_advice(slow, 64, lambda size: 0.005 * (size - 1)) is not None
    full = [slow[0]._replace(most=63), slow[1]]
    assert drop_advice(full, 64, lambda size: 0.005 * (size - 1)) is None


@given(
    speeds=st.lists(st.floats(0.1, 20), min_size=1, max_size=5),
    extra=st.lists(st.floats(0, 0.05), min_size=5, max_size=5),
    count=st.integers(1, 60),
)
def test_what_is_promised_is_what_the_others_take(speeds: list[float], extra: list[float], count: int) -> None:
    members = team(*speeds)
    exchange = [0.0, *itertools.accumulate(extra)]
    advice = drop_advice(members, count, exchange.__getitem__)
    sets = [list(some) for size in range(1, len(members) + 1) for some in itertools.combinations(members, size)]
    best = min(step_s(some, count, exchange) for some in sets)
    if advice is None:
        assert step_s(members, count, exchange) <= best * 1.0201 + 1e-12
    else:
        stay = [member for member in members if member.rank not in advice.without]
        assert advice.after_s == pytest.approx(step_s(stay, count, exchange))
        assert advice.before_s == pytest.approx(step_s(members, count, exchange))
        assert advice.after_s == pytest.approx(best)  # with one at a time to go, nothing better is missed
        assert sum(advice.counts) == count


def test_hundreds_of_workers_are_looked_at_in_seconds() -> None:
    members = team(*[1.0] * 120, *[100.0] * 8)
    advice = drop_advice(members, 1024, lambda size: 0.0005 * size)
    assert advice is not None
    assert set(range(120, 128)) <= set(advice.without)
