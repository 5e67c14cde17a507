"""The same runs on equal terms: budgets, validations that count, and what is said where there are none."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from scipy import stats

from podium.lab.report.report import _environment
from podium.lab.report.views import View, views
from podium.lab.study.store import Row
from tests.lab.synthetic import failed_row, make_row


def course(cell: str, seed: int, points: list[tuple[float, float, float]], **fields: Any) -> Row:
    """A run whose validations are (samples, seconds, accuracy)."""
    history = [{"samples": s, "seconds": t, "accuracy": a, "epoch": k} for k, (s, t, a) in enumerate(points)]
    samples, seconds, final = points[-1]
    whole = {"history": history, "samples": samples, "seconds": seconds, "metrics": {"accuracy": final}}
    return make_row(cell, seed, **{**whole, **fields})


def two_speeds(seeds: int = 4) -> list[Row]:
    """`fast` takes half the time for a sample; at equal samples `slow` is better, at equal seconds `fast` is."""
    draw = random.Random(0)
    rows = []
    for seed in range(seeds):
        shift = draw.gauss(0, 0.2)
        fast = [(100.0 * k, 1.0 * k, 0.5 + 0.05 * k + shift + draw.gauss(0, 0.001)) for k in range(1, 5)]
        slow = [(100.0 * k, 2.0 * k, 0.52 + 0.05 * k + shift + draw.gauss(0, 0.001)) for k in range(1, 5)]
        rows += [course("fast", seed, fast, sent_bytes=8_000_000, nodes=2)]
        rows += [course("slow", seed, slow, sent_bytes=2_000_000, nodes=2)]
    return rows


def named(rows: list[Row], name: str, metric: str = "accuracy") -> View:
    return next(view for view in views(rows, metric) if view.name == name)


def test_equal_samples_and_equal_seconds_may_have_different_winners() -> None:
    samples, seconds = named(two_speeds(), "equal samples"), named(two_speeds(), "equal seconds")
    assert (samples.budget, samples.best) == (400, "slow")
    assert (seconds.budget, seconds.best) == (4.0, "fast")
    assert samples.said.startswith("Equal samples (400 samples): slow has the best accuracy, ")
    assert "better than fast (Holm p < 0.001)" in samples.said


def test_a_budget_is_what_every_run_reached() -> None:
    rows = two_speeds()
    short = [(100.0 * k, 1.0 * k, 0.6) for k in range(1, 3)]
    rows[0] = course("fast", 0, short, nodes=2)
    view = named(rows, "equal samples")
    assert view.budget == 200
    assert all(line.at is not None and line.at.mean == 200 for line in view.standings)


def test_the_last_validation_before_the_budget_counts_and_nothing_is_interpolated() -> None:
    rows = [course("a", 0, [(100, 1.0, 0.5), (300, 3.0, 0.7)]), course("b", 0, [(100, 1.0, 0.4), (250, 2.5, 0.6)])]
    view = named(rows, "equal samples")
    a, b = view.standings
    assert view.budget == 250
    assert a.metric is not None and b.metric is not None and a.at is not None and a.seconds is not None
    assert (a.metric.mean, a.at.mean, a.seconds.mean, b.metric.mean) == (0.5, 100, 1.0, 0.6)
    assert view.best == "b" and "one run each" in view.said


def test_validations_that_are_too_coarse_are_said_instead_of_a_number() -> None:
    rows = two_speeds() + [course("rare", seed, [(900.0, 9.0, 0.99)], sent_bytes=5) for seed in range(4)]
    view = named(rows, "equal samples")
    assert [line.cell for line in view.standings] == ["fast", "slow"]
    assert "validations are too coarse" in view.left_out["rare"] and "Left out: rare" in view.said
    only = named([*two_speeds(1)[:1], course("rare", 0, [(900.0, 9.0, 0.99)])], "equal samples")
    assert only.best is None and "fewer than two strategies have a value" in only.said


def test_a_run_that_diverged_before_the_budget_has_no_earlier_value() -> None:
    rows = two_speeds()
    rows[0]["history"][-1]["accuracy"] = "nan"
    view = named(rows, "equal samples")
    assert view.left_out == {"fast": "its accuracy is not finite there"} and view.best is None


def test_who_sends_nothing_has_no_part_in_equal_bytes_and_is_named() -> None:
    rows = two_speeds() + [course("solo", seed, [(400.0, 4.0, 0.7)], sent_bytes=0, nodes=1) for seed in range(4)]
    view = named(rows, "equal bytes")
    assert view.left_out == {"solo": "it sends nothing"} and view.assumed
    assert (view.budget, view.unit) == (2.0, "MB")
    fast, slow = view.standings
    assert fast.at is not None and fast.at.mean == 2.0, "a quarter of its 8 MB, at a quarter of its samples"
    assert slow.at is not None and slow.at.mean == 2.0


def test_bytes_that_validations_recorded_are_not_assumed() -> None:
    rows = two_speeds()
    for row in rows:
        for point in row["history"]:
            point["sent_bytes"] = 1e6 * point["epoch"] + 5e5
    view = named(rows, "equal bytes")
    assert not view.assumed and view.budget == 3.5


def test_equal_nodes_are_compared_within_their_number() -> None:
    rows = two_speeds() + [course("wide", seed, [(400.0, 1.0, 0.7)], nodes=8) for seed in range(4)]
    two, eight = [view for view in views(rows, "accuracy") if view.name == "equal nodes"]
    assert (two.budget, eight.budget) == (2, 8)
    assert [line.cell for line in two.standings] == ["fast", "slow"]
    (wide,) = eight.standings
    assert wide.node_seconds is not None and wide.node_seconds.mean == 8.0
    assert eight.said == "Equal nodes (8 nodes): nothing to compare with." and eight.contrasts == ()
    assert {c.measure for c in two.contrasts} == {"accuracy", "seconds"}


def test_rows_that_know_no_nodes_are_grouped_by_workers() -> None:
    rows = [make_row(cell, seed) for cell in ("solo", "ring", "tree") for seed in range(2)]
    groups = [view for view in views(rows, "accuracy") if view.name == "equal nodes"]
    assert [(view.budget, len(view.standings)) for view in groups] == [(1, 1), (2, 2)]


def test_runs_are_compared_in_pairs_and_corrected_over_all_pairs() -> None:
    """What a seed does to all runs is two hundred times a run's own noise: unpaired, nothing would be found."""
    rows = two_speeds()
    (contrast,) = [c for c in named(rows, "equal seconds").contrasts if c.measure == "accuracy"]
    at = {"fast": 3, "slow": 1}
    values = {cell: [row["history"][k]["accuracy"] for row in rows if row["cell"] == cell] for cell, k in at.items()}
    assert contrast.p == pytest.approx(stats.ttest_rel(values["fast"], values["slow"]).pvalue)
    assert stats.ttest_ind(values["fast"], values["slow"]).pvalue > 0.05 > (contrast.p or 1.0)
    third = [course("third", r["seed"], [(400.0, 4.0, 0.3 + 0.01 * r["seed"])]) for r in rows if r["cell"] == "fast"]
    view = named([*rows, *third], "equal seconds")
    against = {c.first if c.second == "fast" else c.second: c for c in view.contrasts}
    assert set(against) == {"slow", "third"} and len(view.contrasts) == 2
    smallest = min(against.values(), key=lambda c: c.p or 0.0)
    assert smallest.p_holm == pytest.approx(3 * (smallest.p or 0.0)), "three pairs, of which two are shown"


