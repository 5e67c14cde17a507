"""What so many seeds can find, against statsmodels and published sample sizes."""

from __future__ import annotations

import math
import random
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.stats.power import TTestPower
from statsmodels.stats.weightstats import ttost_paired

from podium.errors import ConfigError
from podium.lab.report.answer import Findings, find
from podium.lab.report.report import _environment
from podium.lab.stats.power import MOST_SEEDS, Power, chance, power, seeds_for, smallest_effect, tell, worth_of
from podium.lab.stats.statistics import compare_pairs
from tests.lab.synthetic import make_row, make_rows


def findings(finals: dict[str, list[float]], times: dict[str, list[float]] | None = None) -> Findings:
    seconds = times or {cell: [1.0 + 0.01 * seed for seed in range(len(values))] for cell, values in finals.items()}
    return find(make_rows(seconds, finals), target=None)


def drawn(mean: float, spread: float, seeds: int, key: int) -> list[float]:
    draw = random.Random(key)
    return [mean + draw.gauss(0, spread) for _ in range(seeds)]


TWO = {"a": drawn(0.95, 0.004, 5, 1), "b": drawn(0.95, 0.004, 5, 2)}


def of_metric(found: list[Power]) -> Power:
    return next(one for one in found if one.measure == "final accuracy")


@pytest.mark.parametrize(("effect", "pairs"), [(0.2, 199), (0.5, 34), (0.8, 15)])
def test_seeds_needed_are_those_of_published_tables(effect: float, pairs: int) -> None:
    """Cohen's small, medium and large effects, 80 % power at 0.05, two-sided, pairs."""
    assert seeds_for(effect, 0.05) == pairs


@pytest.mark.parametrize(("n", "alpha"), [(3, 0.05), (5, 0.05), (5, 0.05 / 3), (12, 0.01)])
def test_the_smallest_effect_has_the_power_that_statsmodels_gives_it(n: int, alpha: float) -> None:
    effect = smallest_effect(n, alpha)
    assert TTestPower().power(effect, n, alpha) == pytest.approx(0.8, abs=2e-3)
    assert chance(0.99 * effect, n, alpha) < 0.8


def test_power_counts_the_right_direction_only() -> None:
    assert chance(0.0, 5, 0.05) == pytest.approx(0.025)


def test_many_seeds_or_huge_effects_are_numbers_too() -> None:
    assert [chance(effect, n, 0.005) for effect, n in ((10.0, 5), (50.0, 2), (1.0, 1000))] == pytest.approx(
        [1.0, 0.42, 1.0], abs=0.01
    )


def test_the_spread_is_that_of_the_pairs_not_of_the_runs() -> None:
    shared = drawn(0, 0.05, 6, 3)
    a = [0.8 + x + e for x, e in zip(shared, drawn(0, 0.002, 6, 4), strict=True)]
    b = [0.8 + x + e for x, e in zip(shared, drawn(0, 0.002, 6, 5), strict=True)]
    found = of_metric(power(findings({"a": a, "b": b})))
    gaps = [x - y for x, y in zip(a, b, strict=True)]
    assert found.deviation == pytest.approx(stats.tstd(gaps))
    assert found.smallest == pytest.approx(found.smallest_effect * stats.tstd(gaps))


def test_more_pairs_of_strategies_ask_for_larger_differences() -> None:
    three = {**TWO, "c": drawn(0.95, 0.004, 5, 7)}
    one, many = of_metric(power(findings(TWO))), of_metric(power(findings(three)))
    assert (one.alpha, many.alpha) == pytest.approx((0.05, 0.05 / 3))
    assert one.deviation == pytest.approx(many.deviation) and many.smallest > one.smallest


def test_power_does_not_depend_on_the_difference_that_was_found() -> None:
    moved = {**TWO, "b": [x + 0.03 for x in TWO["b"]]}
    one, other = of_metric(power(findings(TWO))), of_metric(power(findings(moved)))
    assert (one.power, one.smallest, one.seeds_needed) == pytest.approx(
        (other.power, other.smallest, other.seeds_needed)
    )
    assert one.within < other.within


def test_the_seeds_needed_have_the_power_and_one_less_has_not() -> None:
    found = of_metric(power(findings(TWO), {"final accuracy": 0.004}))
    assert found.seeds_needed is not None and found.seeds_needed > 5 and not found.enough
    effect = 0.004 / found.deviation
    assert chance(effect, found.seeds_needed, 0.05) >= 0.8 > chance(effect, found.seeds_needed - 1, 0.05)
    assert found.power == pytest.approx(chance(effect, 5, 0.05))
    assert f"for that it takes {found.seeds_needed} seeds" in tell(found)


