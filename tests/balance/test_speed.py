"""A worker's speed, learnt from passes that are noisy, stall, change, and come in other sizes."""

from __future__ import annotations

import itertools
import math
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.balance.speed import WARM_UP, Speed, SpeedModel


def taught(times: list[tuple[int, float]]) -> SpeedModel:
    model = SpeedModel()
    for samples, seconds in times:
        model.observe(samples, seconds)
    return model


def noisy(seconds: float, count: int, seed: int = 0, spread: float = 0.2) -> list[float]:
    rng = random.Random(seed)
    return [seconds * rng.lognormvariate(-(spread**2) / 2, spread) for _ in range(count)]


def test_nothing_is_known_before_two_passes_after_the_warm_up() -> None:
    model = SpeedModel()
    for _ in range(WARM_UP + 1):
        model.observe(8, 0.1)
        assert model.speed == Speed(0.0, 0.0)
    model.observe(8, 0.1)
    assert model.speed.passes == 2
    assert model.speed.samples == 8
    assert model.speed.seconds(8) == pytest.approx(0.1)


def test_the_warm_up_does_not_count() -> None:
    model = taught([(8, 50.0), (8, 20.0), *[(8, 0.1)] * 4])
    assert model.speed.seconds(8) == pytest.approx(0.1)


def test_passes_over_nothing_and_passes_that_take_no_time_say_nothing() -> None:
    model = taught([(8, 0.1)] * 6)
    before = model.speed
    for samples, seconds in [(0, 0.3), (8, 0.0), (8, math.inf), (8, math.nan), (8, -1.0)]:
        model.observe(samples, seconds)
    assert model.speed == before


@pytest.mark.parametrize("before", [1, 5, 40, 300])
@pytest.mark.parametrize("stall", [4.0, 1000.0])
def test_a_single_stall_is_not_believed_however_long(before: int, stall: float) -> None:
    model = taught([(8, 0.1)] * (WARM_UP + 2 + before))
    model.observe(8, 0.1 * stall)
    for _ in range(5):
        assert model.speed.seconds(8) == pytest.approx(0.1, rel=0.05)
        model.observe(8, 0.1)


@pytest.mark.parametrize("factor", [4.0, 0.25])
@pytest.mark.parametrize("spread", [0.0, 0.05])
@pytest.mark.parametrize("before", [10, 100, 500])
def test_a_change_by_four_is_believed_after_three_passes(factor: float, spread: float, before: int) -> None:
    model = taught([(8, seconds) for seconds in noisy(0.1, before, spread=spread)])
    assert model.speed.seconds(8) == pytest.approx(0.1, rel=0.06)
    for seconds in noisy(0.1 * factor, 3, seed=1, spread=spread):
        model.observe(8, seconds)
    assert model.speed.seconds(8) == pytest.approx(0.1 * factor, rel=0.12)
    assert model.speed.passes == 3


def test_two_slow_passes_are_not_a_change_yet() -> None:
    model = taught([(8, 0.1)] * 50 + [(8, 0.4)] * 2)
    assert model.speed.seconds(8) == pytest.approx(0.1, rel=0.05)


def test_a_level_that_fits_gets_surer_with_every_pass() -> None:
    times = noisy(0.1, 150)
    errors = [taught([(8, seconds) for seconds in times[:n]]).speed.error for n in (20, 50, 150)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] == pytest.approx(0.2 / math.sqrt(148), rel=0.4)


def test_errors_are_what_they_say() -> None:
    """Over many models of the same worker, what they say lies around the truth by as much as they think."""
    speeds = [taught([(8, seconds) for seconds in noisy(0.1, 40, seed)]).speed for seed in range(100)]
    off = [(speed.seconds(8) / 0.1 - 1) / speed.error for speed in speeds]
    assert abs(statistics.mean(off)) < 0.5
    assert 0.7 < statistics.pstdev(off) < 1.6


def test_steady_noise_of_a_fifth_is_seldom_taken_for_a_change() -> None:
    # Two-sided CUSUM of normal steps, slack 0.75 and bar 6: one in some 20,000 passes, and more while noise is guessed.
    anew = 0
    for seed in range(10):
        model, passes = SpeedModel(), 0
        for seconds in noisy(0.1, 500, seed):
            model.observe(8, seconds)
            anew += model.speed.passes < passes
            passes = model.speed.passes
    assert anew <= 5


