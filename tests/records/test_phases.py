"""What the records say of phases: from real runs in virtual time, and from constructed records where runs are rare."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.records.phases import COST, MOST_READINGS, other_rules, switches
from podium.records.recorder import Record
from podium.strategies import make_strategy
from podium.testing.toys import BATCH, SAMPLES, toy, train_in
from podium.testing.worlds import Virtual

PER_EPOCH = -(-SAMPLES // BATCH)


def records_of(run: str, workers: int = 2, epochs: int = 8, **options: Any) -> list[Record]:
    """The workers' records of a run with phases, in order of time."""
    strategy = make_strategy("phases", {"run": run, **options}, workers)
    trained = train_in(Virtual(), toy(epochs=epochs), strategy, workers)
    return sorted((row for one in trained for row in one.records), key=lambda row: (row["t_ns"], row["rank"]))


def told(run: str, **options: Any) -> tuple[list[dict[str, Any]], dict[tuple[str, bool], dict[str, Any]]]:
    rows = records_of(run, **options)
    return switches(rows, 0), {(rule["rule"], rule["in_force"]): rule for rule in other_rules(rows, 0)}


# Real runs.


def test_a_switch_at_a_known_place_is_there_and_its_rule_is_told_though_nobody_evaluated_it() -> None:
    (switch,), rules = told("all-reduce until epoch:at=2 | parameter-server:mode=async")
    assert (switch["step"], switch["epoch"], switch["position"]) == (2 * PER_EPOCH, 2.0, 2 * SAMPLES)
    assert switch["before"] == "all-reduce until epoch:at=2" and switch["after"] == "parameter-server:mode=async"
    assert switch["value"] is None and switch["seconds"] > 0
    assert set(switch["cost_ms"]) == {*COST, "total"} and switch["cost_ms"]["begin"] > 0
    own = rules["epoch:at=2.0", True]
    assert (own["step"], own["epoch"], own["readings"]) == (2 * PER_EPOCH, 2.0, [])


def test_others_are_told_in_order_of_firing_and_marked_where_the_run_was_no_longer_theirs() -> None:
    rows = records_of("all-reduce until epoch:at=2 | parameter-server:mode=async")
    shares = [rule for rule in other_rules(rows, 0) if rule["rule"].startswith("share")]
    assert [rule["rule"] for rule in shares] == ["share:at=0.0625", "share:at=0.125", "share:at=0.5"]
    assert [rule["after_switch"] for rule in shares] == [False, False, True]
    assert [rule["step"] for rule in shares[:2]] == [2, 4]
    assert not any("readings" in rule for rule in shares)


def test_a_rule_that_fires_is_told_with_its_value_and_all_its_readings() -> None:
    (switch,), rules = told("all-reduce until plateau:window=2;threshold=9;latest=0.9 | all-reduce:overlap=false")
    own = rules["plateau:window=2;threshold=9.0;latest=0.9", True]
    assert own["step"] == 2 * PER_EPOCH and switch["step"] == own["step"] + 1, "it is heard with the next step"
    assert switch["value"] == own["value"] < own["threshold"] == 9
    assert switch["why"].startswith("training loss settled")
    assert [reading["epoch"] for reading in own["readings"]] == [1.0, 2.0]
    assert [reading["value"] is None for reading in own["readings"]] == [True, False]


def test_a_rule_that_never_fires_has_readings_and_no_step() -> None:
    (switch,), rules = told("all-reduce until plateau:window=2;threshold=0;latest=0.5 | all-reduce:overlap=false")
    own = rules["plateau:window=2;threshold=0.0;latest=0.5", True]
    assert own["step"] is None and own["seconds"] is None and len(own["readings"]) == 4
    assert switch["epoch"] == 4.0 and switch["value"] is None and "has not fired" in switch["why"]


def test_a_run_that_goes_to_and_fro_has_a_switch_for_each() -> None:
    run = "all-reduce until epoch:after=1 | parameter-server:mode=async until epoch:after=1"
    changes, rules = told(run, epochs=4, repeat=True)
    assert [switch["epoch"] for switch in changes] == [1.0, 2.0, 3.0]
    assert [switch["after"].partition(" ")[0] for switch in changes] == [
        "parameter-server:mode=async",
        "all-reduce",
        "parameter-server:mode=async",
    ]
    assert [switch["seconds"] for switch in changes] == sorted(switch["seconds"] for switch in changes)
    assert rules["epoch:after=1.0", True]["epoch"] == 1.0, "the first time"


def test_a_run_without_phases_has_neither() -> None:
    trained = train_in(Virtual(), toy(), make_strategy("all-reduce", {}, 2), 2)
    assert switches(trained[0].records, 0) == [] and other_rules(trained[0].records, 0) == []


# Constructed records.


def switch_row(rank: int = 0, t: int = 100, *, position: int = 64, value: float | None = None, **fields: Any) -> Record:
    facts = {"before": "a until r", "after": "b", "rule": "r", "why": "it fired", "step": 1, "epoch": 1.0}
    costs = {f"{part}_ns": 1_000_000 for part in COST}
    return {"kind": "switch", "rank": rank, "t_ns": t, "position": position, "value": value, **facts, **costs, **fields}


