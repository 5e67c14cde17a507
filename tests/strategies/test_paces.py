"""Local steps by speed: all are through with a round together, also when somebody becomes slower, and not for noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from podium.balance.speed import Speed
from podium.launch.clusters.description import Change, Cluster, Node
from podium.records.recorder import Record
from podium.strategies.base import Strategy
from podium.strategies.diloco import DiLoCo
from podium.strategies.local_sgd import LocalSGD
from podium.strategies.pace import Pace, steps_by_speed
from podium.testing.toys import Trained, toy, train_in
from podium.testing.worlds import Virtual

BATCH = 16
PER_SAMPLE_S = 1e-2


def cluster_of(speeds: Sequence[float], changes: Sequence[Change] = (), jitter: float = 0.0) -> Cluster:
    nodes = tuple(Node(name=f"n{i}", speed=speed, up_mbit=1000, down_mbit=1000) for i, speed in enumerate(speeds))
    return Cluster(
        nodes=nodes, seconds_per_sample=PER_SAMPLE_S, seconds_per_step=0.0, jitter=jitter, changes=tuple(changes)
    )


def run(cluster: Cluster, strategy: Strategy[Any], epochs: int = 2) -> list[Trained]:
    task = toy(samples=BATCH * 64, batch_size=BATCH, epochs=epochs, optimizer="sgd")
    return train_in(Virtual(cluster), task, strategy, len(cluster.nodes))


def rounds_of(trained: Sequence[Trained]) -> list[tuple[int, int, float]]:
    """Where each round ended, how many samples it had, and how long it took."""
    ends: dict[int, float] = {}
    for worker in trained:
        first: dict[int, float] = {}  # those that follow are at the same place, until their round is over
        for row in worker.records:
            if row["kind"] == "step":
                first.setdefault(row["position"], row["t_ns"] / 1e9)
        for position, end in first.items():
            ends[position] = max(ends.get(position, 0.0), end)
    found, before, since = [], 0, 0.0
    for position, end in sorted(ends.items()):
        if position:
            found.append((position, position - before, end - since))
            before, since = position, end
    return found


def share_of_ideal(rounds: Sequence[tuple[int, int, float]], speeds: Sequence[float]) -> float:
    """Samples per second, of what all speeds add up to."""
    samples, seconds = sum(n for _, n, _ in rounds), sum(s for *_, s in rounds)
    return samples / seconds / (sum(speeds) / PER_SAMPLE_S)


def changes_in(trained: Sequence[Trained]) -> list[Record]:
    return [row for worker in trained for row in worker.records if row["kind"] == "balance"]


@pytest.mark.parametrize("strategy", [LocalSGD(period=8, steps="speed"), DiLoCo(sync_every=8, steps="speed")])
def test_workers_of_unequal_speed_come_to_nine_tenths_of_the_ideal(strategy: Strategy[Any]) -> None:
    trained = run(cluster_of((4, 2, 1, 1)), strategy)
    whole = [each for each in rounds_of(trained) if each[1] == BATCH // 4 * (8 + 4 + 2 + 2)]
    assert len(whole) >= 20
    assert share_of_ideal(whole, (4, 2, 1, 1)) > 0.95
    equal = rounds_of(run(cluster_of((4, 2, 1, 1)), LocalSGD(period=8)))
    assert share_of_ideal(equal, (4, 2, 1, 1)) < 0.55


def test_a_change_is_put_on_record_once() -> None:
    (change,) = changes_in(run(cluster_of((4, 2, 1, 1)), LocalSGD(period=8, steps="speed")))
    assert change["rank"] == 0 and change["ranks"] == [0, 1, 2, 3] and change["unit"] == "steps"
    assert change["before"] == [1, 1, 1, 1] and change["after"] == [8, 4, 2, 2]
    part = BATCH / 4 * PER_SAMPLE_S
    assert change["predicted_s"]["before"] == pytest.approx(part, rel=0.05)
    assert change["predicted_s"]["after"] == pytest.approx(4 * part * 2 / 16, rel=0.05)
    assert [member["per_sample_s"] for member in change["members"]] == pytest.approx(
        [PER_SAMPLE_S / speed for speed in (4, 2, 1, 1)], rel=0.05
    )


def test_one_that_becomes_four_times_slower_gets_fewer_steps_and_gets_them_back() -> None:
    """Within three rounds, which have 24 global steps at most."""
    slow, fast = Change(node=1, at_s=2.0, speed=0.5), Change(node=1, at_s=5.0, speed=2.0)
    cluster = cluster_of((2, 2, 1, 1), (slow, fast))
    trained = run(cluster, LocalSGD(period=8, steps="speed"), epochs=4)
    times, at = [], 0.0
    rounds = rounds_of(trained)
    for *_, seconds in rounds:
        at += seconds
        times.append(at)
    assert times[-1] > 7.0
    for begin, end, speeds in ((0.0, 2.0, (2, 2, 1, 1)), (2.0, 5.0, (2, 0.5, 1, 1)), (5.0, 8.0, (2, 2, 1, 1))):
        inside = [each for each, until in zip(rounds, times, strict=True) if begin < until - each[2] and until < end]
        assert len(inside) > 8
        assert share_of_ideal(inside[3:], speeds) > 0.9, (begin, speeds)
    assert [row["after"] for row in changes_in(trained)] == [[8, 8, 4, 4], [8, 2, 4, 4], [8, 8, 4, 4]]


def test_noise_of_a_fifth_is_no_reason_to_change() -> None:
    trained = run(cluster_of((4, 2, 1, 1), jitter=0.2), LocalSGD(period=8, steps="speed"), epochs=4)
    assert len(rounds_of(trained)) > 50
    assert len(changes_in(trained)) <= 5
    late = [each for each in rounds_of(trained) if each[1] > BATCH][10:]
    assert share_of_ideal(late, (4, 2, 1, 1)) > 0.75  # the slowest of four noisy workers is waited for


# The rule by itself.


def known(rate: float, error: float = 0.01) -> Speed:
    return Speed(0.0, 1 / rate, 0.02, error, 8, 4)


def test_more_time_must_be_saved_than_may_be_noise() -> None:
    for error, changes in ((0.01, True), (0.2, False)):
        pace = Pace("speed", 8, length=8, speeds=[100.0, 100.0])
        found = pace.decide([known(100.0, error), known(75.0, error)])
        assert (found is not None) is changes
        assert pace.speeds == pytest.approx([100.0, 75.0] if changes else [100.0, 100.0])


def test_steps_that_stay_the_same_are_no_change() -> None:
    pace = Pace("speed", 8, length=8, speeds=[100.0, 50.0])
    assert pace.decide([known(100.0), known(49.0)]) is None
    assert pace.speeds == pytest.approx([100.0, 49.0])


def test_what_is_known_first_is_taken_up_and_one_that_tells_nothing_keeps_its_pace() -> None:
    pace = Pace("speed", 8, length=8)
    unknown = Speed(0.0, 0.0)
    assert pace.decide([unknown, unknown]) is None
    assert pace.decide([known(100.0, 0.5), unknown]) == ([1, 1], [8, 8], 0.0)
    found = pace.decide([known(100.0), known(25.0)])
    assert found is not None and found[:2] == ([8, 8], [8, 2])
    assert pace.decide([known(100.0), unknown]) is None
    assert pace.speeds == pytest.approx([100.0, 25.0])


def test_whoever_joins_or_leaves_all_begin_anew() -> None:
    pace = Pace("speed", 8, length=8, speeds=[100.0, 50.0])
    found = pace.decide([known(100.0), known(50.0), known(25.0)])
    assert found is not None and found[:2] == ([1, 1, 1], [8, 4, 2])


def test_steps_follow_speeds_down_to_one() -> None:
    assert steps_by_speed([1.0, 0.5, 0.01, 0.0], 8) == [8, 4, 1, 8]
