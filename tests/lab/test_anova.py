"""Analysis of factors against textbook tables, scipy and statsmodels; its assumptions against planted faults."""

from __future__ import annotations

import json
import math
import random
import re
import statistics
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest
from scipy import stats
from statsmodels.formula.api import ols
from statsmodels.stats.anova import anova_lm
from statsmodels.stats.multitest import multipletests

from podium.lab.report.report import _environment
from podium.lab.stats.anova import Anova, anova, tell
from podium.lab.stats.checks import _deviations, analyse, by_ranks, checks
from podium.lab.stats.checks import tell as tell_checks
from podium.lab.stats.factorial import fractional, latin_hypercube
from podium.lab.stats.statistics import holm
from podium.lab.study.responses import is_ratio, response_of
from podium.lab.study.store import Row
from podium.sweeps.search.space import Range
from tests.lab.synthetic import failed_row, make_row

GRAFTS = {
    8500: [90.3, 89.2, 98.2, 93.9, 87.4, 97.9],
    8700: [92.5, 89.5, 90.6, 94.7, 87.0, 95.8],
    8900: [85.5, 90.8, 89.6, 86.2, 88.0, 93.4],
    9100: [82.5, 89.5, 85.6, 87.4, 78.9, 90.7],
}
"""Yield of vascular grafts by extrusion pressure in six batches (blocks): Montgomery, Design and Analysis of
Experiments, 8th edition, example 4.1."""

BATTERIES = {
    ("one", 15): [130, 155, 74, 180],
    ("one", 70): [34, 40, 80, 75],
    ("one", 125): [20, 70, 82, 58],
    ("two", 15): [150, 188, 159, 126],
    ("two", 70): [136, 122, 106, 115],
    ("two", 125): [25, 70, 58, 45],
    ("three", 15): [138, 110, 168, 160],
    ("three", 70): [174, 120, 150, 139],
    ("three", 125): [96, 104, 82, 60],
}
"""Life of batteries by material and temperature, four each, no blocks: the same book, example 5.1."""


def row(levels: dict[str, Any], seed: int, value: float, **fields: Any) -> Row:
    name = ", ".join(f"{factor}={level}" for factor, level in levels.items())
    return make_row(name, seed, levels=levels, metrics={"yield": value}, **fields)


def graft_rows() -> list[Row]:
    return [row({"pressure": p}, seed, x) for p, values in GRAFTS.items() for seed, x in enumerate(values)]


def battery_rows() -> list[Row]:
    """Every run with a seed of its own: nothing is a block."""
    runs = [(at, x) for at, values in BATTERIES.items() for x in values]
    return [row({"material": m, "degrees": d}, seed, x) for seed, ((m, d), x) in enumerate(runs)]


def factorial_rows(
    value: Callable[..., float], factors: dict[str, list[Any]], seeds: int, noise: float = 0.3, key: int = 0
) -> list[Row]:
    """Every combination with every seed; a seed shifts all its runs, and each run has noise of its own."""
    draw = random.Random(key)
    shifts = [draw.gauss(0, 1) for _ in range(seeds)]
    return [
        row(levels := dict(zip(factors, at, strict=True)), seed, value(**levels) + shifts[seed] + draw.gauss(0, noise))
        for seed in range(seeds)
        for at in product(*factors.values())
    ]


def analysed(rows: list[Row], response: str = "yield", **options: Any) -> Anova:
    found = anova(rows, response, ratio=options.pop("ratio", False), **options)
    assert found is not None
    return found


def by_statsmodels(rows: list[Row], formula: str, typ: int) -> Any:
    import pandas

    facts = [
        {**{k: str(v) for k, v in r["levels"].items()}, "s": str(r["seed"]), "y": r["metrics"]["yield"]} for r in rows
    ]
    return anova_lm(ols(formula, pandas.DataFrame(facts)).fit(), typ=typ)


