"""Trials side by side in processes of this machine, each with a model, an optimizer and a CUDA context of its own.

Processes are forked from the server that has torch loaded and has never touched a GPU, so one starts in hundredths of a
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
from types import TracebackType
from typing import Any, final, get_args

from podium.errors import ConfigError, TrainingError
from podium.launch.forking import UNKNOWN, how_fork_server_ended
from podium.launch.local import fork_server, nullified_main
from podium.launch.rendezvous import rendezvous_folder
from podium.sweeps.executors.base import Executor, OnEvent, Queue
from podium.sweeps.executors.process_pool import Heard, ProcessPool, TrialProcesses, run_pool
from podium.sweeps.executors.trial_process import LONGEST_MESSAGE, Mode, ProcessSetup, work
from podium.sweeps.recipe import Recipe

MOST_ON_A_GPU = 16
"""How many processes share a GPU where nobody says how many: beyond that each one's context costs more than it adds."""

_GRACE_S = 5.0
"""How long a process may take to end once its connection is closed."""
_KILLED_S = 10.0
"""How long the kernel may take to end one that was killed."""


@final
@dataclass(frozen=True, kw_only=True)
class Processes(Executor):
    """Trials in processes, several at a time."""

    name = "processes"

    count: int | None = None
    """How many at a time; None: as many as cores, at most 16 on a GPU."""
    mode: Mode = "eager"
    """`graph`, on a GPU: the whole step captured once and replayed; `compiled`: the same, by `torch.compile` first."""
    threads: int | None = None
    """Of each process, within an operation; None divides the cores among them."""
    env: Mapping[str, str] | None = None
    """Environment variables, over those of this process."""
    deadline_s: float = 300.0
    """Without progress for this long, a process counts as dead."""

    def __post_init__(self) -> None:
        check_options(self)

    def check(self, recipe: Recipe) -> None:
        """Refuse what could not be trained so."""
        check_recipe(self, recipe)

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        with rendezvous_folder() as spool:
            run_pool(pool_of(self, recipe), Children(self.env or {}), recipe, spool, queue, on_event)


def check_options(executor: Any) -> None:
    """What holds for every executor that starts processes."""
    who = f"executor {executor.name}"
    for name in ("count", "threads"):
        value = getattr(executor, name)
        if value is not None and value < 1:
            raise ConfigError(f"{who}: {name} must be at least 1, got {value}")
    if executor.mode not in get_args(Mode):
        raise ConfigError(f"{who}: mode must be one of {', '.join(get_args(Mode))}, got {executor.mode!r}")
    if not executor.deadline_s > 0:
        raise ConfigError(f"{who}: deadline_s must be above 0, got {executor.deadline_s}")


def check_recipe(executor: Any, recipe: Recipe) -> None:
    """What holds for every recipe of trials that are trained in processes."""
    pool_of(executor, recipe)
    recipe.to_dict()


def pool_of(executor: Any, recipe: Recipe) -> ProcessPool:
    """What an executor's options come to on this machine."""
    on_gpu = recipe.torch_device.type == "cuda"
    if executor.mode != "eager" and not on_gpu:
        who = f"executor {executor.name}: mode={executor.mode}"
        raise ConfigError(f"{who} needs a GPU, got device {recipe.torch_device}")
    cores = len(os.sched_getaffinity(0))
    count = executor.count or (min(MOST_ON_A_GPU, cores) if on_gpu else cores)
    threads = executor.threads or max(1, cores // count)
    return ProcessPool(
        executor=executor.name,
        count=count,
        mode=executor.mode,
        threads=threads,
        deadline_s=executor.deadline_s,
        most_losses=max(8, 2 * count),  # when memory runs out, all may go at once
    )


@final
class Children(TrialProcesses):
    """Processes forked from the fork server, each at the other end of a pipe."""

    def __init__(
        self, env: Mapping[str, str], *, grace_s: float = _GRACE_S, before_kill: Callable[[int], Any] | None = None
    ) -> None:
        """`before_kill` hears the process id of one that is about to be killed."""
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
        with contextlib.suppress(ConnectionError):  # it is gone, and is heard of as such
            self._children[number][1].send_bytes(text.encode())

    def hear(self, timeout_s: float) -> list[Heard]:
        # A process that the task has forked holds the connection open when its parent is gone: the sentinel tells.
        places = [place for process, connection in self._children.values() for place in (connection, process.sentinel)]
        ready = wait(places, timeout_s)
        return [
            self._hear_one(number)
            for number, (process, connection) in list(self._children.items())
            if connection in ready or process.sentinel in ready
        ]

    def _hear_one(self, number: int) -> Heard:
        process, connection = self._children[number]
        try:
            if not connection.poll(0):  # all that it wrote has been read
                raise EOFError
            return Heard(number, connection.recv_bytes(LONGEST_MESSAGE).decode())
        except (EOFError, OSError):
            process.join(self._grace_s)
            return Heard(number, None, _how_it_ended(process.exitcode))

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
        """Let them end by themselves, which those do that were asked to; kill the others."""
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
