"""Trials in processes that share the GPU through MPS: their kernels run side by side instead of taking turns.

A busy client that is killed may harm all others, so processes are asked to stop between two steps and given time for
it; one that has to be killed all the same is taken off the GPU first. For the same reason a fault of one process may
fail the trials of all: each is handed in as failed, and the next ones go to fresh processes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from podium.errors import ConfigError, DeadlineExceeded
from podium.launch.rendezvous import rendezvous_folder
from podium.sweeps.executors.base import Executor, OnEvent, Queue
from podium.sweeps.executors.mps_daemon import MpsDaemon
from podium.sweeps.executors.process_pool import run_pool
from podium.sweeps.executors.processes import Children, check_options, check_recipe, pool_of
from podium.sweeps.executors.trial_process import Mode
from podium.sweeps.recipe import Recipe

GRACE_S = 60.0
"""How long a client may take to come to the end of its step, or of its evaluation."""


@final
@dataclass(frozen=True, kw_only=True)
class Mps(Executor):
    """Trials in processes that compute on the GPU at the same time."""

    name = "mps"

    count: int | None = None
    """How many at a time; None: as many as cores, at most 16. A GPU takes 48."""
    active_thread_percentage: float | None = None
    """The share of the GPU's multiprocessors that each may use at most; None: all of them."""
    memory_limit: str | None = None
    """GPU memory that each may take, such as `4G`; None: whatever is free."""
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
        check_clients(self.name, self.count)

    def check(self, recipe: Recipe) -> None:
        """Refuse what could not be trained so."""
        need_gpu(self.name, recipe)
        check_recipe(self, recipe)

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        pool = pool_of(self, recipe)
        limits = {"active_thread_percentage": self.active_thread_percentage, "memory_limit": self.memory_limit}
        with daemon_for(self.name, recipe) as daemon, rendezvous_folder() as spool:
            env = {**(self.env or {}), **daemon.env(**limits)}  # type: ignore[arg-type]  # each has its own type
            children = Children(env, grace_s=GRACE_S, before_kill=lambda pid: take_off(daemon, pid))
            run_pool(pool, children, recipe, spool, queue, on_event)


def check_clients(executor: str, count: int | None) -> None:
    most = MpsDaemon.limit_of_clients
    if count is not None and count > most:
        raise ConfigError(f"executor {executor}: count must be at most {most}, what MPS serves on one GPU, got {count}")


def need_gpu(executor: str, recipe: Recipe) -> None:
    if recipe.torch_device.type != "cuda":
        raise ConfigError(f"executor {executor}: MPS needs a GPU, got device {recipe.torch_device}")


@contextmanager
def daemon_for(executor: str, recipe: Recipe) -> Iterator[MpsDaemon]:
    """An MPS daemon for as long as trials are trained."""
    need_gpu(executor, recipe)
    with MpsDaemon() as daemon:
        yield daemon


def take_off(daemon: MpsDaemon, pid: int) -> None:
    """Take a client's work off the GPU, so that its process can be killed; a daemon that does not answer is let be."""
    with contextlib.suppress(OSError, ValueError, DeadlineExceeded):
        daemon.terminate(pid)
