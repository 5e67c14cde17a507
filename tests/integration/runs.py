"""Runs for these tests, and what their records must say."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import podium
from podium.config import RunResult
from podium.data.order import GlobalOrder
from podium.engine.files import load_tensors
from podium.records.recorder import Record, read_records
from podium.testing.faults import BATCH, EPOCHS, SAMPLES, STEPS, TASK, Faults, Gate

FIELDS: dict[str, Any] = {"heartbeat_s": 5.0, "deadline_s": 20.0, "threads": 1}
"""Patient enough for busy cores. Tests of silence set a shorter heartbeat."""


def train(out: Path, faults: Faults = Faults(), *, task: str = TASK, **options: Any) -> RunResult:  # noqa: B008  # frozen
    """One run of a small task with these faults; the gate is the run's `out` folder."""
    chosen = {"faults": str(faults), "gate": str(out), **options.pop("task_options", {})}
    return podium.train(task, task_options=chosen, **{**FIELDS, "out": out, **options})


def pid_of(rank: int) -> int:
    """The process of a rank of the run that this process has under way."""
    (process,) = [p for p in multiprocessing.active_children() if p.name == f"podium-{rank}"]
    assert process.pid is not None
    return process.pid


def at_gate(folder: Path, act: Callable[[], None]) -> threading.Thread:
    """Do this once a rank of the run under way has come to the gate."""

    def body() -> None:
        Gate(folder).wait_until_reached()
        act()

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def parameters(result: RunResult) -> torch.Tensor:
    tensors = load_tensors(Path(result.model))
    return torch.cat([tensors[name].reshape(-1).double() for name in sorted(tensors)])


def distance(one: RunResult, other: RunResult) -> float:
    """The largest difference between two runs' parameters and buffers."""
    return float((parameters(one) - parameters(other)).abs().max())


def records_of(run_dir: str | Path, kind: str) -> list[Record]:
    return [row for row in read_records(Path(run_dir)) if row["kind"] == kind]


def audit_steps(run_dir: str | Path, begin: int = 0) -> None:
    """Every global step happened once, and no finished step was done again after a loss."""
    rows = records_of(run_dir, "step")
    assert {row["step"] for row in rows} == set(range(begin + 1, STEPS + 1))
    assert {(row["step"], row["position"]) for row in rows} == {(n, n * BATCH) for n in range(begin + 1, STEPS + 1)}
    for rank in {row["rank"] for row in rows}:
        mine = [row["step"] for row in rows if row["rank"] == rank]
        assert mine == sorted(set(mine)), f"rank {rank} did a step twice"
    whole = [n for n in range(begin + 1, STEPS + 1) if not _torn(run_dir, n)]
    for step in whole:
        assert sum(row["samples"] for row in rows if row["step"] == step) == BATCH, f"step {step}"


def _torn(run_dir: str | Path, step: int) -> bool:
    """Whether a rank was lost in this step or the next: then not everybody who did it lived to write it down."""
    losses = {row["step"] for row in records_of(run_dir, "regroup")}
    return step in losses or step - 1 in losses


def audit_samples(run_dir: str | Path) -> None:
    """Every sample of every epoch was leased once, and every lease was applied once by every server."""
    updates = records_of(run_dir, "update")
    for server, part in {(row["rank"], row["range"]) for row in updates}:
        applied = [row["lease"] for row in updates if (row["rank"], row["range"]) == (server, part)]
        assert len(applied) == len(set(applied)), f"server {server}"
        assert set(applied) == {row["lease"] for row in updates}, f"server {server}"
    steps = sorted((row["position"] - row["samples"], row["samples"]) for row in records_of(run_dir, "step"))
    seen = [position + i for position, count in steps for i in range(count)]
    assert seen == list(range(EPOCHS * SAMPLES))
    order = GlobalOrder(SAMPLES, 0)
    used = [int(i) for p, c in steps for i in order.indices(order.slice_at(p, c))]
    assert all(used.count(sample) == EPOCHS for sample in range(SAMPLES))
