"""The common part of executors that start processes: their options, and how they run a pool of processes."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from podium.errors import ConfigError
from podium.launch.rendezvous import rendezvous_folder
from podium.sweeps.executors.base import Executor, OnEvent, Queue
from podium.sweeps.executors.process_pool import ProcessPool, ProcessTransport, run_pool
from podium.sweeps.executors.trial_process import Mode
from podium.sweeps.recipe import Recipe

MOST_ON_A_GPU = 16
"""How many processes share a GPU by default: beyond that, each one's context costs more than it adds."""


@dataclass(frozen=True, kw_only=True)
class ProcessExecutor(Executor):
    """Trains each trial in one of `count` processes."""

    count: int | None = None
    """How many at a time; None: as many as cores, at most 16 on a GPU."""
    mode: Mode = "eager"
    """On a GPU, `graph`: the whole step captured once and replayed; `compiled`: the same, after `torch.compile`."""
    threads: int | None = None
    """Threads of each operation in a process; None divides the cores among the processes."""
    deadline_s: float = 300.0
    """Without progress for this long, a process counts as dead."""

    def __post_init__(self) -> None:
        who = f"executor {self.name}"
        for name in ("count", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{who}: {name} must be at least 1, got {value}")
        if self.mode not in get_args(Mode):
            raise ConfigError(f"{who}: mode must be one of {', '.join(get_args(Mode))}, got {self.mode!r}")
        if not self.deadline_s > 0:
            raise ConfigError(f"{who}: deadline_s must be above 0, got {self.deadline_s}")

    def check(self, recipe: Recipe) -> None:
        self.pool(recipe)
        recipe.to_dict()

    @abstractmethod
    def transport(self, recipe: Recipe, pool: ProcessPool, spool: Path) -> AbstractContextManager[ProcessTransport]:
        """The transport, open for as long as the `with` lasts."""

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        pool = self.pool(recipe)
        with rendezvous_folder() as spool, self.transport(recipe, pool, spool) as transport:
            run_pool(pool, transport, recipe, spool, queue, on_event)

    def pool(self, recipe: Recipe) -> ProcessPool:
        """The pool that the options give on this machine."""
        on_gpu = recipe.torch_device.type == "cuda"
        if self.mode != "eager" and not on_gpu:
            raise ConfigError(f"executor {self.name}: mode={self.mode} needs a GPU, got device {recipe.torch_device}")
        cores = len(os.sched_getaffinity(0))
        count = self.count or (min(MOST_ON_A_GPU, cores) if on_gpu else cores)
        return ProcessPool(
            executor=self.name,
            count=count,
            mode=self.mode,
            threads=self.threads or max(1, cores // count),
            deadline_s=self.deadline_s,
            most_losses=max(8, 2 * count),  # when memory runs out, all processes may be lost at once
        )