def test_blocks_are_taken_out_as_in_the_textbook() -> None:
    found = analysed(graft_rows())
    (term,) = found.terms
    assert found.block is not None
    assert (term.df, found.block.df, found.residual_df) == (3, 5, 15)
    assert [term.sum_sq, found.block.sum_sq, found.residual_sum_sq] == pytest.approx(
        [178.17, 192.25, 109.89], abs=0.005
    )
    assert term.f == pytest.approx(8.11, abs=0.005) and term.p == pytest.approx(0.0019, abs=5e-5)
    assert found.balanced and not found.exact


def test_shares_of_variation_are_what_their_names_say() -> None:
    (term,) = analysed(graft_rows()).terms
    assert term.partial_eta_squared == pytest.approx(178.171 / (178.171 + 109.886), abs=1e-4)
    assert term.omega_squared == pytest.approx((178.171 - 3 * 7.3258) / (480.306 + 7.3258), abs=1e-4)


def test_a_factorial_without_blocks_is_that_of_the_textbook() -> None:
    found = analysed(battery_rows())
    assert found.block is None and any("seeds are not blocks" in note for note in found.notes)
    assert [(term.name, term.df) for term in found.terms] == [
        ("material", 2),
        ("degrees", 2),
        ("material × degrees", 4),
    ]
    assert [term.sum_sq for term in found.terms] == pytest.approx([10683.72, 39118.72, 9613.78], abs=0.005)
    assert [term.f for term in found.terms] == pytest.approx([7.91, 28.97, 3.56], abs=0.005)
    assert (found.residual_df, found.residual_sum_sq) == (27, pytest.approx(18230.75, abs=0.005))


def test_one_factor_without_blocks_is_scipys_one_way_analysis() -> None:
    groups = [[float(x) for x in values] for values in list(BATTERIES.values())[:3]]
    seeds = iter(range(99))
    rows = [row({"g": f"g{k}"}, next(seeds), x) for k, group in enumerate(groups) for x in group]
    (term,) = analysed(rows).terms
    wanted = stats.f_oneway(*groups)
    assert (term.f, term.p) == pytest.approx((wanted.statistic, wanted.pvalue))


def test_two_levels_give_the_paired_t_test_and_its_interval() -> None:
    rows = [r for r in graft_rows() if r["levels"]["pressure"] in (8500, 8900)]
    found = analysed(rows)
    wanted = stats.ttest_rel(GRAFTS[8900], GRAFTS[8500])
    (term,), (first, second) = found.terms, found.levels
    assert term.f == pytest.approx(wanted.statistic**2) and term.p == pytest.approx(wanted.pvalue)
    ends = wanted.confidence_interval(0.95)
    assert (second.low, second.high) == pytest.approx((ends.low, ends.high))
    assert second.against_first == pytest.approx(np.mean(GRAFTS[8900]) - np.mean(GRAFTS[8500]))
    assert first.against_first is None and first.mean.mean == pytest.approx(np.mean(GRAFTS[8500]))


def test_the_interval_of_a_level_is_over_seeds() -> None:
    (first, *_) = analysed(graft_rows()).levels
    wanted = stats.t.interval(0.95, 5, loc=np.mean(GRAFTS[8500]), scale=stats.sem(GRAFTS[8500]))
    assert first.mean.n == 6 and (first.mean.low, first.mean.high) == pytest.approx(wanted)


def test_terms_of_a_response_are_corrected_by_holm() -> None:
    terms = analysed(battery_rows()).terms
    assert [term.p_holm for term in terms] == pytest.approx(holm([term.p or 0.0 for term in terms]))
    assert terms[2].p_holm == pytest.approx(0.0186, abs=1e-4), "the largest of three is not multiplied"


@pytest.mark.slow
def test_holm_gives_the_bits_of_statsmodels() -> None:
    draw = random.Random(0)
    for count in (1, 2, 7):  # statsmodels takes its time
        p = [draw.random() ** 4 for _ in range(count)]
        p[0] = p[-1]
        assert holm(p) == list(multipletests(p, method="holm")[1])


