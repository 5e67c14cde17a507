"""What a run came to, from hand-written records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from podium.records.summary import staleness, summarise

S = 1_000_000_000


def row(kind: str, rank: int, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "t_ns": round(seconds * S), **fields}


def step(rank: int, seconds: float, took: float, waited: float = 0.0, **fields: Any) -> dict[str, Any]:
    times = {"step_ns": round(took * S), "wait_ns": round(waited * S)}
    return row("step", rank, seconds, **times, **{"sent": 30, **fields})


def end(rank: int, seconds: float, **fields: Any) -> dict[str, Any]:
    return row("end", rank, seconds, **{"param_hash": f"h{rank}", "steps": 3, "position": 60, "sent": 100, **fields})


def validation(rank: int, seconds: float, position: int, loss: float) -> dict[str, Any]:
    """Of 40 samples in steps of 20."""
    facts = {"step": position // 20, "epoch": position / 40, "position": position, "loss": loss}
    return row("eval", rank, seconds, **facts, metrics={"accuracy": 1 - loss}, eval_ns=1 * S)


def update(rank: int, worker: int, staleness: int, *, first: bool = False) -> dict[str, Any]:
    return row("update", rank, 2.0, worker=worker, staleness=staleness, first=first)


SYNCHRONOUS = [
    row("begin", 0, 1.0, role="worker", position=0),
    row("begin", 1, 1.5, role="worker", position=0),
    step(0, 3.0, 2.0, 0.5),
    step(1, 3.0, 2.0, 1.5),
    validation(0, 4.0, 20, 0.5),
    step(0, 6.0, 2.0, 0.0),
    step(1, 6.0, 2.0, 0.0),
    row("lost", -1, 6.5, lost=1, cause="killed"),
    validation(0, 7.0, 40, 0.25),
    end(0, 7.0, position=40, steps=2),
]


def test_a_synchronous_run() -> None:
    found = summarise(SYNCHRONOUS)
    assert found["loss"] == 0.25
    assert found["metrics"] == {"accuracy": 0.75}
    assert found["param_hash"] == {"0": "h0"}
    assert (found["steps"], found["samples"], found["epochs"], found["updates"]) == (2, 40, 1.0, 0)
    assert found["seconds"] == 4.0  # from 1 to 6, less the validation in between
    assert found["samples_per_s"] == 10.0
    assert found["step_ms"] == {"p50": 2000.0, "p90": 2000.0}
    assert found["wait_share"] == 0.25
    assert found["lost"] == [1]
    assert found["staleness"] == {}
    assert (found["histogram"], found["dropped"], found["restored"]) == ([], 0, [])
    assert found["sent_bytes"] == 100 + 2 * 30, "the lost rank sent something too, as its steps say"


def test_history_leaves_validation_out_of_the_time() -> None:
    assert [(h["step"], h["seconds"], h["loss"], h["accuracy"]) for h in summarise(SYNCHRONOUS)["history"]] == [
        (1, 2.0, 0.5, 0.5),
        (2, 4.0, 0.25, 0.75),
    ]


def test_a_validation_that_was_done_again_after_a_loss_is_one_row_of_history() -> None:
    records = [*SYNCHRONOUS[:5], validation(1, 6.0, 20, 0.125), *SYNCHRONOUS[5:]]
    assert [(h["step"], h["seconds"], h["loss"]) for h in summarise(records)["history"]] == [
        (1, 3.0, 0.125),
        (2, 3.0, 0.25),
    ]


def test_an_asynchronous_run_counts_the_pushes_of_one_server_and_validation_time() -> None:
    records = [
        *SYNCHRONOUS,
        *(update(server, n % 2, 1, first=n < 2) for n in range(4) for server in (2, 3)),
        end(1, 7.0, steps=3, position=40),
        row("end", 2, 8.0, updates=4, sent=50),
    ]
    found = summarise(records)
    assert (found["steps"], found["updates"]) == (2, 4)
    assert found["seconds"] == 5.0
    assert found["staleness"] == {"mean": 1.0, "max": 1.0, "count": 4.0}
    assert found["histogram"] == [[1, 1, 4]]
    assert found["sent_bytes"] == 250
    assert set(found["param_hash"]) == {"0", "1"}


def test_a_resumed_run_counts_its_own_samples_and_all_steps() -> None:
    """Whatever its workers say of theirs: they went on from the checkpoint's count, which is one worker's."""
    begin = row("begin", 0, 0.0, role="worker", position=24)
    found = summarise([begin, step(0, 2.0, 2.0), validation(0, 3.0, 60, 1.0), end(0, 3.0, position=60, steps=50)])
    assert (found["samples"], found["steps"], found["epochs"]) == (36, 3, 1.5)


def test_a_run_that_never_came_to_a_step_has_a_summary_too() -> None:
    found = summarise([row("begin", 0, 1.0, role="worker", position=0), row("failed", -1, 2.0)])
    assert math.isnan(found["loss"])
    assert (found["steps"], found["samples"], found["seconds"], found["samples_per_s"]) == (0, 0, 0.0, 0.0)
    assert found["history"] == []
    assert summarise([])["steps"] == 0


def test_first_pushes_are_left_out_of_staleness() -> None:
    firsts = [update(4, 0, 0, first=True), update(5, 0, 9, first=True), update(4, 1, 1, first=True)]
    found = staleness([*firsts, update(4, 0, 2), update(5, 0, 4)])
    assert found == {"mean": pytest.approx(3.0), "max": 4.0, "count": 2.0}
    assert staleness(firsts) == staleness([]) == {}
