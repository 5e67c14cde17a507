"""When steps are divided otherwise: soon where speeds change, seldom where they only seem to."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch

import podium
from podium.balance.base import Learning, Member
from podium.balance.equal_finish import EqualFinish
from podium.balance.memory import Memory, fitting
from podium.balance.proportional import Proportional
from podium.balance.runtime import CURIOSITY, DOUBT, decide, members_of
from podium.balance.speed import UNKNOWN_NOISE, Speed
from podium.records.recorder import read_records
from tests.balance.simulator import Simulation, lognormal

MIXES = {"2:1": [2, 1], "4:1": [4, 1], "4:2:1:1": [4, 2, 1, 1], "eight": [4, 3, 2, 2, 1, 1, 1, 1]}


def team(ratios: list[int], fixed_part: float = 0.0) -> list[Speed]:
    """A millisecond a sample for a speed of 1; of a pass over 64 samples so much is fixed."""
    fixed = 0.064 * fixed_part / (1 - fixed_part)
    return [Speed(fixed / ratio, 0.001 / ratio) for ratio in ratios]


def slowed(speeds: list[Speed], which: int, factor: float) -> list[Speed]:
    return [Speed(s.fixed_s * factor, s.per_sample_s * factor) if i == which else s for i, s in enumerate(speeds)]


def known(per_sample: float, *, error: float = 0.0, fixed: float = 0.0, most: int | None = None) -> Member:
    return Member(0, Speed(fixed, per_sample, error, error, 50, 50), most)


# The whole of it, in simulation.


@pytest.mark.parametrize("fixed_part", [0.0, 0.3, 0.7])
@pytest.mark.parametrize("mix", MIXES)
def test_without_noise_it_comes_within_two_percent_of_the_ideal_in_thirty_steps(mix: str, fixed_part: float) -> None:
    run = Simulation(team(MIXES[mix], fixed_part), count=512).run(60)
    assert run.shares[0] < 0.9  # there was something to win
    seen = [share for share, division in zip(run.shares, run.divisions, strict=True) if 1 not in division]
    assert min(seen[30:]) >= 0.98
    assert statistics.mean(run.shares[30:]) >= 0.98  # with what it costs to look at those who have nothing to do
    assert sum(found.why == "gain" for _, found in run.decisions) <= 6


@pytest.mark.parametrize("mix", MIXES)
def test_proportional_gets_there_as_well_where_nothing_is_fixed(mix: str) -> None:
    run = Simulation(team(MIXES[mix]), balancer=Proportional(), count=512).run(40)
    assert min(run.shares[20:]) >= 0.98


def test_proportional_gets_there_in_more_changes_where_something_is_fixed() -> None:
    many = Simulation(team([2, 1], 0.5), balancer=Proportional(gain=0.0), count=512).run(150)
    few = Simulation(team([2, 1], 0.5), count=512).run(150)
    assert many.shares[-1] >= 0.98
    assert few.shares[-1] >= 0.98
    assert len(many.decisions) > len(few.decisions)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 4, 8])
@pytest.mark.parametrize("kind", ["alike", "uneven"])
def test_noise_of_a_fifth_is_not_followed(workers: int, kind: str) -> None:
    ratios = [1] * workers if kind == "alike" else [1 + i % 4 for i in range(workers)]
    runs = [Simulation(team(ratios, 0.2), noise=lognormal(0.2), seed=seed).run(500) for seed in range(2)]
    late = [sum(step > 100 for step, _ in run.decisions) for run in runs]
    assert max(late) <= 8  # of 400 steps and 100 looks
    assert max(len(run.decisions) for run in runs) <= (8 if kind == "alike" else 15)
    assert statistics.mean(statistics.mean(run.shares[40:]) for run in runs) >= 0.95


@pytest.mark.parametrize("spread", [0.0, 0.05])
@pytest.mark.parametrize("fixed_part", [0.0, 0.3])
@pytest.mark.parametrize("shift", [0, 1, 2, 3])
def test_a_worker_that_becomes_four_times_slower_and_recovers_is_followed_in_twenty_steps(
    spread: float, fixed_part: float, shift: int
) -> None:
    run = Simulation(team([1] * 4, fixed_part), noise=lognormal(spread), seed=shift).run(60 + shift)
    before = run.speeds
    run.speeds = slowed(before, 2, 4.0)
    run.run(60)
    assert run.shares[60 + shift] < 0.5
    assert statistics.mean(run.shares[80 + shift : 120 + shift]) >= 0.95
    assert min(run.shares[80 + shift : 120 + shift]) >= 0.9
    run.speeds = before
    run.run(60)
    assert run.shares[120 + shift] < 0.9
    assert statistics.mean(run.shares[140 + shift :]) >= 0.95
    assert run.shares[-1] >= 0.95


@pytest.mark.slow
def test_under_noise_a_change_by_four_is_followed_as_well() -> None:
    found = []
    for seed in range(5):
        run = Simulation(team([1] * 4), noise=lognormal(0.2), seed=seed).run(100)
        run.speeds = slowed(run.speeds, 1, 4.0)
        run.run(60)
        assert run.shares[100] < 0.4
        found.append(statistics.mean(run.shares[120:]))
    assert statistics.mean(found) >= 0.9


@pytest.mark.slow
def test_a_worker_that_has_nothing_to_do_is_found_again_when_it_recovers() -> None:
    run = Simulation(team([1, 1, 1, 1], 0.5)).run(40)
    before = run.speeds
    run.speeds = slowed(before, 3, 8.0)
    run.run(60)
    assert run.now[3] <= 1
    assert 0 in [division[3] for division in run.divisions]
    run.speeds = before
    run.run(1000)
    assert run.now[3] > 50
    assert run.shares[-1] > 0.95


@pytest.mark.slow
def test_trying_again_whoever_has_nothing_to_do_costs_little() -> None:
    run = Simulation([Speed(0.01, 0.001), Speed(0.5, 0.001)], count=64).run(2000)
    looks = sum(found.why == "look" for _, found in run.decisions)
    took = sum(
        max(s.seconds(have) for s, have in zip(run.speeds, division, strict=True) if have)
        for division in run.divisions[500:]
    )
    assert looks > 0
    assert took / (1500 * run.speeds[0].seconds(64)) < 1 + 3 * CURIOSITY


# The rule.


def test_nothing_changes_before_anybody_knows_anything() -> None:
    members = members_of([0, 1], [[0.0] * 6 + [-1, 0.0]] * 2)
    assert decide(EqualFinish(), 64, [10, 54], members, [0, 0]) is None
    assert EqualFinish().divide(64, members) == [32, 32]


def test_whoever_knows_nothing_yet_is_taken_to_be_like_the_others() -> None:
    rows = [[0.0, 0.001, 0.1, 0.01, 30, 16, -1, 0.0], [0.0, 0.0, 0.0, 0.0, 0, 0, 8, 0.5]]
    first, second = members_of([3, 7], rows)
    assert first == Member(3, Speed(0.0, 0.001, 0.1, 0.01, 30, 16))
    assert second == Member(7, Speed(0.0, 0.001, 0.1, UNKNOWN_NOISE, 0, 16), 8, 0.5)


def test_what_is_saved_must_be_worth_it_beside_a_whole_step() -> None:
    members, now = [known(1.0), known(1.5)], [50, 50]
    assert decide(EqualFinish(gain=0.02), 100, now, members, [0, 0], step_s=600.0) is not None
    assert decide(EqualFinish(gain=0.02), 100, now, members, [0, 0], step_s=900.0) is None


def test_a_change_must_promise_the_gain_that_is_asked_for() -> None:
    members, now = [known(1.0), known(1.1)], [50, 50]
    assert decide(EqualFinish(gain=0.1), 100, now, members, [0, 0]) is None
    found = decide(EqualFinish(gain=0.02), 100, now, members, [0, 0])
    assert found is not None
    assert found.why == "gain"
    assert found.counts == [52, 48]
    assert found.before_s == pytest.approx(55)
    assert found.after_s == pytest.approx(52.8)


@pytest.mark.parametrize("unsure", [0, 1])
def test_a_change_must_promise_more_than_may_be_noise_of_those_whom_it_concerns(unsure: int) -> None:
    members = [known(1.0), known(1.5)]
    assert decide(EqualFinish(), 100, [50, 50], members, [0, 0]) is not None
    members[unsure] = known(members[unsure].speed.per_sample_s, error=0.15)
    assert decide(EqualFinish(), 100, [50, 50], members, [0, 0]) is None


def test_more_than_fits_needs_no_promise() -> None:
    members = [known(1.0), known(1.0, error=0.5, most=40)]
    found = decide(EqualFinish(), 100, [50, 50], members, [0, 0])
    assert found is not None
    assert (found.why, found.counts) == ("memory", [60, 40])


def test_a_last_sample_is_left_where_that_costs_next_to_nothing() -> None:
    def after(fixed: float) -> list[int]:
        found = decide(EqualFinish(), 100, [50, 50], [known(1.0), known(1.0, fixed=fixed)], [0, 0])
        assert found is not None
        return found.counts

    assert after(100.5) == [99, 1]
    assert after(150.0) == [100, 0]


def test_a_worker_without_samples_gets_one_now_and_then_the_more_seldom_the_more_it_costs() -> None:
    def first_look(fixed: float, vain: int = 0) -> int:
        members = [known(1.0), known(1.0, fixed=fixed)]
        return next(
            idle
            for idle in range(1, 1000)
            if (found := decide(EqualFinish(), 100, [100, 0], members, [0, idle], [0, vain])) is not None
            and (found.why, found.counts) == ("look", [99, 1])
        )

    assert first_look(103.0) < first_look(120.0) < first_look(300.0)
    assert first_look(120.0) == pytest.approx(0.2 / CURIOSITY, abs=1.1)
    # What is believed of it may be wrong, however long it seems to take.
    assert [first_look(3000.0, vain) for vain in range(3)] == [DOUBT, 2 * DOUBT, 4 * DOUBT]
    assert first_look(300.0, vain=9) == pytest.approx(2 / CURIOSITY, rel=0.02)


def test_a_last_sample_is_not_taken_away_on_a_hunch() -> None:
    slow = Speed(9.0, 0.1, 0.1, 0.1, 4, 9)
    for passes, error, is_sure in ((4, 0.01, False), (50, 0.1, False), (50, 0.01, True)):
        members = [known(0.01), Member(1, slow._replace(passes=passes, error=error))]
        found = decide(EqualFinish(), 64, [55, 9], members, [0, 0])
        left = 9 if found is None else found.counts[1]
        assert (left == 0) == is_sure


def test_stalls_at_the_start_take_no_work_from_a_worker_that_is_like_the_others() -> None:
    alike = team([1, 1])
    stalled = [alike[0], alike[1]._replace(fixed_s=0.4)]
    run = Simulation(alike, count=64)
    run.run(3)
    run.speeds = stalled
    run.run(2)
    run.speeds = alike
    run.run(40)
    assert min(min(division) for division in run.divisions) >= 16


# Memory.


@pytest.mark.parametrize(
    ("samples", "taken", "free", "fit"),
    [
        (16, 100, 400, 64),
        (16, 100, 50, 16),  # what has gone well once fits
        (16, 0, 400, None),
        (16, -5, 400, None),
    ],
)
def test_what_fits_follows_from_what_was_taken(samples: int, taken: int, free: int, fit: int | None) -> None:
    assert fitting(samples, taken, free) == fit


def test_on_a_cpu_there_is_no_telling_what_fits() -> None:
    memory = Memory(torch.device("cpu"))
    memory.observe(16)
    assert memory.most is None


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_twice_the_samples_that_are_said_to_fit_do_not() -> None:
    torch.cuda.reset_peak_memory_stats()  # the peak is of the whole process, other tests included
    device = torch.device("cuda")
    memory, weight = Memory(device), torch.randn(64, 64, device=device, requires_grad=True)

    def train(samples: int) -> None:
        x = torch.randn(samples, 1 << 16, 64, device=device)
        (x @ weight).tanh().square().mean().backward()

    train(8)
    assert memory.most is None
    memory.observe(8)
    most = memory.most
    assert most is not None
    assert most > 8
    train(most)
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        train(2 * most)


# In a run.

CLUSTER = """
[cluster]
seconds_per_sample = 1e-3
[[node]]
name = "fast"
speed = 4.0
[[node]]
name = "slow"
speed = 1.0
"""


@pytest.mark.parametrize(
    ("most", "accumulate", "last"), [("", 1, [51, 13]), ("40/0", 1, [40, 24]), ("20", 2, [40, 24])]
)
def test_limits_hold_from_the_first_step_and_for_each_micro_batch(
    tmp_path: Path, most: str, accumulate: int, last: list[int]
) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    balance = f"equal-finish:most={most}" if most else "equal-finish"
    result = podium.train(
        "digits-mlp", workers=2, launcher="virtual", cluster=str(tmp_path / "cluster.toml"), balance=balance,
        batch_size=64, steps=24, accumulate=accumulate, run_dir=str(tmp_path / "run"), eval_every=0,
    )  # fmt: skip
    assert result.run_dir is not None
    rows = [row for row in read_records(Path(result.run_dir)) if row["kind"] == "step"]
    parts = [[row["samples"] for row in rows if row["rank"] == rank] for rank in (0, 1)]
    assert [part[-1] for part in parts] == pytest.approx(last, abs=1)
    assert parts[0][0] == 32
    if most:
        assert max(parts[0]) == 40


def test_both_balancers_learn() -> None:
    assert all(issubclass(cls, Learning) for cls in (EqualFinish, Proportional))
