"""The same task and seed through every real launcher: the same parameters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from podium.config import RunConfig
from podium.launch.run import run_script
from podium.testing.faults import BATCH, EPOCHS, SAMPLES, STEPS, TASK, Faults
from tests.integration.processes import document, settings, torchrun
from tests.integration.runs import FIELDS, audit_samples, audit_steps, records_of, train
from tests.integration.shaping import CLUSTER, needs_root

SYNC = ("all-reduce", "parameter-server", "parameter-server:placement=colocated,servers=2")
ASYNC = "parameter-server:mode=async,servers=2"


def through_torchrun(out: Path, strategy: str, processes: int) -> dict[str, Any]:
    options = settings({**FIELDS, "out": out})
    code, said, err = torchrun(processes, "--task", TASK, "--strategy", strategy, *options)
    assert code == 0, err
    return document(said)


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "processes"), [(SYNC[0], 2), (SYNC[1], 3), (SYNC[2], 2)])
def test_torchrun_gives_the_same_bits_as_local_processes(tmp_path: Path, strategy: str, processes: int) -> None:
    here = train(tmp_path / "local", strategy=strategy, workers=2)
    there = through_torchrun(tmp_path / "torchrun", strategy, processes)
    assert there["launcher"] == "torchrun"
    assert there["status"] == "finished"
    assert (there["workers"], there["steps"], there["samples"]) == (2, STEPS, EPOCHS * SAMPLES)
    assert there["param_hash"] == here.param_hash
    assert len(set(here.param_hash.values())) == 1
    audit_steps(there["run_dir"])
    audit_steps(here.run_dir)


LOOP = Path(__file__).parents[2] / "examples" / "train_podium.py"


@pytest.mark.slow
def test_the_users_own_loop_runs_under_torchrun_as_under_podium_run(tmp_path: Path) -> None:
    config = RunConfig(strategy="all-reduce", workers=2, out=str(tmp_path / "local"), threads=1)
    assert run_script(config, str(LOOP)) == 0
    code, said, err = torchrun(2, *settings({"out": tmp_path / "torchrun", "threads": 1}), "--script", str(LOOP))
    assert code == 0, err
    assert "on 2 workers" in said
    losses = [
        [row["loss"] for row in records_of(next((tmp_path / place).iterdir()), "step")]
        for place in ("local", "torchrun")
    ]
    assert losses[0] and sorted(losses[0]) == sorted(losses[1])


@pytest.mark.slow
def test_a_loop_that_torchrun_started_by_itself_is_told_how(tmp_path: Path) -> None:
    alone = {**os.environ, "WORLD_SIZE": "2"}
    run = subprocess.run(
        [sys.executable, str(LOOP)], env=alone, capture_output=True, text=True, timeout=60, check=False
    )
    assert run.returncode == 1
    assert "torchrun … -m podium.node --script" in run.stderr


def test_synchronous_servers_give_the_same_bits_wherever_they_live(tmp_path: Path) -> None:
    results = [train(tmp_path, strategy=strategy, workers=2) for strategy in SYNC]
    assert len({value for result in results for value in result.param_hash.values()}) == 1


@pytest.mark.slow
def test_asynchronous_training_under_torchrun_uses_every_sample_once_an_epoch(tmp_path: Path) -> None:
    result = through_torchrun(tmp_path, "parameter-server:mode=async", 3)
    assert result["status"] == "finished"
    assert result["samples"] == EPOCHS * SAMPLES
    audit_samples(result["run_dir"])


@pytest.mark.slow
def test_an_error_under_torchrun_ends_all_ranks(tmp_path: Path) -> None:
    faults = Faults().and_then("raise", 1, 5)
    options = settings({**FIELDS, "out": tmp_path, "task.faults": faults})
    code, _, err = torchrun(2, "--task", TASK, *options)
    assert code == 1
    assert "ValueError: the user's own mistake" in err
    (run_dir,) = tmp_path.iterdir()
    assert records_of(run_dir, "step")


@pytest.mark.parametrize("placement", ["dedicated", "colocated"])
def test_asynchronous_training_uses_every_sample_once_an_epoch(tmp_path: Path, placement: str) -> None:
    result = train(tmp_path, strategy=f"{ASYNC},placement={placement},lease={BATCH // 3}", workers=3)
    assert result.status == "finished"
    audit_samples(result.run_dir)


@pytest.mark.root
@needs_root
@pytest.mark.parametrize("strategy", SYNC[:2])
def test_shaped_links_change_the_time_and_not_the_bits(tmp_path: Path, strategy: str) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER)
    here = train(tmp_path / "local", strategy=strategy, workers=2)
    there = train(tmp_path / "shaped", strategy=strategy, workers=2, launcher="shaped", cluster=str(cluster))
    assert there.launcher == "shaped"
    assert there.param_hash == here.param_hash
    audit_steps(there.run_dir)
