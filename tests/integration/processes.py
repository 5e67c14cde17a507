"""Podium started as a user starts it: in processes of their own, which can be signalled."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.integration import leftovers

LIMIT_S = 100.0
ROOT = Path(__file__).resolve().parents[2]


def start(*words: str, **environment: str) -> subprocess.Popen[str]:
    """Python with these arguments, in a process group of its own, as a shell would start it."""
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        start_new_session=True,
    )


def podium(*words: str) -> subprocess.Popen[str]:
    return start("-m", "podium", *words)


def finish(process: subprocess.Popen[str], limit_s: float = LIMIT_S) -> tuple[int, str, str]:
    """Exit code, standard output, standard error."""
    try:
        out, err = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end within {limit_s:g} s\n{out}\n{err}") from None
    return process.returncode, out, err


def torchrun(count: int, *words: str, through: Path | None = None) -> tuple[int, str, str]:
    """`through`: a shell script that starts each rank, in place of `-m podium.node`."""
    port = str(free_port())
    agent = ("-m", "torch.distributed.run", "--nproc-per-node", str(count), "--master-port", port)
    ranks = ("-m", "podium.node") if through is None else ("--no-python", "sh", str(through))
    return finish(start(*agent, *ranks, *words, PYTHON=sys.executable))


def settings(fields: dict[str, Any]) -> list[str]:
    """`--set` for each of these."""
    return [word for name, value in fields.items() for word in ("--set", f"{name}={value}")]


def document(out: str) -> dict[str, Any]:
    """The one JSON document on standard output."""
    (line,) = out.splitlines()
    return json.loads(line)  # type: ignore[no-any-return]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_until_gone(pids: Sequence[int] | set[int], limit_s: float = 10.0) -> None:
    until = time.monotonic() + limit_s
    while left := [pid for pid in pids if leftovers.is_alive(pid)]:
        assert time.monotonic() < until, f"still alive: {left}"
        time.sleep(0.02)
