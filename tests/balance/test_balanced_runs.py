"""Balanced runs in reality: processes of which one is slow, and what happens to ranks on the way."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

import podium
from podium.config import RunConfig, RunResult
from podium.launch.run import run_script
from podium.records.audit import audit
from podium.records.recorder import read_records
from podium.task import Task
from podium.testing.faults import BATCH, STEPS, Faults, Gate, own_rank, small
from tests.integration.runs import at_gate, audit_steps, distance, records_of, train
from tests.integration.shaping import needs_root

TASK = f"{Path(__file__).resolve()}:uneven"
SLOW, FAST = 1.6, 0.4


def uneven(ms: str = "", faults: str = "", gate: str = "") -> Task:
    """The small task on machines of unequal speed: rank i takes `ms[i]` milliseconds a sample, from the front again."""
    task, rank = small(faults, gate), own_rank()
    paces = [float(each) for each in ms.split("/")]
    pace = 0.0 if rank is None else paces[rank % len(paces)] / 1e3

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        if outputs.requires_grad:
            time.sleep(pace * len(outputs))
        return task.loss(outputs, targets)

    return dataclasses.replace(task, loss=loss)


def balanced(out: Path, *ms: float, faults: Faults = Faults(), **options: Any) -> RunResult:  # noqa: B008  # frozen
    """A run in which the worker of rank i takes so long a sample."""
    own = {"ms": "/".join(map(str, ms))}
    fields = {"workers": len(ms), "balance": "equal-finish", **options}
    return train(out, faults, task=TASK, task_options=own, **fields)


def divisions(run_dir: str | Path) -> list[dict[int, int]]:
    """Of every global step, each worker's samples, by rank."""
    found: dict[int, dict[int, int]] = {}
    for row in records_of(run_dir, "step"):
        found.setdefault(row["step"], {})[row["rank"]] = row["samples"]
    return [found[step] for step in sorted(found)]


def check_that_all_is_well(result: RunResult, alone: RunResult, begin: int = 0) -> None:
    assert result.status == "finished"
    assert len(set(result.param_hash.values())) == 1
    assert distance(result, alone) < 1e-5
    audit_steps(result.run_dir, begin)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """What one process makes of the same task and seed."""
    return train(tmp_path_factory.mktemp("alone"), strategy="solo", launcher="threads")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:servers=2,placement=colocated"])
