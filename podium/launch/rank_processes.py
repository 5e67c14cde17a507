"""Processes of this machine that are ranks, forked from a server that has torch loaded.

The first start pays for the server's imports (about 3 s); later ones take hundredths of a second. Processes die with
the one that started them: the kernel kills them when the fork server ends, and they end when the coordinator does.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import final

from podium.errors import ConfigError, RankFailed
from podium.launch.forking import UNKNOWN, check_fork_server, fork_server, how_it_ended, nullified_main
from podium.launch.process import NodeSpec, run_node
from podium.task import Task

Body = Callable[[NodeSpec, Task | None], object]
"""What a process runs; the task is given to it where it has no name."""

_UNGUARDED = (
    " (ranks import the script that made the task: its code must be under `if __name__ == '__main__':`, "
    "or name the task's function, 'file.py:make_task', instead)"
)
_GRACE_S = 10.0
"""How long processes may take to end once their work is done."""


class Ranks(ABC):
    """The processes of a run, wherever they are. A number means its latest process."""

    @abstractmethod
    def launch(self, spec: NodeSpec) -> None:
        """Start a process."""

    @abstractmethod
    def kill(self, rank: int) -> None:
        """End a process for good."""

    @abstractmethod
    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        """How a process ended, given this long to end; None if it has not."""

    @abstractmethod
    def is_running(self, rank: int) -> bool:
        """Whether a process exists and is not stopped."""

    def where(self, rank: int) -> str:
        """The name of a process's host; empty for this machine."""
        return ""

    def add_hosts(self, lines: Sequence[str]) -> int:
        """As `ProcessOwner.add_hosts`."""
        raise ConfigError("scale: hosts can be added to a run of the launcher ssh; this run is on one machine")

    @abstractmethod
    def join(self) -> None:
        """Wait until all processes have ended, at most some seconds."""

    @abstractmethod
    def end(self) -> None:
        """Leave no process behind, whatever happened."""


@final
class RankProcesses(Ranks):
    """Processes of this machine."""

    def __init__(self, body: Body = run_node, *, task: Task | None = None, task_name: str = "") -> None:
        """`task` is sent to each process where it has no name; `task_name` is for messages."""
        self._body, self._task, self._task_name = body, task, task_name
        self.started: dict[int, ForkServerProcess] = {}
        """The latest process of each number."""
        self._all: list[ForkServerProcess] = []
        self._logs: dict[int, str | None] = {}
        self.on_started: Callable[[NodeSpec, int], None] | None = None
        """Called with the spec and the pid of every process, once it runs."""

    def launch(self, spec: NodeSpec) -> None:
        task = self._task
        try:
            context = fork_server()
            process = context.Process(target=self._body, args=(spec, task), name=f"podium-{spec.rank}", daemon=True)
            with nullified_main() if task is None else contextlib.nullcontext():
                process.start()
        except (AttributeError, TypeError, pickle.PicklingError) as error:
            raise ConfigError(
                f"task {self._task_name} cannot be sent to other processes ({error}); name its function "
                "('file.py:make_task') or use launcher='threads'"
            ) from error
        except (OSError, EOFError) as error:
            why = str(error) or "the fork server ended"
            raise RankFailed(f"rank {spec.rank} could not be started: {why}") from error
        self.started[spec.rank] = process
        self._logs[spec.rank] = spec.log
        self._all.append(process)
        if self.on_started is not None and process.pid is not None:
            self.on_started(spec, process.pid)

    def kill(self, rank: int) -> None:
        process = self.started[rank]
        if process.pid is not None and process.exitcode is None:
            process.kill()

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        process = self.started[rank]
        process.join(timeout=wait_s)
        code = process.exitcode
        if code is None:
            return None
        if code == UNKNOWN:
            check_fork_server()
        return how_it_ended(code) + (self._last_words(rank) if code > 0 else "")

    def is_running(self, rank: int) -> bool:
        """A process that sleeps, or that a debugger has stopped, counts as running."""
        process = self.started[rank]
        if process.exitcode is not None:  # its pid may be another process's by now
            return False
        try:
            status = Path(f"/proc/{process.pid}/status").read_text(errors="replace")
        except OSError:
            return False
        facts = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        return facts["State"][0] in "RSD" or facts["TracerPid"] != "0"

    def join(self) -> None:
        deadline = time.monotonic() + _GRACE_S
        for process in self._all:
            process.join(timeout=max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        for process in self._all:
            if process.exitcode is None:
                process.kill()
        for process in self._all:
            process.join(timeout=_GRACE_S)

    def _last_words(self, rank: int) -> str:
        """The last line of its log, which may hold an error that it could not report."""
        log = self._logs[rank]
        try:
            lines = Path(log or "").read_text(errors="replace").split("\n")
        except OSError:  # it ended before it opened one, or writes to the terminal
            return _UNGUARDED if self._task is not None else ""
        said = [line for line in lines if line.strip()]
        return f" ({said[-1].strip()[:300]})" if said else ""