UNBALANCED = "y ~ C(a, Sum) * C(b, Sum) + C(s, Sum)"


def test_missing_runs_make_it_type_three_with_sums_to_zero() -> None:
    rows = factorial_rows(lambda a, b: (a == "y") + 0.2 * b, {"a": ["x", "y"], "b": [1, 2, 4]}, 4)
    rows = [r for k, r in enumerate(rows) if k not in (0, 1, 9)]
    found, wanted = analysed(rows), by_statsmodels(rows, UNBALANCED, 3)
    assert (found.type, found.balanced) == ("III", False)
    names = ["C(a, Sum)", "C(b, Sum)", "C(a, Sum):C(b, Sum)"]
    for term, name in zip(found.terms, names, strict=True):
        assert (term.sum_sq, term.f, term.p) == pytest.approx(tuple(wanted.loc[name, ["sum_sq", "F", "PR(>F)"]]))
    assert found.residual_df == wanted.loc["Residual", "df"] == 21 - 1 - 3 - 5
    assert any("type III" in note for note in found.notes) and any(note.startswith("3 runs") for note in found.notes)


def test_failed_runs_count_as_missing_and_a_second_try_as_the_run() -> None:
    rows = graft_rows()
    lost = failed_row(rows[0]["cell"], rows[0]["seed"]) | {"levels": rows[0]["levels"]}
    assert analysed([lost, *rows]).to_dict()["terms"] == analysed(rows).to_dict()["terms"]
    assert analysed([lost, *rows[1:]]).runs == 23


def test_without_interactions_missing_runs_leave_type_two() -> None:
    rows = graft_rows()[1:]
    found, wanted = analysed(rows), by_statsmodels(rows, "y ~ C(pressure) + C(s)", 2)
    assert found.type == "II" and not found.balanced
    assert found.terms[0].sum_sq == pytest.approx(wanted.loc["C(pressure)", "sum_sq"])


def test_an_empty_cell_leaves_its_interaction_untested_and_types_at_two() -> None:
    rows = factorial_rows(lambda a, b: 0.0, {"a": ["x", "y"], "b": [1, 2]}, 4)
    rows = [r for r in rows if r["levels"] != {"a": "y", "b": 2}]
    found = analysed(rows)
    wanted = by_statsmodels(rows, "y ~ C(a) + C(b) + C(s)", 2)
    assert [term.name for term in found.terms] == ["a", "b"] and found.type == "II"
    assert [term.sum_sq for term in found.terms] == pytest.approx(list(wanted.loc[["C(a)", "C(b)"], "sum_sq"]))
    assert any("a × b cannot be told from other terms" in note for note in found.notes)


def test_an_empty_corner_leaves_other_interactions_at_type_two() -> None:
    factors: dict[str, list[Any]] = {"a": ["x", "y"], "b": [1, 2], "c": [1, 2, 3]}
    rows = factorial_rows(lambda a, b, c: b * c + (a == "y") * c, factors, 3)
    rows = [r for k, r in enumerate(rows) if (r["levels"]["a"], r["levels"]["b"]) != ("y", 2) and k not in (0, 4)]
    found = analysed(rows)
    wanted = by_statsmodels(rows, "y ~ C(a) + C(b) + C(c) + C(a):C(c) + C(b):C(c) + C(s)", 2)
    assert found.type == "II" and [term.name for term in found.terms] == ["a", "b", "c", "a × c", "b × c"]
    names = ["C(a)", "C(b)", "C(c)", "C(a):C(c)", "C(b):C(c)"]
    assert [term.sum_sq for term in found.terms] == pytest.approx(list(wanted.loc[names, "sum_sq"]))
    assert [term.p for term in found.terms] == pytest.approx(list(wanted.loc[names, "PR(>F)"]))


