"""What a run came to, from hand-written records."""

from __future__ import annotations

import math
from typing import Any

import pytest

from podium.measure.summary import staleness, summarise

S = 1_000_000_000


def row(kind: str, rank: int, seconds: float, **fields: Any) -> dict[str, Any]:
    return {"kind": kind, "rank": rank, "t_ns": round(seconds * S), **fields}


def step(rank: int, seconds: float, took: float, waited: float = 0.0, **fields: Any) -> dict[str, Any]:
    return row("step", rank, seconds, step_ns=round(took * S), wait_ns=round(waited * S), **fields)


def end(rank: int, seconds: float, **fields: Any) -> dict[str, Any]:
    return row("end", rank, seconds, **{"param_hash": f"h{rank}", "steps": 3, "position": 60, "sent": 100, **fields})


SYNCHRONOUS = [
    row("begin", 0, 1.0, role="worker", position=0),
    row("begin", 1, 1.5, role="worker", position=0),
    step(0, 3.0, 2.0, 0.5),
    step(1, 3.0, 2.0, 1.5),
    row("eval", 0, 4.0, step=1, epoch=0.5, position=20, loss=2.0, metrics={"accuracy": 0.5}, eval_ns=1 * S),
    step(0, 6.0, 2.0, 0.0),
    step(1, 6.0, 2.0, 0.0),
    row("lost", -1, 6.5, lost=1, cause="killed"),
    row("eval", 0, 7.0, step=2, epoch=1.0, position=40, loss=1.0, metrics={"accuracy": 0.75}, eval_ns=1 * S),
    end(0, 7.0, position=40, steps=2),
]


def test_a_synchronous_run() -> None:
    found = summarise(SYNCHRONOUS)
    assert found["loss"] == 1.0
    assert found["metrics"] == {"accuracy": 0.75}
    assert found["param_hash"] == {"0": "h0"}
    assert (found["steps"], found["samples"], found["epochs"]) == (2, 40, 1.0)
    assert found["seconds"] == 4.0  # from 1 to 6, less the validation in between
    assert found["samples_per_s"] == 10.0
    assert found["step_ms"] == {"p50": 2000.0, "p90": 2000.0}
    assert found["wait_share"] == 0.25
    assert found["lost"] == [1]
    assert found["staleness"] == {}
    assert found["sent_bytes"] == 100


def test_history_leaves_validation_out_of_the_time() -> None:
    assert [(h["step"], h["seconds"], h["loss"], h["accuracy"]) for h in summarise(SYNCHRONOUS)["history"]] == [
        (1, 2.0, 2.0, 0.5),
        (2, 4.0, 1.0, 0.75),
    ]


def test_an_asynchronous_run_counts_all_pushes_and_validation_time() -> None:
    records = [
        *SYNCHRONOUS,
        *(row("update", 2, 2.0 + n, worker=n % 2, staleness=1, version=n) for n in range(4)),
        end(1, 7.0, steps=3, position=40),
        row("end", 2, 8.0, updates=4, sent=50),
    ]
    found = summarise(records)
    assert found["steps"] == 2 + 3
    assert found["seconds"] == 5.0
    assert found["staleness"] == {"mean": 1.0, "max": 1.0, "count": 2.0}
    assert found["sent_bytes"] == 250
    assert set(found["param_hash"]) == {"0", "1"}


def test_a_resumed_run_counts_its_own_samples() -> None:
    records = [row("begin", 0, 0.0, role="worker", position=24), step(0, 2.0, 2.0), end(0, 2.0, position=60)]
    assert summarise(records)["samples"] == 36


def test_a_run_that_never_came_to_a_step_has_a_summary_too() -> None:
    found = summarise([row("begin", 0, 1.0, role="worker", position=0), row("failed", -1, 2.0)])
    assert math.isnan(found["loss"])
    assert (found["steps"], found["samples"], found["seconds"], found["samples_per_s"]) == (0, 0, 0.0, 0.0)
    assert found["history"] == []
    assert summarise([])["steps"] == 0


def test_first_pushes_are_left_out_per_worker_and_server() -> None:
    rows = [(4, 0, 0), (5, 0, 9), (4, 1, 1), (4, 0, 2), (5, 0, 4)]
    found = staleness([{"rank": rank, "worker": worker, "staleness": s} for rank, worker, s in rows])
    assert found == {"mean": pytest.approx(3.0), "max": 4.0, "count": 2.0}
    assert staleness([]) == {}