def test_what_seeds_will_not_do_is_said() -> None:
    found = of_metric(power(findings(TWO), {"final accuracy": 1e-6}))
    assert found.seeds_needed is None and f"more than {MOST_SEEDS:,} seeds" in tell(found)


def test_equivalence_is_that_of_two_one_sided_tests() -> None:
    found = of_metric(power(findings(TWO)))
    wanted = ttost_paired(np.array(TWO["a"]), np.array(TWO["b"]), -found.worth, found.worth)[0]
    assert found.p_equivalent == pytest.approx(float(wanted))
    edge = ttost_paired(np.array(TWO["a"]), np.array(TWO["b"]), -found.within, found.within)[0]
    assert float(edge) == pytest.approx(0.05), "the largest difference that is not ruled out"


def test_equivalence_is_corrected_for_the_number_of_pairs() -> None:
    three = {**TWO, "c": drawn(0.95, 0.004, 5, 7)}
    one, many = of_metric(power(findings(TWO))), of_metric(power(findings(three)))
    assert many.p_equivalent == pytest.approx(min(1.0, 3 * one.p_equivalent)) and many.within > one.within


def test_a_difference_that_is_ruled_out_is_told_with_its_bound() -> None:
    close = findings({"a": drawn(0.95, 0.0004, 6, 1), "b": drawn(0.95, 0.0004, 6, 2)})
    found = of_metric(power(close))
    assert found.equivalent and found.within < 0.01 and "no difference larger than 0.00" in tell(found)
    assert not of_metric(power(findings(TWO), {"final accuracy": 0.001})).equivalent


def test_the_same_numbers_in_every_seed_need_no_more_seeds() -> None:
    same = of_metric(power(findings({"a": [0.9] * 3, "b": [0.9] * 3})))
    assert (same.power, same.smallest, same.within) == (1.0, 0.0, 0.0) and "the same in every seed" in tell(same)
    apart = power(findings({"a": [0.9] * 3, "b": [0.5] * 3}))
    assert all(one.measure != "final accuracy" for one in apart), "equal gaps of a metric have no spread to go by"


def test_times_are_ratios_and_five_per_cent_is_worth_knowing() -> None:
    times = {"a": [math.exp(x) for x in drawn(1, 0.02, 5, 1)], "b": [math.exp(x) for x in drawn(1, 0.02, 5, 2)]}
    (found,) = [one for one in power(findings(TWO, times)) if one.measure == "seconds"]
    gaps = [math.log(a / b) for a, b in zip(times["a"], times["b"], strict=True)]
    assert found.ratio and found.worth == pytest.approx(1.05)
    assert found.smallest == pytest.approx(math.exp(found.smallest_effect * stats.tstd(gaps)))
    assert found.power == pytest.approx(chance(math.log(1.05) / stats.tstd(gaps), 5, found.alpha))


def test_what_is_worth_knowing_is_a_point_of_a_share_and_a_part_of_anything_else() -> None:
    assert worth_of(findings(TWO), "final accuracy") == 0.01
    errors = find([make_row(cell, seed, final=30.0 + seed, metric="mae") for cell in "ab" for seed in range(2)], None)
    assert worth_of(errors, "final mae") == pytest.approx(0.05 * 30.5)


def test_a_worth_that_is_no_difference_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"seconds must be a ratio above 1, got 0\.05"):
        power(findings(TWO), {"seconds": 0.05})
    with pytest.raises(ConfigError, match="final accuracy must be a difference above 0, got 0"):
        power(findings(TWO), {"final accuracy": 0.0})


def test_one_seed_has_no_power_to_tell_of() -> None:
    assert power(findings({"a": [0.9], "b": [0.8]})) == []
    assert compare_pairs("x", {"a": {0: 1.0}, "b": {0: 2.0}}, ratio=False)[0].p is None


def test_the_section_of_a_report_shows_every_contrast() -> None:
    found = power(findings({**TWO, "<i>": drawn(0.95, 0.004, 5, 7)}), {"final accuracy": 1e-6})
    macros: Any = _environment().get_template("factors.html.j2").module
    page = str(macros.show_power(found, MOST_SEEDS))
    assert page.count("<tr>") == len(found) + 1 and "&lt;i&gt;" in page and "&gt; 1,000" in page
    assert str(macros.show_power([], MOST_SEEDS)).strip() == ""