@pytest.mark.parametrize(("fast", "slow", "period"), [(0.02, 0.095, 4), (0.02, 0.095, 5), (0.002, 0.077, 20)])
def test_under_a_cpu_quota_it_is_the_mean_that_counts(fast: float, slow: float, period: int) -> None:
    """A quota lets some passes run and halts the next: their median says nothing of how many fit into an hour."""
    times = list(itertools.islice(itertools.cycle([fast] * (period - 1) + [slow]), 200))
    model = taught([(8, seconds) for seconds in times])
    mean = statistics.mean(times[-period * 5 :])
    assert model.speed.seconds(8) == pytest.approx(mean, rel=0.1)
    assert model.speed.noise > 0.5


@pytest.mark.parametrize("fixed_part", [0.0, 0.3, 0.7, 0.9])
def test_a_change_of_the_part_shows_what_is_fixed(fixed_part: float) -> None:
    truth = Speed(64 * 0.001 * fixed_part / (1 - fixed_part), 0.001)
    model = taught([(64, truth.seconds(64))] * 20 + [(32, truth.seconds(32))] * 8)
    assert model.speed.samples == 32
    for samples in (16, 32, 64, 96):
        assert model.speed.seconds(samples) == pytest.approx(truth.seconds(samples), rel=0.05)


@pytest.mark.parametrize("fixed_part", [0.0, 0.9])
def test_a_wrong_shape_is_not_taken_for_a_change_of_level(fixed_part: float) -> None:
    truth = Speed(64 * 0.001 * fixed_part / (1 - fixed_part), 0.001)
    model = taught([(64, truth.seconds(64))] * 20)
    for _ in range(6):
        model.observe(16, truth.seconds(16))
    assert model.speed.passes > 20  # the level did not begin anew
    assert model.speed.seconds(16) == pytest.approx(truth.seconds(16), rel=0.05)


def test_what_is_fixed_is_remembered_over_a_change_of_level() -> None:
    truth = Speed(0.05, 0.001)
    times = [(64, truth.seconds(64))] * 20 + [(32, truth.seconds(32))] * 20
    model = taught(times + [(32, 4 * truth.seconds(32))] * 3)
    assert model.speed.passes == 3
    assert model.speed.seconds(64) == pytest.approx(4 * truth.seconds(64), rel=0.05)


def test_the_first_pass_of_a_new_size_is_left_out() -> None:
    model = taught([(64, 0.064)] * 20 + [(32, 5.0)] + [(32, 0.032)] * 2)
    assert model.speed.seconds(32) == pytest.approx(0.032, rel=0.1)


def test_short_last_steps_of_epochs_do_not_disturb() -> None:
    truth = Speed(0.01, 0.001)
    model = SpeedModel()
    for step in range(200):
        samples = 5 if step % 10 == 9 else 64
        model.observe(samples, truth.seconds(samples))
        if step > 10:
            assert model.speed.samples == 64
            assert model.speed.seconds(64) == pytest.approx(truth.seconds(64), rel=0.02)
            assert model.speed.passes > step * 0.8


def test_sizes_that_are_never_the_same_twice_are_learnt_from() -> None:
    rng = random.Random(0)
    model = taught([(samples, 0.02 + 0.001 * samples) for samples in (rng.randint(10, 100) for _ in range(100))])
    assert model.speed.seconds(50) == pytest.approx(0.07, rel=0.05)


@given(
    st.lists(
        st.tuples(st.integers(0, 1000), st.floats(1e-9, 1e6) | st.sampled_from([0.0, math.nan, math.inf])), max_size=60
    )
)
def test_whatever_comes_it_stays_a_speed(times: list[tuple[int, float]]) -> None:
    speed = taught(times).speed
    if speed.passes:
        assert speed.fixed_s >= 0
        assert speed.per_sample_s > 0
        assert speed.error > 0
        assert speed.samples > 0
        assert all(math.isfinite(value) for value in speed)
        assert speed.fixed_s <= 0.96 * speed.seconds(speed.samples)
    else:
        assert speed == Speed(0.0, 0.0)
