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

from podium.testing import Host
from tests.integration.processes import LIMIT_S, settings

RUN = {"out": "/tmp/runs", "threads": 1}


def podium(host: Host, *words: str, env: dict[str, str] | None = None) -> subprocess.Popen[str]:
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return host.start(sys.executable, "-X", "faulthandler", "-m", "podium", *words, env=env, **pipes)


def train(hosts: Sequence[Host], *words: str, **fields: Any) -> subprocess.Popen[str]:
    """A run over all these hosts by ssh, started at the first of them."""
    named = ("--launcher", "ssh", "--hosts", ",".join(host.name for host in hosts), "--json")
    return podium(hosts[0], *request(**fields), *named, *words)


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
