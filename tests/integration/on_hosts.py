"""A user at the first of some hosts, who starts `podium train` there."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from podium.testing import Host, RayCluster, SlurmCluster
from tests.integration.processes import LIMIT_S, settings

RUN = {"out": "/tmp/runs", "threads": 1}
CLEAN = {"missing": 0, "repeated": 0}
"""What a result's `audit` says where no sample was lost or used twice."""
TORCHRUN = str(Path(sys.executable).with_name("torchrun"))
SECRET = {"PODIUM_SECRET": "sixteen letters or more", "OMP_NUM_THREADS": "1"}
_PIPES: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
_PODIUM = (sys.executable, "-X", "faulthandler", "-m", "podium")


def podium(host: Host, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    return host.start(*_PODIUM, *words, env=env, **_PIPES)


def train(hosts: Sequence[Host], *words: str, **fields: Any) -> subprocess.Popen[str]:
    """A run over all these hosts by ssh, started at the first of them."""
    named = ("--launcher", "ssh", "--hosts", ",".join(host.name for host in hosts), "--json")
    return podium(hosts[0], *request(**fields), *named, *words)


def by_slurm(cluster: SlurmCluster, host: Host, *words: str, nodes: int = 3, **fields: Any) -> subprocess.Popen[str]:
    """A run in an allocation of some nodes, begun on this host."""
    allocate = ("salloc", "--quiet", f"--nodes={nodes}", "--no-kill")
    run = (*_PODIUM, *request(**fields), "--launcher", "slurm", "--json", *words)
    return host.start(*allocate, *run, env=cluster.env, **_PIPES)


def by_ray(cluster: RayCluster, host: Host, *words: str, **fields: Any) -> subprocess.Popen[str]:
    """A run on the cluster, begun on this host."""
    env = {**cluster.env, **fields.pop("env", {})}
    return podium(host, *request(**fields), "--launcher", "ray", "--json", *words, env=env)


def torchrun(hosts: Sequence[Host], counts: Sequence[int], **fields: Any) -> list[subprocess.Popen[str]]:
    """One run over all these hosts with so many ranks on each; the first one's process prints the result."""
    meeting = ("--master-addr", hosts[0].name, "--master-port", "29511")
    words = ("-m", "podium.node", *settings({"task": "digits-mlp", **RUN, **fields}))
    return [
        host.start(
            TORCHRUN,
            "--nnodes",
            str(len(hosts)),
            "--nproc-per-node",
            str(count),
            "--node-rank",
            str(i),
            *meeting,
            *words,
            env=SECRET,
            **_PIPES,
        )
        for i, (host, count) in enumerate(zip(hosts, counts, strict=True))
    ]


def result_of_torchrun(processes: Sequence[subprocess.Popen[str]]) -> dict[str, Any]:
    printed = [ended(process) for process in processes]
    assert [code for code, _, _ in printed] == [0] * len(processes), printed
    found: dict[str, Any] = json.loads(printed[0][1].splitlines()[-1])
    return found


def processes_of(host: Host) -> str:
    """The command lines and environments of a host's processes."""
    seen = host.run("sh", "-c", "cat /proc/[0-9]*/cmdline /proc/[0-9]*/environ 2>/dev/null | tr '\\0' '\\n'")
    return seen.stdout


def request(**fields: Any) -> list[str]:
    """The words of `podium train` with these settings."""
    task = str(fields.pop("task", "digits-mlp"))
    return ["train", task, *settings({**RUN, **fields})]


def ended(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Exit code, output and errors. A command that does not end in time says where each of its threads is."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        Host.send_signal(process, signal.SIGABRT)
        out, err = process.communicate(timeout=limit_s)
        raise AssertionError(f"it did not end within {limit_s:g} s\n{out}\n{err}") from None
    return process.returncode, out, err


def result_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    code, out, err = ended(process)
    assert code == 0, (out, err)
    found: dict[str, Any] = json.loads(out)
    return found


def folder_on(host: Host, run_dir: str) -> Path:
    """A run's folder on a host, as seen from outside."""
    return host.folder / Path(run_dir).relative_to("/tmp")


def wait_for(holds: Callable[[], bool], process: subprocess.Popen[str], limit_s: float = 60.0) -> None:
    """Wait until something holds while the process runs."""
    until = time.monotonic() + limit_s
    while not holds():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.02)


def rows_at_home(head: Host, rank: int) -> list[dict[str, Any]]:
    """A rank's records in the head's folder so far."""
    texts = [path.read_text() for path in head.folder.glob(f"runs/*/records/rank-{rank}.jsonl")]
    return [json.loads(line) for text in texts for line in text.splitlines(keepends=True) if line.endswith("\n")]


def steps_at_home(head: Host, rank: int = 0) -> int:
    return sum(row["kind"] == "step" for row in rows_at_home(head, rank))
