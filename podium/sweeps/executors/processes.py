"""Trials side by side in processes of this machine, each with a model, an optimizer and a CUDA context of its own.

Processes are forked from a fork server that has torch loaded and never uses a GPU, so one starts in hundredths of a
second; its first trial still pays for its CUDA context. Without MPS the driver lets processes of one GPU take turns.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import TracebackType
from typing import Any, final

from podium.errors import TrainingError
from podium.launch.forking import UNKNOWN, fork_server, how_fork_server_ended, nullified_main
from podium.sweeps.executors.process_executor import ProcessExecutor
from podium.sweeps.executors.process_pool import ProcessMessage, ProcessPool, ProcessTransport
from podium.sweeps.executors.trial_process import LONGEST_MESSAGE, ProcessSetup, work
from podium.sweeps.recipe import Recipe

_GRACE_S = 5.0
"""How long a process may take to end once its connection is closed."""
_KILLED_S = 10.0
"""How long the kernel may take to end a killed process."""


@final
@dataclass(frozen=True, kw_only=True)
class Processes(ProcessExecutor):
    """Trials in processes, several at a time."""

    name = "processes"

    env: Mapping[str, str] | None = None
    """Environment variables, over those of this process."""

    def transport(self, recipe: Recipe, pool: ProcessPool, spool: Path) -> ProcessTransport:
        return ForkedProcesses(self.env or {})


@final
class ForkedProcesses(ProcessTransport):
    """Processes forked from the fork server, each at the other end of a pipe."""

    def __init__(
        self, env: Mapping[str, str], *, grace_s: float = _GRACE_S, before_kill: Callable[[int], Any] | None = None
    ) -> None:
        """`before_kill` is called with the id of a process that is about to be killed."""
        self._env, self._grace_s, self._before_kill = {**os.environ, **env}, grace_s, before_kill
        self._children: dict[int, tuple[ForkServerProcess, Connection]] = {}

    def start(self, setup: ProcessSetup) -> int | None:
        context = fork_server()
        ours, theirs = context.Pipe()
        setup = dataclasses.replace(setup, env=self._env, clears_env=True, grace_s=self._grace_s)
        name = f"podium-process-{setup.number}"
        process = context.Process(target=work, args=(theirs, setup.to_json()), name=name, daemon=True)
        try:
            with nullified_main():
                process.start()
        except (OSError, EOFError) as error:
            ours.close()
            raise TrainingError(
                f"a process for trials could not be started: {error or 'the fork server ended'}"
            ) from error
        finally:
            theirs.close()
        self._children[setup.number] = process, ours
        pid: int | None = process.pid
        return pid

    def send(self, number: int, text: str) -> None:
        with contextlib.suppress(ConnectionError):  # the process is gone: `hear` reports that
            self._children[number][1].send_bytes(text.encode())

    def hear(self, timeout_s: float) -> list[ProcessMessage]:
        # A child that the task forked keeps the connection open when the process is gone: so wait for the sentinel too.
        places = [place for process, connection in self._children.values() for place in (connection, process.sentinel)]
        ready = wait(places, timeout_s)
        return [
            self._receive_one(number)
            for number, (process, connection) in list(self._children.items())
            if connection in ready or process.sentinel in ready
        ]

    def _receive_one(self, number: int) -> ProcessMessage:
        process, connection = self._children[number]
        try:
            if not connection.poll(0):  # all that it wrote has been read
                raise EOFError
            return ProcessMessage(number, connection.recv_bytes(LONGEST_MESSAGE).decode())
        except (EOFError, OSError):
            process.join(self._grace_s)
            return ProcessMessage(number, None, _how_it_ended(process.exitcode))

    def end(self, number: int) -> None:
        process, connection = self._children.pop(number)
        connection.close()
        self._end([process], 0.0 if self._before_kill is None else self._grace_s)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for _, connection in self._children.values():
            connection.close()
        self._end([process for process, _ in self._children.values()], self._grace_s)
        self._children.clear()

    def _end(self, processes: list[ForkServerProcess], grace_s: float) -> None:
        """Wait for the processes that were asked to stop; kill those that do not."""
        until = time.monotonic() + grace_s
        try:
            for process in processes:
                process.join(max(0.0, until - time.monotonic()))
        finally:
            for process in processes:
                self._kill(process)

    def _kill(self, process: ForkServerProcess) -> None:
        if process.exitcode is None:
            if self._before_kill is not None and process.pid is not None:
                self._before_kill(process.pid)
            process.kill()
        process.join(_KILLED_S)


def _how_it_ended(code: int | None) -> str:
    if code is None:
        return "its process closed its connection"
    if code == UNKNOWN and (how := how_fork_server_ended()):
        return f"the fork server, from which its process was forked, was lost: {how}"
    if code < 0:
        known = {number.value: f" ({number.name})" for number in signal.Signals}
        return f"its process was killed by signal {-code}{known.get(-code, '')}"
    return f"its process ended with exit code {code}"