def trigger_row(t: int, *, fires: bool = False, in_force: bool = True, phase: int = 0, **fields: Any) -> Record:
    facts = {"rule": "r", "value": 0.5, "threshold": 0.1, "why": "settled", "step": t, "epoch": t / 10, "position": t}
    return {
        **{"kind": "trigger", "rank": 0, "t_ns": t, "in_force": in_force, "phase": phase, "fires": fires},
        **facts,
        **fields,
    }


Costs = st.lists(st.lists(st.integers(0, 10**9), min_size=4, max_size=4), min_size=1, max_size=5)


@given(costs=Costs, judge=st.integers(0, 4), draw=st.randoms(use_true_random=False))
def test_one_switch_is_told_whatever_the_number_of_workers_and_the_order_of_their_records(
    costs: list[list[int]], judge: int, draw: Any
) -> None:
    rows = [
        switch_row(rank, 100 + rank, value=0.25 if rank == judge else None)
        | {f"{part}_ns": ns for part, ns in zip(COST, parts, strict=True)}
        for rank, parts in enumerate(costs)
    ]
    draw.shuffle(rows)
    (told_of,) = switches(rows, 0)
    cost = dict(told_of["cost_ms"])
    total = cost.pop("total")
    assert max(cost.values()) - 1e-9 <= total <= sum(cost.values()) + 1e-9
    assert total == pytest.approx(max(sum(parts) for parts in costs) / 1e6)
    assert told_of["value"] == (0.25 if judge < len(costs) else None), "who judged knows the value"


def test_a_loss_in_the_midst_of_a_switch_does_not_make_two_of_it() -> None:
    rows = [switch_row(0, 100), switch_row(0, 160), switch_row(1, 161)]
    (told_of,) = switches(rows, 0)
    assert told_of["seconds"] == pytest.approx(161e-9)


def test_validations_that_all_waited_for_are_no_training_time() -> None:
    evals = [{"kind": "eval", "rank": 0, "t_ns": t, "eval_ns": 20, "waited": w} for t, w in ((50, True), (60, False))]
    (told_of,) = switches([*evals, switch_row(t=100)], 10)
    assert told_of["seconds"] == pytest.approx(70e-9)
    (rule,) = other_rules([*evals, trigger_row(55, fires=True, in_force=False)], 10)
    assert rule["seconds"] == pytest.approx(25e-9)


def test_of_a_lost_judge_the_reading_tells_why() -> None:
    heard = [trigger_row(40), trigger_row(60, fires=True), switch_row(1, 100, why="another said so")]
    (told_of,) = switches(heard, 0)
    assert (told_of["why"], told_of["value"]) == ("settled", 0.5)


@pytest.mark.parametrize(
    "rows",
    [
        [trigger_row(60), switch_row(1, 100)],  # it did not fire
        [trigger_row(60, fires=True), trigger_row(80, rank=1), switch_row(1, 100)],  # nobody heard of it
        [trigger_row(60, fires=True), switch_row(0, 100), switch_row(1, 101)],  # it is there to tell
        [trigger_row(30, fires=True), switch_row(1, 40, position=32, after="c"), switch_row(1, 100)],  # of before
    ],
)
def test_a_reading_that_did_not_end_the_phase_is_not_its_reason(rows: list[Record]) -> None:
    assert switches(rows, 0)[-1]["why"] == "it fired" and switches(rows, 0)[-1]["value"] is None


def test_a_firing_that_died_with_its_judge_does_not_count_where_the_next_one_fired_again() -> None:
    rows = [trigger_row(20, fires=True), trigger_row(30, fires=True, rank=1), trigger_row(90, fires=True, phase=2)]
    (rule,) = other_rules(rows, 0)
    assert rule["step"] == 30
    watched = [{**row, "in_force": False} for row in rows]
    assert other_rules(watched, 0)[0]["step"] == 20


def test_a_reading_that_was_repeated_counts_once() -> None:
    rows = [trigger_row(10), trigger_row(20), trigger_row(25, rank=1, position=20, value=0.7), trigger_row(30, rank=1)]
    (rule,) = other_rules(rows, 0)
    assert [reading["value"] for reading in rule["readings"]] == [0.5, 0.7, 0.5]


def test_the_same_rule_in_force_and_watched_has_a_row_for_each() -> None:
    rows = [trigger_row(10), trigger_row(50, fires=True, in_force=False, phase=1)]
    own, other = other_rules(rows, 0)
    assert (own["in_force"], own["step"], own["after_switch"]) == (True, None, False)
    assert (other["in_force"], other["step"], other["after_switch"]) == (False, 50, True)


@given(count=st.integers(1, 5 * MOST_READINGS), fired=st.integers(0, 5 * MOST_READINGS))
def test_thinned_readings_keep_both_ends_and_the_firing(count: int, fired: int) -> None:
    (rule,) = other_rules([trigger_row(t, fires=t == fired) for t in range(count)], 0)
    steps = [reading["step"] for reading in rule["readings"]]
    assert len(steps) <= MOST_READINGS + 2 and (steps[0], steps[-1]) == (0, count - 1)
    assert steps == sorted(set(steps)) and (fired in steps) == (fired < count)
