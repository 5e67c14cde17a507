"""Seconds from command to first step, by launcher: part of `podium bench hosts`.

Ranks are divided over hosts that share nothing and, on this machine, its cores. The command is `podium train` at the
first host (for torchrun, one on each host); the end is the first step's record in the head's folder. Under SLURM and
Ray the cluster is up before, and the wait for the allocation counts.
"""

from __future__ import annotations

import contextlib
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from podium.errors import DeadlineExceeded, RankFailed
from podium.launch.hosts.entries import HostEntry, divide
from podium.testing.hosts import Host, Hosts
from podium.testing.ray_cluster import RayCluster, why_not_ray
from podium.testing.slurm_cluster import SlurmCluster, why_not_slurm
from podium.testing.ssh_servers import SshServers, why_not_ssh

LAUNCHERS = ("local", "ssh", "slurm", "ray", "torchrun")
_LIMIT_S = 120.0
_END_S = 30.0
_RUN = ("--set", "threads=1", "--set", "steps=1", "--set", "out=/tmp/runs")
_SECRET = {"PODIUM_SECRET": "for a measurement on this machine"}


def start_up(launchers: tuple[str, ...], *, hosts: int, ranks: int, rounds: int) -> list[dict[str, Any]]:
    """A row per launcher: the median, the shortest and the longest of `rounds` starts, or why it was left out."""
    return [_row(name, hosts, ranks, rounds) for name in launchers]


def _row(launcher: str, count: int, ranks: int, rounds: int) -> dict[str, Any]:
    row: dict[str, Any] = {"launcher": launcher, "hosts": 1 if launcher == "local" else count, "ranks": ranks}
    reasons: dict[str, Callable[[], str]] = {"ssh": why_not_ssh, "slurm": why_not_slurm, "ray": why_not_ray}
    if reason := reasons.get(launcher, str)():
        return {**row, "left_out": reason}
    with Hosts(count) as hosts, contextlib.ExitStack() as services:
        env: Mapping[str, str] = {}
        if launcher == "ssh":
            services.enter_context(SshServers(hosts))
        elif launcher == "slurm":
            env = services.enter_context(SlurmCluster(hosts, cpus=ranks)).env
        elif launcher == "ray":
            env = services.enter_context(RayCluster(hosts, cpus=ranks)).env
        taken = [_seconds(launcher, hosts, ranks, env) for _ in range(rounds)]
    return {**row, "seconds": {"median": statistics.median(taken), "min": min(taken), "max": max(taken)}}


def _seconds(launcher: str, hosts: Hosts, ranks: int, env: Mapping[str, str]) -> float:
    """One start; the run ends by itself after its first step."""
    before = _records(hosts[0])
    began = time.monotonic()
    started = _start(launcher, hosts, ranks, env)
    try:
        while not any(_has_step(path) for path in _records(hosts[0]) - before):
            if any(process.poll() for process in started):
                raise RankFailed(f"bench hosts: a start by {launcher} failed: {_said(started)}")
            if time.monotonic() - began > _LIMIT_S:
                raise DeadlineExceeded(f"bench hosts: no step within {_LIMIT_S:g} s of a start by {launcher}")
            time.sleep(0.005)
        taken = time.monotonic() - began
        for process in started:
            process.communicate(timeout=_END_S)
        return taken
    finally:
        for process in started:
            process.kill()


def _start(launcher: str, hosts: Hosts, ranks: int, env: Mapping[str, str]) -> list[subprocess.Popen[str]]:
    python, pipes = sys.executable, {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    if launcher == "torchrun":
        parts = divide([HostEntry(host.name) for host in hosts], ranks)
        meeting = ("--nnodes", str(len(hosts)), "--master-addr", hosts[0].name, "--master-port", "29555")
        return [
            host.start(
                *(
                    python,
                    "-m",
                    "torch.distributed.run",
                    *meeting,
                    "--node-rank",
                    str(n),
                    "--nproc-per-node",
                    str(part),
                ),
                *("-m", "podium.node", "--task", "digits-mlp", *_RUN),
                env={**_SECRET, "OMP_NUM_THREADS": "1"},
                **pipes,
            )
            for n, (host, part) in enumerate(zip(hosts, parts, strict=True))
        ]
    words = [python, "-m", "podium", "train", "digits-mlp", "--workers", str(ranks), "--launcher", launcher, *_RUN]
    if launcher == "ssh":
        words += ["--hosts", ",".join(host.name for host in hosts)]
    elif launcher == "ray":
        words += ["--set", f"nodes={len(hosts)}"]
    elif launcher == "slurm":
        words = ["salloc", "--nodes", str(len(hosts)), "--ntasks", str(ranks), *words]
    return [hosts[0].start(*words, env=env, **pipes)]


def _records(head: Host) -> set[Path]:
    return set(head.folder.glob("runs/*/records/rank-*.jsonl"))


def _has_step(path: Path) -> bool:
    return '"kind":"step"' in path.read_text()


def _said(processes: list[subprocess.Popen[str]]) -> str:
    ended = [process for process in processes if process.poll()]
    return (ended[0].communicate(timeout=_END_S)[0] or "")[-500:]
