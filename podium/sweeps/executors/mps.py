"""Trials in processes that share the GPU through MPS: their kernels run side by side instead of taking turns.

Killing a busy client may harm all other clients, so processes are asked to stop between two steps and given time for
it; a process that must be killed anyway is taken off the GPU first. A fault of one process may fail the trials of all:
each is handed in as failed, and the next trials go to new processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import final

from podium.errors import ConfigError, DeadlineExceeded
from podium.sweeps.executors.mps_daemon import MpsDaemon
from podium.sweeps.executors.process_executor import ProcessExecutor
from podium.sweeps.executors.process_pool import ProcessPool, ProcessTransport
from podium.sweeps.executors.processes import ForkedProcesses
from podium.sweeps.recipe import Recipe

GRACE_S = 60.0
"""How long a client may take to finish its step or evaluation."""


@final
@dataclass(frozen=True, kw_only=True)
class Mps(ProcessExecutor):
    """Trials in processes that compute on the GPU at the same time. A GPU serves at most 48."""

    name = "mps"

    active_thread_percentage: float | None = None
    """The share of the GPU's multiprocessors that each process may use at most; None: all of them."""
    memory_limit: str | None = None
    """GPU memory that each process may take, such as `4G`; None: whatever is free."""
    env: Mapping[str, str] | None = None
    """Environment variables, over those of this process."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_clients(self.name, self.count)

    def check(self, recipe: Recipe) -> None:
        need_gpu(self.name, recipe)
        super().check(recipe)

    @contextmanager
    def transport(self, recipe: Recipe, pool: ProcessPool, spool: Path) -> Iterator[ProcessTransport]:
        with daemon_for(self.name, recipe) as daemon:
            limits = daemon.env(active_thread_percentage=self.active_thread_percentage, memory_limit=self.memory_limit)
            env = {**(self.env or {}), **limits}
            with ForkedProcesses(env, grace_s=GRACE_S, before_kill=partial(take_off, daemon)) as processes:
                yield processes


def check_clients(executor: str, count: int | None) -> None:
    most = MpsDaemon.limit_of_clients
    if count is not None and count > most:
        raise ConfigError(f"executor {executor}: count must be at most {most}, what MPS serves on one GPU, got {count}")


def need_gpu(executor: str, recipe: Recipe) -> None:
    if recipe.torch_device.type != "cuda":
        raise ConfigError(f"executor {executor}: MPS needs a GPU, got device {recipe.torch_device}")


@contextmanager
def daemon_for(executor: str, recipe: Recipe) -> Iterator[MpsDaemon]:
    """An MPS daemon that runs inside the `with`."""
    need_gpu(executor, recipe)
    with MpsDaemon() as daemon:
        yield daemon


def take_off(daemon: MpsDaemon, pid: int) -> None:
    """Take a client's work off the GPU, so that its process can be killed; gives up if the daemon does not answer."""
    with contextlib.suppress(OSError, ValueError, DeadlineExceeded):
        daemon.terminate(pid)
