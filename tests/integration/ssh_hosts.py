"""Hosts with ssh servers that all tests of a module use: making them takes longer than most tests."""

from __future__ import annotations

import contextlib
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from podium.testing import Host, Hosts, SshServers, why_not_ssh
from tests.integration import leftovers

WAIT_S = 10.0


@contextmanager
def ssh_hosts(folder: Path, count: int, *, served: int | None = None, mbit: float | None = None) -> Iterator[Hosts]:
    """Hosts, of which the first `served` have an ssh server; skips where none can be made.

    `folder` is the session's own temporary folder, in which nothing of them may be left.
    """
    if reason := why_not_ssh():
        pytest.skip(reason)
    with Hosts(count, mbit=mbit) as hosts, SshServers(list(hosts)[:served]):
        yield hosts
    _wait_until_gone(lambda: [*leftovers.processes(), *map(str, folder.glob("podium-*"))])


@contextmanager
def left_clean(hosts: Hosts) -> Iterator[None]:
    """Afterwards no process of Podium runs on any of the hosts, and no folder of it is left there."""
    yield
    _wait_until_gone(lambda: [thing for host in hosts for thing in _left_on(host)])


def _wait_until_gone(left: Callable[[], list[str]]) -> None:
    until = time.monotonic() + WAIT_S
    while things := left():
        assert time.monotonic() < until, f"left behind: {things}"
        time.sleep(0.05)


def _left_on(host: Host) -> list[str]:
    commands = []
    for pid in host.processes():
        with contextlib.suppress(OSError):  # ended in this moment
            commands.append(Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode())
    running = [f"{host.name}: {text[:100]}" for text in commands if "podium.node" in text or "podium.launch" in text]
    return running + [f"{host.name}: {path.name}" for path in host.folder.glob("podium-*")]


@contextmanager
def wrapped_python(host: Host, *, code: str = "", path: str = "", shell: str = "") -> Iterator[str]:
    """The entry of a host, as a file of hosts has it, whose Python differs.

    `code` is executed before anything else, modules are searched in `path` first, and `shell` precedes the interpreter.
    """
    folder = host.folder / "wrapped"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(code)
    paths = f'/tmp/wrapped:{path}:"$PYTHONPATH"'
    (folder / "python").write_text(f'#!/bin/sh\nexport PYTHONPATH={paths}\n{shell}\nexec {sys.executable} "$@"\n')
    (folder / "python").chmod(0o755)
    try:
        yield f"{host.name} python=/tmp/wrapped/python"
    finally:
        shutil.rmtree(folder)
