"""What a run could leave behind on this machine: processes, network namespaces, control groups."""

from __future__ import annotations

import os
from pathlib import Path

MARK = "PODIUM_TEST_SESSION"
"""An environment variable that all processes of this test session inherit, so that orphans can be told from others."""


def processes() -> list[str]:
    """Every process that this session started, but for what Python keeps for the next run: its fork server."""
    mark = f"{MARK}={os.environ[MARK]}".encode()
    parents = {pid: _parent(pid) for pid in _pids()}
    found = []
    for pid, parent in parents.items():
        kept = parent == os.getpid() and b"multiprocessing" in _read(pid, "cmdline")
        ours = mark in _read(pid, "environ").split(b"\0") or _descends(pid, parents)
        if ours and not kept and pid != os.getpid() and _state(pid) not in ("Z", ""):
            found.append(
                f"process {pid}: {_read(pid, 'cmdline').replace(bytes(1), b' ').decode(errors='replace')[:100]}"
            )
    return found


def children_of(pid: int) -> set[int]:
    """All processes below this one."""
    parents = {child: _parent(child) for child in _pids()}
    found: set[int] = set()
    fresh = {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def parent_of(pid: int) -> int:
    return _parent(pid)


def state(pid: int) -> str:
    """`R`, `S`, `T` …; empty where there is no such process."""
    return _state(pid)


def is_alive(pid: int) -> bool:
    return _state(pid) not in ("Z", "")


def namespaces() -> set[str]:
    folder = Path("/var/run/netns")
    return {f"namespace {p.name}" for p in folder.glob("podium-*")} if folder.is_dir() else set()


def control_groups() -> set[str]:
    return {f"group {p}" for p in Path("/sys/fs/cgroup").glob("*/podium-*")}


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _read(pid: int, what: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/{what}").read_bytes()
    except OSError:  # gone in this moment, or another user's
        return b""


def _command(pid: int) -> str:
    return _read(pid, "cmdline").replace(b"\0", b" ").decode(errors="replace")[:100]


def _fields(pid: int) -> list[str]:
    """After the name, which may hold anything: state, parent, …"""
    return _read(pid, "stat").rpartition(b")")[2].decode().split()


def _parent(pid: int) -> int:
    return int((_fields(pid) or ["", "0"])[1])


def _state(pid: int) -> str:
    return (_fields(pid) or [""])[0]


def _descends(pid: int, parents: dict[int, int]) -> bool:
    while pid in parents:
        pid = parents[pid]
        if pid == os.getpid():
            return True
    return False