def test_a_metric_that_is_better_when_lower_has_its_lowest_as_best() -> None:
    rows = [
        make_row(cell, seed, final=value, metric="mae") for cell, value in (("a", 3.0), ("b", 2.0)) for seed in (0, 1)
    ]
    assert named(rows, "equal samples", "mae").best == "b"


def test_equal_results_are_said_to_be_the_same() -> None:
    rows = [make_row(cell, seed) for cell in ("a", "b") for seed in range(3)]
    assert "accuracy is the same for all" in named(rows, "equal samples").said


def test_without_two_strategies_or_validations_there_is_no_view() -> None:
    assert views([make_row("solo", 0), failed_row("ring", 0)], "accuracy") == []
    bare = [make_row(cell, 0, history=[]) for cell in ("a", "b")]
    view = named(bare, "equal samples")
    assert view.budget is None and "fewer than two strategies have validations" in view.said


def test_the_section_of_a_report_shows_every_view() -> None:
    rows = two_speeds() + [course("<i>", seed, [(900.0, 9.0, 0.9)], sent_bytes=5, nodes=3) for seed in range(4)]
    found = views(rows, "accuracy")
    macros: Any = _environment().get_template("views.html.j2").module
    page = str(macros.show_views(found, "accuracy"))
    assert "Equal samples: 400 samples" in page and "node-seconds" in page and "&lt;i&gt;" in page and "<i>" not in page
    assert page.count("<h3>") == len(found) == 5
    json.dumps([view.to_dict() for view in found])


def test_a_strategy_that_cannot_be_tested_is_named_beside_those_that_can() -> None:
    rows = [*two_speeds(), course("once", 0, [(400.0, 4.0, 0.1)], nodes=2)]
    said = named(rows, "equal samples").said
    assert "better than fast (Holm p" in said and said.endswith(
        "; too few runs with the same seed to test it against once."
    )
    other = [*two_speeds(), *(course("other", seed, [(400.0, 4.0, 0.1)], nodes=2) for seed in (8, 9))]
    assert "to test it against other." in named(other, "equal nodes").said


def test_with_a_single_pair_both_are_named_with_their_values() -> None:
    rows = [course("a", 0, [(100, 1.0, 0.5)]), course("b", 0, [(100, 1.0, 0.6)])]
    said = "b has the best accuracy, 0.600; a has 0.500; one run each, so this is no more than one observation."
    assert named(rows, "equal samples").said.endswith(said)
    rows += [course("a", seed, [(100, 1.0, 0.5)]) for seed in (1, 2)]
    said = named(rows, "equal samples").said
    assert "; a has 0.500 ± 0; fewer than two pairs of runs with the same seed, so nothing is tested." in said


def test_equal_results_with_an_untested_one_are_not_the_same_for_all() -> None:
    rows = [make_row(cell, seed) for cell in ("a", "b") for seed in range(3)] + [make_row("c", 7, final=0.1)]
    said = named(rows, "equal samples").said
    assert "no difference that we can detect from b; too few runs with the same seed to test it against c." in said


def test_a_study_may_say_which_way_is_better() -> None:
    assert [
        next(v for v in views(two_speeds(), "accuracy", way) if v.name == "equal samples").best for way in (True, False)
    ] == ["slow", "fast"]
