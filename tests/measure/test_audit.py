"""The audit: was every sample used once, by the records alone."""

from __future__ import annotations

from typing import Any

from podium.measure.audit import audit
from podium.strategies import make_strategy
from tests.toys import SAMPLES, toy, train

BEGIN = [{"kind": "begin", "rank": rank, "role": "worker", "position": 0} for rank in (0, 1)]
END = [{"kind": "end", "rank": rank, "position": 20, "param_hash": "x"} for rank in (0, 1)]


def step(rank: int, first: int, samples: int = 5) -> dict[str, Any]:
    return {"kind": "step", "rank": rank, "first": first, "samples": samples}


def test_all_is_well_where_steps_tile_the_order() -> None:
    steps = [step(0, 0), step(1, 5), step(1, 10), step(0, 15)]
    assert audit([*BEGIN, *steps, *END]) == (0, 0)


def test_what_is_missing_or_done_twice_is_counted() -> None:
    assert audit([*BEGIN, step(0, 0), step(1, 10), step(0, 15), *END]) == (5, 0)
    assert audit([*BEGIN, step(0, 0, 10), step(1, 5), step(1, 10), step(0, 15), *END]) == (0, 5)
    assert audit([*BEGIN, step(0, 0), *END]) == (15, 0)


def test_a_round_that_was_undone_did_not_count() -> None:
    undone = {"kind": "undone", "rank": 0, "steps": 1, "step": 1, "position": 5}
    steps = [step(0, 0), step(0, 5), undone, step(0, 5, 15)]
    assert audit([*BEGIN, *steps, *END]) == (0, 0)


def test_a_killed_worker_cannot_say_that_its_part_was_undone() -> None:
    undone = {"kind": "undone", "rank": 0, "steps": 1, "step": 1, "position": 10}
    lost = {"kind": "lost", "rank": -1, "lost": 1}
    steps = [step(0, 0), step(1, 5), step(1, 15), step(0, 10), lost, undone, step(0, 10, 10)]
    assert audit([*BEGIN, *steps, END[0]]) == (0, 0)


def test_a_lease_that_was_lent_again_counts_once() -> None:
    lost = {"kind": "lost", "rank": -1, "lost": 1}
    assert audit([*BEGIN, step(0, 0), step(1, 5), lost, step(0, 5), step(0, 10, 10), END[0]]) == (0, 0)


def test_a_push_that_was_dropped_many_times_is_taken_out_as_often() -> None:
    dropped = [{"kind": "dropped", "rank": server, "worker": 1, "lease": 5, "staleness": 9} for server in (2, 3, 2, 3)]
    steps = [step(0, 0), step(1, 5), step(1, 5), step(1, 5), step(1, 10, 10)]
    assert audit([*BEGIN, *steps, *dropped, *END]) == (0, 0)


def test_records_that_do_not_say_cannot_be_audited() -> None:
    assert audit([*BEGIN, {"kind": "step", "rank": 0, "samples": 5}, *END]) is None


def test_a_real_run_that_loses_a_step_would_be_found_out() -> None:
    run = "all-reduce until step:at=3 | parameter-server:mode=async"
    trained = train(toy(), make_strategy("phases", {"run": run}, 3), 3)
    rows = [row for one in trained for row in one.records]
    assert audit(rows) == (0, 0)
    without = [row for row in rows if not (row["kind"] == "step" and row["rank"] == 1 and row["step"] == 2)]
    missing, repeated = audit(without) or (0, 0)
    assert 0 < missing < SAMPLES
    assert repeated == 0