def test_replications_let_all_interactions_in() -> None:
    factors: dict[str, list[Any]] = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    found = analysed(factorial_rows(lambda a, b, c: float(a * b * c), factors, 3))
    assert [term.name for term in found.terms][-1] == "a × b × c" and len(found.terms) == 7
    assert found.residual_df == 7 * 2


def test_one_replication_has_the_highest_interaction_in_its_residual_and_says_so() -> None:
    factors: dict[str, list[Any]] = {"a": [1, 2], "b": [1, 2], "c": [1, 2]}
    found = analysed(factorial_rows(lambda a, b, c: float(a), factors, 1))
    assert len(found.terms) == 6 and found.residual_df == 1 and found.block is None
    assert any("three or more factors" in note for note in found.notes)
    two = analysed(factorial_rows(lambda a, b: float(a), {"a": [1, 2], "b": [1, 2, 3]}, 1))
    assert [term.name for term in two.terms] == ["a", "b"] and two.residual_df == 2
    assert any("too few runs to test interactions" in note for note in two.notes)
    assert all(line.mean.low is None for line in two.levels)


def test_one_run_per_level_of_one_factor_is_told_and_not_tested() -> None:
    found = analysed([row({"a": level}, 0, float(level)) for level in (1, 2, 3)])
    assert found.residual_df == 0 and found.terms[0].p is None and not found.terms[0].found
    assert "too few runs" in tell(found)
    assert checks(found).checks == ()


def test_a_factor_with_one_level_is_left_out_and_named() -> None:
    rows = [r | {"levels": {**r["levels"], "link": "fast"}} for r in graft_rows()]
    found = analysed(rows)
    assert [term.name for term in found.terms] == ["pressure"]
    assert found.notes[0] == "link has one level (fast), so it is left out."


def test_rows_without_levels_or_with_one_cell_have_no_analysis() -> None:
    assert anova([make_row("solo", 0), make_row("ring", 0)], "accuracy", ratio=False) is None
    assert anova([r for r in graft_rows() if r["levels"]["pressure"] == 8500], "yield", ratio=False) is None
    assert anova(graft_rows(), "no such field", ratio=False) is None


def test_values_that_seeds_do_not_change_are_exact_and_have_no_f() -> None:
    factors: dict[str, list[Any]] = {"a": ["x", "y"], "b": [1, 2, 4]}
    rows = [
        make_row(f"{a}{b}", seed, levels={"a": a, "b": b}, seconds=1.0 + b)
        for a, b in product(*factors.values())
        for seed in range(3)
    ]
    found = analysed(rows, "seconds", ratio=True)
    assert found.exact and [term.exact for term in found.terms] == [False, True, False]
    assert all(term.f is None and term.p is None for term in found.terms)
    assert found.levels[-1].against_first == pytest.approx(5 / 2) and found.levels[-1].low == pytest.approx(5 / 2)
    assert tell(found) == "seconds (ratios): the same in every repetition, so these effects are exact: b."
    assert checks(found).checks == ()


def test_exact_values_of_a_fraction_are_not_tested_against_what_the_model_lacks() -> None:
    """Three equal seeds are one observation: counted as three, the misfit would pass for chance, thrice as sure."""
    plan = fractional({name: [0, 1] for name in "abcd"}, ["d = a*b*c"])
    rows = [row(at, seed, float(at["a"] * at["b"] + at["c"])) for at in plan.combinations for seed in range(3)]
    found = analysed(rows, aliases=plan.aliases)
    assert found.exact and all(term.p is None for term in found.terms)
    assert {term.name for term in found.terms if term.found} == {"a", "b", "c", "a × b"}


