"""What the services on test hosts have in common: daemons, their logs, and waiting until they serve."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self, final

from podium.errors import ConfigError
from podium.testing.hosts import START_S, Host

_POLL_S = 0.02
_LOG_LINES = 20


class Service(ABC):
    """What runs on hosts while a `with` block lasts."""

    def __enter__(self) -> Self:
        self._check()
        try:
            self._begin()
        except BaseException:  # an interrupt, too, must leave nothing behind
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _check(self) -> None:
        """Refuse hosts where it cannot start. Nothing was started then, and nothing is removed."""

    @abstractmethod
    def _begin(self) -> None:
        """Start it; returns when it serves."""

    @abstractmethod
    def _end(self) -> None:
        """End what was started and remove its files; also after a `_begin` that failed."""


class _Daemon(NamedTuple):
    host: Host
    process: subprocess.Popen[Any]
    log: str


@final
class Daemons:
    """Programs that run in the foreground on hosts, each with a log in its host's `/tmp`."""

    def __init__(self) -> None:
        self._all: list[_Daemon] = []

    def start(self, host: Host, *words: str, log: str, env: Mapping[str, str] | None = None) -> None:
        """Start a program; `log` is the path on the host of what it prints."""
        with open(_outside(host, log), "ab") as file:
            self._all.append(_Daemon(host, host.start(*words, env=env, stdout=file, stderr=file), log))

    def wait(self, ready: Callable[[], bool], what: str, limit_s: float) -> None:
        """Wait until `ready()`. A daemon that ends, or the time limit, raises with the last lines of the logs."""
        until = time.monotonic() + limit_s
        while not ready():
            if ended := [daemon for daemon in self._all if daemon.process.poll() is not None]:
                raise ConfigError(f"{what}: a daemon ended\n{_last_lines(ended)}")
            if time.monotonic() > until:
                raise ConfigError(f"{what}: not within {limit_s:g} s\n{_last_lines(self._all)}")
            time.sleep(_POLL_S)

    def end(self) -> None:
        """Kill the daemons of hosts that are still there."""
        for host, process, _ in self._all:
            if host.alive:
                host.send_signal(process, signal.SIGKILL)
                process.wait(START_S)
        self._all.clear()


def need_new_folder(hosts: Iterable[Host], name: str) -> None:
    """Refuse hosts whose `/tmp` has this folder, since a service makes it and removes it at its end."""
    for host in hosts:
        if (host.folder / name).exists():
            raise ConfigError(f"{host.name} must have no /tmp/{name} before the service starts: does it run already?")


def kill(host: Host, chosen: Callable[[int], bool]) -> None:
    """Kill all processes of a host that `chosen` says, and what they start meanwhile."""
    until = time.monotonic() + START_S
    while found := [pid for pid in host.processes() if _is_chosen(pid, chosen)]:
        if time.monotonic() > until:
            raise ConfigError(f"{host.name}: processes {found} did not end within {START_S:g} s")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_POLL_S)


def _is_chosen(pid: int, chosen: Callable[[int], bool]) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z" and chosen(pid)
    except (FileNotFoundError, ProcessLookupError):  # ended in this moment
        return False


def _outside(host: Host, path: str) -> str:
    return f"{host.folder}/{path.removeprefix('/tmp/')}"


def _last_lines(daemons: list[_Daemon]) -> str:
    found = []
    for host, _, log in daemons:
        with open(_outside(host, log), encoding="utf-8", errors="replace") as file:
            found += [f"{host.name} {log}: {line.rstrip()}" for line in file.readlines()[-_LOG_LINES:]]
    return "\n".join(found)
