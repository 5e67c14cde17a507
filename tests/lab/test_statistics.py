from __future__ import annotations

import math
import random
import sys

import pytest
from scipy import stats
from statsmodels.stats.multitest import multipletests

from podium.errors import MissingExtra
from podium.lab.stats.statistics import (
    Mean,
    compare_pairs,
    contrasts,
    holm,
    mean_interval,
    require_statistics,
    summarise,
)
from podium.lab.study.results import default_target, metric_name, time_to_target
from tests.lab.synthetic import failed_row, make_row, make_rows


def draws(n: int, around: float, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [around + source.gauss(0, 0.1) for _ in range(n)]


@pytest.mark.parametrize("n", [2, 3, 10])
def test_the_interval_is_that_of_a_one_sample_t_test(n: int) -> None:
    values = draws(n, 5.0)
    found, wanted = mean_interval(values), stats.ttest_1samp(values, 0).confidence_interval(0.95)
    assert found is not None and found.n == n
    assert (found.low, found.high) == pytest.approx((wanted.low, wanted.high))


def test_one_value_has_a_mean_but_no_interval() -> None:
    assert mean_interval([3.0]) == Mean(1, 3.0, None, None)
    assert mean_interval([]) is None


def test_values_that_do_not_vary_have_an_interval_of_no_width() -> None:
    assert mean_interval([0.1, 0.1, 0.1]) == Mean(3, pytest.approx(0.1), pytest.approx(0.1), pytest.approx(0.1))


def test_holm_is_that_of_statsmodels_and_of_its_definition() -> None:
    p = [0.01, 0.04, 0.03, 0.5]
    assert holm(p) == pytest.approx(list(multipletests(p, method="holm")[1]))
    assert holm(p) == pytest.approx([0.04, 0.09, 0.09, 0.5])
    assert holm([]) == []


def test_differences_are_paired_by_seed() -> None:
    a, b = draws(5, 1.0, 1), draws(5, 1.1, 2)
    values = {"a": dict(enumerate(a)), "b": {seed: b[seed] for seed in reversed(range(5))}}
    (found,) = compare_pairs("x", values, ratio=False)
    wanted = stats.ttest_rel(a, b)
    assert found.p == pytest.approx(wanted.pvalue) and found.p_holm == pytest.approx(wanted.pvalue)
    interval = wanted.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert found.value == pytest.approx(sum(a) / 5 - sum(b) / 5)


def test_only_seeds_that_both_finished_are_paired() -> None:
    values = {"a": {0: 1.0, 1: 2.0, 2: 3.5}, "b": {1: 1.0, 2: 2.0, 9: 50.0}}
    (found,) = compare_pairs("x", values, ratio=False)
    assert found.n == 2 and found.value == pytest.approx(1.25)


def test_a_ratio_of_times_does_not_depend_on_their_unit() -> None:
    seconds = {"a": dict(enumerate(draws(4, 2.0, 1))), "b": dict(enumerate(draws(4, 1.0, 2)))}
    hours = {cell: {seed: x / 3600 for seed, x in by.items()} for cell, by in seconds.items()}
    (one,), (other,) = compare_pairs("t", seconds, ratio=True), compare_pairs("t", hours, ratio=True)
    assert (one.value, one.low, one.high, one.p) == pytest.approx((other.value, other.low, other.high, other.p))
    assert one.low is not None and one.high is not None and one.low < one.value < one.high


def test_equal_results_in_every_seed_are_no_difference() -> None:
    (found,) = compare_pairs("x", {"a": {0: 0.9, 1: 0.8}, "b": {0: 0.9, 1: 0.8}}, ratio=False)
    assert (found.value, found.p, found.effect) == (0, 1.0, 0.0) and not found.distinct


def test_the_same_gap_in_every_seed_is_beyond_doubt() -> None:
    (found,) = compare_pairs("x", {"a": {0: 2.0, 1: 4.0}, "b": {0: 1.0, 1: 2.0}}, ratio=True)
    assert found.distinct and found.value == pytest.approx(2.0) and found.effect == math.inf


def test_one_seed_gives_a_difference_without_a_test() -> None:
    found = contrasts(make_rows({"a": [1.0], "b": [2.0]}), "accuracy", 0.9)
    assert found and all(c.p is None and c.p_holm is None and c.low is None and not c.distinct for c in found)


def test_failed_runs_are_counted_and_in_no_mean() -> None:
    rows = [make_row("solo", 0, seconds=1.0), make_row("solo", 1, seconds=3.0), failed_row("solo", 2)]
    (line,) = summarise(rows, "accuracy", 0.9)
    assert (line.runs, line.failed) == (2, 1)
    assert line.seconds is not None and line.seconds.mean == pytest.approx(2.0)


def test_a_failure_that_was_repeated_with_success_counts_once() -> None:
    (line,) = summarise([failed_row("solo", 0), make_row("solo", 0)], "accuracy", 0.9)
    assert (line.runs, line.failed) == (1, 0)


def test_time_to_target_is_that_of_the_first_validation_that_met_it() -> None:
    row = make_row("solo", 0, seconds=8.0)
    series = [point["accuracy"] for point in row["history"]]
    assert time_to_target(row, "accuracy", series[3]) == pytest.approx(4.0)
    assert time_to_target(row, "accuracy", 0.999) is None


def test_metrics_of_a_validation_may_lie_in_a_table_of_their_own() -> None:
    row = make_row("solo", 0, history=[{"seconds": 2.5, "loss": 1.0, "metrics": {"accuracy": 0.9}}])
    assert time_to_target(row, "accuracy", 0.9) == 2.5


def test_the_target_lies_short_of_the_best_on_the_worse_side() -> None:
    assert default_target([make_row("a", 0, final=0.8), make_row("b", 0, final=0.6)], "accuracy") == pytest.approx(0.76)
    errors = [make_row("a", 0, final=0.2, metric="mae"), make_row("b", 0, final=0.1, metric="mae")]
    assert default_target(errors, "mae") == pytest.approx(0.105)
    assert default_target([make_row("a", 0, final=-0.5, metric="r2")], "r2") == pytest.approx(-0.525)


def test_without_metrics_strategies_are_judged_by_the_loss() -> None:
    assert metric_name([make_row("solo", 0, metrics={})]) == "loss"
    assert metric_name([make_row("solo", 0, metrics={"top5": 0.9, "accuracy": 0.8})]) == "accuracy"


def test_a_metric_that_is_not_a_number_is_left_out() -> None:
    rows = [make_row("solo", 0, final=0.9), make_row("solo", 1, metrics={"accuracy": "nan"})]
    (line,) = summarise(rows, "accuracy", 0.8)
    assert line.runs == 2 and line.metric == Mean(1, 0.9)


def test_statistics_that_are_not_installed_say_which_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "statsmodels.stats.multitest", None)
    with pytest.raises(MissingExtra, match=r"statsmodels: pip install 'podium\[study\]'"):
        require_statistics()