def test_a_slow_process_gets_less_to_do(tmp_path: Path, alone: RunResult, strategy: str) -> None:
    result = balanced(tmp_path, FAST, SLOW, strategy=strategy, device="cpu,cpu")
    check_that_all_is_well(result, alone)
    first, last = divisions(result.run_dir)[0], divisions(result.run_dir)[-1]
    assert first == {0: BATCH // 2, 1: BATCH // 2}
    assert last[0] >= 2 * last[1]
    assert records_of(result.run_dir, "balance")


@pytest.mark.slow
def test_survivors_of_a_killed_worker_divide_its_part_by_their_speeds(tmp_path: Path, alone: RunResult) -> None:
    result = balanced(tmp_path, FAST, FAST, SLOW, faults=Faults().kill(1, step=16))
    assert result.lost == [1]
    check_that_all_is_well(result, alone)
    last = divisions(result.run_dir)[-1]
    assert last.keys() == {0, 2}
    assert last[0] >= 2 * last[2]


def test_a_worker_that_joins_begins_with_a_part_like_the_others(tmp_path: Path, alone: RunResult) -> None:
    acting = join_at_gate(tmp_path, workers=3)
    result = balanced(tmp_path, FAST, FAST, SLOW, faults=Faults().gate(0, step=13), workers=2)
    acting.join(30.0)
    check_that_all_is_well(result, alone)
    together = [step for step in divisions(result.run_dir) if 2 in step]
    assert len(together) > 8
    assert min(together[0][0], together[0][1]) <= together[0][2] <= max(together[0][0], together[0][1])
    assert together[-1][0] >= 2 * together[-1][2]


def join_at_gate(folder: Path, workers: int) -> threading.Thread:
    """Ask for so many workers while the run is at its gate, and let it go on once they are there."""

    def act() -> None:
        (run_dir,) = [path for path in folder.iterdir() if path.is_dir()]
        podium.scale(run_dir, workers=workers)
        until = time.monotonic() + 30.0
        while not (run_dir / "records" / f"rank-{workers - 1}.jsonl").exists() and time.monotonic() < until:
            time.sleep(0.02)
        Gate(folder).open()

    return at_gate(folder, act)


@pytest.mark.slow
def test_a_balanced_run_goes_on_from_its_checkpoint_and_learns_the_speeds_anew(
    tmp_path: Path, alone: RunResult
) -> None:
    begun = balanced(tmp_path / "begun", FAST, SLOW, steps=STEPS // 2)
    rest = balanced(tmp_path / "rest", FAST, SLOW, resume=begun.run_dir)
    check_that_all_is_well(rest, alone, begin=STEPS // 2)
    for result in (begun, rest):
        last = divisions(result.run_dir)[-1]
        assert last[0] >= 2 * last[1]


def test_threads_are_balanced_too(tmp_path: Path, alone: RunResult) -> None:
    result = balanced(tmp_path, 0.0, 0.0, 0.0, launcher="threads")
    check_that_all_is_well(result, alone)


LOOP = """
import sys, time
import torch
import podium

torch.manual_seed(0)
inputs = torch.randn(240, 6)
data = (inputs, inputs[:, :2].tanh())
model = torch.nn.Linear(6, 2)
run = podium.join(model, torch.optim.SGD(model.parameters(), lr=0.05))

def loss(x, y):
    time.sleep(len(x) * (4 if run.rank == 1 else 1) * 4e-4)
    return torch.nn.functional.mse_loss(model(x), y)

for x, y in run.batches(data, batch_size=24, epochs=3):
    run.step(lambda: loss(x, y))
open(f"{sys.argv[1]}/hash-{run.rank}", "w").write(run.param_hash())
"""


def test_the_users_own_loop_is_balanced(tmp_path: Path) -> None:
    script, out = tmp_path / "loop.py", tmp_path / "out"
    script.write_text(LOOP)
    config = RunConfig(workers=2, balance="equal-finish", out=str(out), threads=1, deadline_s=20.0)
    assert run_script(config, str(script), [str(tmp_path)]) == 0
    (run_dir,) = out.iterdir()
    assert len({(tmp_path / f"hash-{rank}").read_text() for rank in (0, 1)}) == 1
    last = divisions(run_dir)[-1]
    assert sum(last.values()) == 24
    assert last[0] >= 2 * last[1]


LOST = LOOP.replace(
    "def loss(x, y):",
    """
if run.rank == 1:
    told = run._loop.balance.saw_step
    def lost_before_it_tells(*facts, **more):
        if run.worker.steps_done >= 10:
            os._exit(9)
        told(*facts, **more)
    run._loop.balance.saw_step = lost_before_it_tells

def loss(x, y):""",
).replace("import sys", "import os, sys")


def test_a_worker_lost_while_speeds_are_told_ends_nobody_elses_loop(tmp_path: Path) -> None:
    """At the end of a segment, where nothing else is under way."""
    script, out = tmp_path / "loop.py", tmp_path / "out"
    script.write_text(LOST)
    config = RunConfig(workers=2, balance="equal-finish:every=1", out=str(out), threads=1, deadline_s=20.0)
    assert run_script(config, str(script), [str(tmp_path)]) == 0
    (run_dir,) = out.iterdir()
    assert (tmp_path / "hash-0").is_file()
    assert divisions(run_dir)[-1] == {0: 24}


def test_workers_of_one_node_and_one_of_another_are_balanced_each_by_itself(tmp_path: Path, alone: RunResult) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(TWO_NODES)
    result = train(
        tmp_path / "out", workers=4, launcher="virtual", cluster=str(cluster), balance="equal-finish", task=TASK,
        task_options={"ms": "0"},
    )  # fmt: skip
    check_that_all_is_well(result, alone)
    rows = list(read_records(Path(result.run_dir)))
    assert audit(rows) == (0, 0)
    last = divisions(result.run_dir)[-1]
    assert last[3] > 2 * max(last[rank] for rank in (0, 1, 2))


@pytest.mark.root
@needs_root
def test_processes_of_one_node_and_one_of_another_are_balanced_in_namespaces(tmp_path: Path, alone: RunResult) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(TWO_NODES.replace("speed = 3", ""))
    result = balanced(tmp_path / "out", SLOW, SLOW, SLOW, FAST, launcher="shaped", cluster=str(cluster))
    check_that_all_is_well(result, alone)
    last = divisions(result.run_dir)[-1]
    assert last[3] >= 2 * max(last[rank] for rank in (0, 1, 2))


TWO_NODES = """
[cluster]
seconds_per_sample = 1e-3
seconds_per_step = 1e-5

[[node]]
name = "crowded"

[[node]]
name = "fast"
speed = 3

[placement]
workers = ["crowded", "crowded", "crowded", "fast"]
"""
