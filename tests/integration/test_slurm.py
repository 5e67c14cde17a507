"""Runs that a real SLURM starts on hosts that share nothing."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from podium.testing import Host, Hosts, SlurmCluster, make_hosts, start_slurm
from tests.integration.on_hosts import (
    CLEAN,
    by_slurm,
    ended,
    podium,
    processes_of,
    request,
    rows_at_home,
    steps_at_home,
    wait_for,
)

pytestmark = [pytest.mark.root, pytest.mark.timeout(200)]
__all__ = ["make_hosts", "start_slurm"]  # the fixtures
Make = Callable[..., Hosts]
StartSlurm = Callable[..., SlurmCluster]


def submitted(cluster: SlurmCluster, host: Host, *words: str, **fields: Any) -> subprocess.Popen[str]:
    """A run as a batch job, submitted on this host."""
    return podium(host, *request(**fields), "--launcher", "slurm", "--json", *words, env=cluster.env)


@pytest.mark.slow
def test_outside_an_allocation_it_is_a_batch_job(make_hosts: Make, start_slurm: StartSlurm) -> None:
    hosts = make_hosts(3)
    slurm = start_slurm(hosts)
    process = submitted(slurm, hosts[0], "--nodes", "3", workers=4, steps=8, slurm="--time=1:00:00 --partition=all")
    code, out, err = ended(process)
    assert code == 0, (out, err)
    result = json.loads(out)
    assert result["run_dir"] == "/tmp/runs/digits-mlp-all-reduce-1" and result["audit"] == CLEAN
    assert "note: job 1 submitted with /tmp/runs/digits-mlp-all-reduce-" in err and "running on host[0-2]" in err
    assert "to watch it: squeue --job 1; tail -f /tmp/runs/digits-mlp-all-reduce-1.out" in err
    runs = hosts[0].folder / "runs"
    placed = json.loads((runs / "digits-mlp-all-reduce-1" / "manifest.json").read_text())["placed"]
    assert sorted(placed.values()) == ["host0", "host0", "host1", "host2"]
    assert "all 4 equal" in (runs / "digits-mlp-all-reduce-1.out").read_text()
    (script,) = runs.glob("*.sbatch")
    printed = ended(podium(hosts[0], *request(workers=4, steps=8), "--launcher", "slurm", "--dry-run", env=slurm.env))
    assert printed[0] == 0 and printed[1].startswith("#!/bin/bash\n") and len(list(runs.glob("*.sbatch"))) == 1
    assert hosts[0].run("sbatch", f"/tmp/runs/{script.name}", env=slurm.env).returncode == 0
    until = time.monotonic() + 60
    while not (runs / "digits-mlp-all-reduce-2" / "result.json").exists():
        assert time.monotonic() < until, (runs / "digits-mlp-all-reduce-2.out").read_text()
        time.sleep(0.1)


@pytest.mark.slow
def test_a_job_that_fails_or_is_cancelled_ends_the_command_with_its_code(
    make_hosts: Make, start_slurm: StartSlurm
) -> None:
    hosts = make_hosts(2)
    slurm = start_slurm(hosts)
    code, out, _ = ended(submitted(slurm, hosts[0], "--nodes", "2", workers=2, device="cuda:7"))
    assert code == 1 and "job 1 ended: failed (NonZeroExitCode)" in out and "cuda" in out
    process = submitted(slurm, hosts[0], "--nodes", "2", workers=2, epochs=100_000)
    wait_for(lambda: steps_at_home(hosts[0], 1) > 20, process)
    hosts[0].run("scancel", "2", env=slurm.env)
    code, out, _ = ended(process)
    assert code == 130 and json.loads(out)["status"] == "stopped", "it has saved"
    assert list(hosts[0].folder.glob("runs/*-2/checkpoints/step-????????"))


def test_ctrl_c_leaves_the_job_in_the_queue(make_hosts: Make, start_slurm: StartSlurm) -> None:
    (host,) = hosts = make_hosts(1)
    slurm = start_slurm(hosts)
    process = submitted(slurm, host, workers=2, slurm="--begin=now+1hour")
    wait_for(lambda: "1" in host.run("squeue", "--noheader", "--format=%i", env=slurm.env).stdout, process)
    host.send_signal(process, signal.SIGINT)
    code, out, err = ended(process, 20)
    assert code == 130 and "job 1 stays in the queue" in out and "pending (BeginTime)" in err
    assert host.run("squeue", "--noheader", "--format=%T", env=slurm.env).stdout.split() == ["PENDING"]


@pytest.mark.slow
def test_the_loss_of_a_node_ends_its_ranks_only(make_hosts: Make, start_slurm: StartSlurm) -> None:
    hosts = make_hosts(3)
    slurm = start_slurm(hosts)
    process = by_slurm(slurm, hosts[0], workers=3, epochs=2_000, eval_every=500, heartbeat_s=1)
    wait_for(lambda: steps_at_home(hosts[0], 1) > 50, process)
    (control,) = hosts[0].folder.glob("runs/*/control.json")
    secret = json.loads(control.read_text())["secret"]
    seen = processes_of(hosts[2])
    assert "podium.node" in seen and secret not in seen
    hosts[1].lose()
    at = steps_at_home(hosts[0])
    hosts[0].run("scontrol", "update", "nodename=host1", "state=down", "reason=lost", env=slurm.env)
    wait_for(lambda: steps_at_home(hosts[0]) > at + 500, process)
    assert "DOWN" in hosts[0].run("scontrol", "show", "node", "host1", env=slurm.env).stdout
    hosts[0].run("pkill", "-INT", "-f", "podium train")
    code, out, err = ended(process)
    assert code == 130 and json.loads(out)["lost"] == [1], (out, err)
    assert len(json.loads(out)["param_hash"]) == 2 and json.loads(out)["audit"] == CLEAN
    assert {row["rank"] for rank in (0, 2) for row in rows_at_home(hosts[0], rank)} == {0, 2}


@pytest.mark.slow
def test_what_is_wrong_is_told_with_the_node_the_cause_and_the_next_command(
    make_hosts: Make, start_slurm: StartSlurm
) -> None:
    hosts = make_hosts(3)
    slurm = start_slurm(hosts)
    code, out, _ = ended(submitted(slurm, hosts[0], workers=2, slurm="--partition=none"))
    assert code == 2 and "invalid partition specified: none" in out and "try: sbatch /tmp/runs/" in out
    hosts[1].run("mount", "-t", "tmpfs", "none", str(Path(sys.executable).parent))  # only the system's Python is left
    began = time.monotonic()
    code, out, _ = ended(by_slurm(slurm, hosts[0], workers=3, steps=4))
    assert code == 1 and time.monotonic() - began < 30
    assert re.search(r"host host1: .*No module named '?(podium|torch)", out) and "fix: on host1: " in out
    for pid in hosts[0].run("pgrep", "slurmctld").stdout.split():
        hosts[0].run("kill", "-9", pid)
    began = time.monotonic()
    code, out, _ = ended(submitted(slurm, hosts[2], workers=2))
    assert code == 1 and time.monotonic() - began < 15
    assert "SLURM's controller does not answer: Slurmctld(primary) at host0 is DOWN" in out