def test_a_fraction_tells_what_it_cannot_tell_apart() -> None:
    plan = fractional({"a": [0, 1], "b": [0, 1], "c": [0, 1]}, ["c = a*b"])
    draw = random.Random(3)
    rows = [row(at, seed, 2.0 * at["c"] + draw.gauss(0, 0.1)) for at in plan.combinations for seed in range(4)]
    found = analysed(rows, aliases=plan.aliases)
    assert [(term.name, term.aliases) for term in found.terms] == [
        ("a", ("b × c",)),
        ("b", ("a × c",)),
        ("c", ("a × b",)),
    ]
    assert [term.name for term in found.terms if term.found] == ["c"]
    assert "c is not tested apart from a × b: these runs show their sum." in found.notes
    assert analysed(rows).terms == found.terms, "the runs show it without being told"


def test_points_of_a_hypercube_are_fitted_by_lines() -> None:
    points = latin_hypercube({"lr": Range(0.0, 1.0), "wd": Range(0.0, 1.0)}, 8, seed=0)
    draw = random.Random(1)
    rows = [row(at, seed, 3.0 * float(at["lr"]) + draw.gauss(0, 0.05)) for at in points for seed in range(2)]
    found = analysed(rows)
    assert [(term.name, term.df) for term in found.terms] == [("lr", 1), ("wd", 1), ("lr × wd", 1)]
    assert [term.name for term in found.terms if term.found] == ["lr"]
    assert any("a straight line" in note for note in found.notes)
    lines = [line for line in found.levels if line.factor == "lr"]
    span = float(lines[-1].level) - float(lines[0].level)
    assert lines[-1].against_first == pytest.approx(3.0 * span, rel=0.1)


def test_times_are_analysed_as_ratios_whatever_their_unit() -> None:
    draw = random.Random(5)
    rows = [
        make_row(f"{a}", seed, levels={"a": a}, seconds=math.exp(math.log(a) + seed + draw.gauss(0, 0.01)))
        for a in (1, 2, 8)
        for seed in range(4)
    ]
    found = analysed(rows, "seconds", ratio=True)
    hours = analysed([r | {"seconds": r["seconds"] / 3600} for r in rows], "seconds", ratio=True)
    assert [line.against_first for line in found.levels[1:]] == pytest.approx([2, 8], rel=0.02)
    assert [term.f for term in found.terms] == pytest.approx([term.f for term in hours.terms])
    assert found.levels[0].mean.mean == pytest.approx(3600 * hours.levels[0].mean.mean)


def test_levels_come_in_the_order_of_the_study_not_of_the_runs() -> None:
    rows = graft_rows()[::-1]
    assert [line.level for line in analysed(rows).levels] == ["8500", "8700", "8900", "9100"]
    asked = analysed(rows, factors={"pressure": [8900, 8500, 8700, 9100]})
    assert [line.level for line in asked.levels] == ["8900", "8500", "8700", "9100"]


def test_an_interaction_is_told_with_a_warning_and_nothing_as_nothing() -> None:
    found = analysed(battery_rows())
    assert "material × degrees matters (Holm p = 0.019)" in tell(found) and "read the cells" in tell(found)
    quiet = analysed(factorial_rows(lambda a, b: 0.0, {"a": [1, 2], "b": [1, 2]}, 4, key=2))
    assert tell(quiet) == "yield: no effect that we can detect of a, b and a × b."


def test_a_response_may_be_a_metric_a_field_or_lie_inside_one() -> None:
    one = make_row("solo", 0, seconds=8.0, final=0.9, setup_s=1.5)
    names = ["accuracy", "final accuracy", "seconds", "setup_s", "step_ms.p50", "wait_share", "no.such"]
    assert [response_of(one, name) for name in names] == [0.9, 0.9, 8.0, 1.5, 1.0, 0.0, None]
    assert response_of(one, "seconds to target", one["history"][2]["accuracy"]) == pytest.approx(3.0)
    assert response_of(one, "seconds to target") is None
    assert [is_ratio(name) for name in names] == [False, False, True, True, True, False, False]