def test_times_that_differ_in_their_last_digit_are_the_same_time() -> None:
    one = {"a": {0: 0.1 + 0.2, 1: 0.5}, "b": {0: 0.3, 1: 0.5 + 1e-16}}
    for ratio in (True, False):
        (found,) = compare_pairs("seconds", one, ratio=ratio)
        assert not found.distinct and found.p == 1 and found.value == (1 if ratio else 0)


def test_accuracies_that_differ_by_the_same_step_in_every_seed_do_so_by_chance() -> None:
    """They come in steps of one test sample: with three seeds equal gaps are nothing rare."""
    steps = {"a": {0: 0.900, 1: 0.910, 2: 0.905}, "b": {0: 0.905, 1: 0.915, 2: 0.910}}
    (found,) = compare_pairs("final accuracy", steps, ratio=False)
    assert found.p == 0.25 and not found.distinct and found.low is None and not found.exact
    (waited,) = compare_pairs("seconds to target", {"a": {0: 1.0, 1: 1.0}, "b": {0: 2.0, 1: 2.0}}, ratio=True)
    assert waited.p == 0.5 and not waited.distinct
    (clock,) = compare_pairs("seconds", {"a": {0: 1.1, 1: 1.1}, "b": {0: 2.2, 1: 2.2}}, ratio=True)
    assert clock.exact and clock.distinct, "a computed clock is exact"