CLEAN = {"a": ["x", "y"], "b": [1, 2, 3]}


def clean(seeds: int = 8, key: int = 1) -> list[Row]:
    return factorial_rows(lambda a, b: float(a == "y"), CLEAN, seeds, key=key)


def shifted(rows: list[Row], by: Callable[[int, Row], float]) -> list[Row]:
    return [r | {"metrics": {"yield": r["metrics"]["yield"] + by(k, r)}} for k, r in enumerate(rows)]


def failures(rows: list[Row], **options: Any) -> list[str]:
    return [check.name for check in checks(analysed(rows), **options).checks if check.failed]


def test_residuals_that_are_as_assumed_pass_and_need_no_ranks() -> None:
    rows = clean()
    random.Random(1).shuffle(rows)
    found = checks(analysed(rows))
    assert found.passed and found.ranks == () and tell_checks(found) == "yield: no sign against the assumptions."
    assert [check.p is not None for check in found.checks] == [True] * 4


def test_a_drift_along_the_runs_is_seen_in_the_order_they_were_made() -> None:
    rows = clean()
    order = [(r["cell"], r["seed"]) for r in rows]
    random.Random(0).shuffle(order)
    place = {run: k for k, run in enumerate(order)}
    drifting = shifted(rows, lambda _, r: 0.05 * place[r["cell"], r["seed"]])
    assert "no drift" in failures(drifting, order=order)
    assert "no drift" not in failures(rows, order=order)


def test_a_drift_is_tested_as_statsmodels_tests_a_covariate() -> None:
    import pandas

    rows = graft_rows()
    order = [(r["cell"], r["seed"]) for r in rows]
    random.Random(1).shuffle(order)
    facts = [
        {
            "p": str(r["levels"]["pressure"]),
            "s": str(r["seed"]),
            "y": r["metrics"]["yield"],
            "place": order.index((r["cell"], r["seed"])),
        }
        for r in rows
    ]
    wanted = ols("y ~ C(p) + C(s) + place", pandas.DataFrame(facts)).fit().pvalues["place"]
    (check,) = [check for check in checks(analysed(rows), order).checks if check.name == "no drift"]
    assert check.p == pytest.approx(wanted)


def test_an_order_that_is_the_same_with_every_seed_cannot_show_a_drift() -> None:
    (check,) = [check for check in checks(analysed(clean())).checks if check.name == "no drift"]
    assert check.p is None and "would pass for an effect" in check.said


def test_a_run_far_off_is_named_and_kept() -> None:
    rows = shifted(clean(), lambda k, _: 4.0 * (k == 7))
    found = analysed(rows)
    (check,) = [check for check in checks(found).checks if check.name == "no outlier"]
    assert check.failed and check.said.startswith(f"{rows[7]['cell']}, seed {rows[7]['seed']}, lies ")
    assert found.runs == len(rows)


def test_a_studentized_residual_is_that_of_statsmodels() -> None:
    import pandas

    rows = shifted(graft_rows(), lambda k, _: 8.0 * (k == 5))
    facts = pandas.DataFrame([{"p": r["levels"]["pressure"], "s": r["seed"], "y": r["metrics"]["yield"]} for r in rows])
    fit = ols("y ~ C(p) + C(s)", facts).fit()
    wanted, found = fit.get_influence().resid_studentized_external, analysed(rows)
    assert [fit.studentized for fit in found.fits] == pytest.approx(list(wanted))
    (check,) = [check for check in checks(found).checks if check.name == "no outlier"]
    assert check.p == pytest.approx(fit.outlier_test()["bonf(p)"].min()) and check.p < 1


def test_cells_of_unequal_spread_fail_and_the_widest_is_named() -> None:
    draw = random.Random(4)
    rows = shifted(clean(12), lambda _, r: draw.gauss(0, 3) if r["levels"] == {"a": "y", "b": 3} else 0.0)
    found = checks(analysed(rows))
    (check,) = [check for check in found.checks if check.name == "equal spread"]
    assert check.failed and "most of all a=y, b=3" in check.said


def test_of_equal_spreads_the_first_is_named_whatever_the_rounding() -> None:
    draws = {seed: random.Random(seed).gauss(0, 3) for seed in range(12)}
    wide = ({"a": "y", "b": 1}, {"a": "y", "b": 3})  # one goes up where the other goes down
    for rounding in (1 - 1e-12, 1 + 1e-12):
        moves = (draws, {seed: -draw * rounding for seed, draw in draws.items()})
        rows = shifted(
            factorial_rows(lambda a, b: float(a == "y"), CLEAN, 12, noise=0.0),
            lambda _, r, moves=moves: sum(moves[i][r["seed"]] for i in (0, 1) if r["levels"] == wide[i]),
        )
        found = {check.name: check for check in checks(analysed(rows)).checks}
        assert "most of all a=y, b=1 (1 more tied): rely on" in found["equal spread"].said


def test_the_deviation_that_is_zero_of_necessity_is_not_counted() -> None:
    assert _deviations([1, 2, 4, 8, 16]) == [2, 3, 4, 12]
    assert _deviations([1, 2, 4, 8]) == pytest.approx([math.sqrt(2), 2, 5])


def test_skewed_residuals_fail_and_ranks_stand_beside() -> None:
    draw = random.Random(9)
    rows = shifted(clean(10), lambda _k, _r: math.exp(1.5 * draw.gauss(0, 1)))
    found = checks(analysed(rows))
    assert any(check.name == "normal" and check.failed for check in found.checks)
    assert [line.what for line in found.ranks] == ["all cells", "a", "b"]
    assert tell_checks(found).startswith("yield: Residuals are not normal")


def test_two_cells_in_blocks_are_not_said_to_have_equal_spread() -> None:
    rows = [r for r in graft_rows() if r["levels"]["pressure"] in (8500, 8900)]
    (check,) = [check for check in checks(analysed(rows)).checks if check.name == "equal spread"]
    assert check.p is None and not check.failed


def test_ranks_are_friedmans_and_wilcoxons_within_seeds() -> None:
    overall, pressure = None, None
    for line in by_ranks(analysed(graft_rows())):
        overall, pressure = (line, pressure) if line.what == "all cells" else (overall, line)
    wanted = stats.friedmanchisquare(*GRAFTS.values()).pvalue
    assert overall is not None and pressure is not None
    assert overall.p == pressure.p == pytest.approx(wanted) and overall.test == "Friedman"
    assert wanted > 0.05 and not overall.agrees and overall.said == "something else than the analysis"
    (two,) = by_ranks(analysed([r for r in graft_rows() if r["levels"]["pressure"] in (8500, 9100)]))
    assert two.p == pytest.approx(stats.wilcoxon(GRAFTS[8500], GRAFTS[9100]).pvalue)
    assert two.smallest_p == pytest.approx(stats.wilcoxon([1, 2, 3, 4, 5, 6.5]).pvalue)


def test_too_few_seeds_for_ranks_are_not_taken_for_a_second_opinion() -> None:
    rows = [r for r in graft_rows() if r["levels"]["pressure"] in (8500, 9100) and r["seed"] < 5]
    (line,) = by_ranks(analysed(rows))
    assert line.smallest_p == pytest.approx(0.0625) and line.said == "5 seeds are too few for ranks to say anything"


def test_seeds_with_a_missing_run_are_not_ranked() -> None:
    (line, *_) = by_ranks(analysed(graft_rows()[1:]))
    assert line.seeds == 5


def test_the_section_of_a_report_shows_terms_levels_and_checks() -> None:
    rows = shifted(battery_rows(), lambda k, _: 2000.0 * (k == 3))
    hostile = [r | {"levels": {"<b>": r["levels"]["material"], "degrees": r["levels"]["degrees"]}} for r in rows]
    found = analyse(hostile, ["yield", "seconds", "absent"])
    assert [one.anova.response for one in found] == ["yield", "seconds"]
    macros: Any = _environment().get_template("factors.html.j2").module
    page = str(macros.show_factors(found))
    assert "&lt;b&gt; × degrees" in page and "<b>" not in page
    assert re.search(r"<th scope=\"row\">residual</th><td class=\"n\">27</td>", page)
    assert "lies" in page and "exactly none" in page
    json.dumps([one.anova.to_dict() for one in found] + [one.checks.to_dict() for one in found])


@pytest.mark.slow
def test_lines_through_a_hypercube_are_judged_by_cells_not_by_runs() -> None:
    """Runs of a cell share what a line misses. Counted one by one, they would find factors that do nothing."""
    draw, wrong, repetitions = random.Random(7), 0, 40
    for k in range(repetitions):
        points = latin_hypercube({"lr": Range(0.01, 0.5, log=True), "wd": Range(0.0, 1.0)}, 16, seed=k)
        rows = [row(at, seed, float(at["lr"]) ** 0.5 + draw.gauss(0, 0.002)) for at in points for seed in range(4)]
        found = analysed(rows)
        assert found.residual_df == 16 - 1 - len(found.terms)
        wrong += any(term.found for term in found.terms if term.name != "lr")
    assert wrong <= 6, "a twentieth is allowed"


def test_an_empty_combination_leaves_the_rest_of_an_interaction_in_the_model() -> None:
    draw = random.Random(5)
    rows = []
    for seed in range(5):
        for i, j in product(range(3), range(3)):
            if (i, j) != (2, 2):
                rows.append(row({"a": i, "b": j}, seed, 0.02 * (i - 1) * (j - 1) + draw.gauss(0, 0.002)))
    found = analysed(rows)
    both = next(term for term in found.terms if term.name == "a × b")
    assert (both.df, found.residual_df) == (3, 40 - 8 - 4) and both.found
    assert any("3 of its 4 degrees of freedom" in note for note in found.notes)


@pytest.mark.slow
def test_copies_of_runs_prove_no_more_than_the_runs() -> None:
    """A synchronous strategy learns the same on every link: two links are no second observation."""
    draw, wrong, repetitions = random.Random(11), 0, 60
    for _ in range(repetitions):
        values = {(a, seed): draw.gauss(0, 1) for a in "xyz" for seed in range(4)}
        rows = [row({"a": a, "link": link}, seed, x) for (a, seed), x in values.items() for link in ("slow", "fast")]
        found = analysed(rows)
        assert {t.name: t.exact for t in found.terms} == {"a": None, "link": False, "a × link": False}
        assert found.terms[0].error_df == 2 * 3
        wrong += found.terms[0].found
    assert wrong <= 9, "a twentieth is allowed; one residual for all terms claims it in a fifth of the studies"


def test_with_blocks_a_term_is_tested_against_itself_from_seed_to_seed() -> None:
    """Two levels: the F of a factor is the square of the paired t of its means by seed."""
    rows = factorial_rows(lambda a, b: 0.2 * a, {"a": [0, 1], "b": [0, 1, 2]}, 5)
    found = analysed(rows)
    sides = [
        [
            statistics.fmean(r["metrics"]["yield"] for r in rows if r["levels"]["a"] == a and r["seed"] == s)
            for s in range(5)
        ]
        for a in (0, 1)
    ]
    t = stats.ttest_rel(sides[1], sides[0])
    term = found.terms[0]
    assert term.f == pytest.approx(t.statistic**2) and term.p == pytest.approx(t.pvalue) and term.error_df == 4
    ends = t.confidence_interval()
    line = next(one for one in found.levels if one.factor == "a" and one.against_first is not None)
    assert (line.low, line.high) == (pytest.approx(ends.low), pytest.approx(ends.high))
