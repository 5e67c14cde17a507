"""`streams`: one process, one CUDA graph with a branch for each model; the models may be of any mixture.

Nothing is stacked, so nothing needs to be alike; what is saved is the host's work for every launch, and what is gained
is that small kernels of different models run at the same time. On the CPU the models take turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from podium.errors import ConfigError
from podium.sweeps.executors.base import Executor, OnEvent, Queue, Requeued
from podium.sweeps.executors.fused import take_parts
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.probe import probe
from podium.sweeps.fused.slots import train_in_slots
from podium.sweeps.recipe import Parts, Recipe, precision_of, with_threads


@final
@dataclass(frozen=True, kw_only=True)
class Streams(Executor):
    """A branch of one graph for each model."""

    width: int = 16
    """How many models train at a time, of each structure."""
    threads: int | None = None
    """Threads of each operation on the CPU; torch's own number when not given. Small models are faster with one."""

    name = "streams"
    copies_rows = False

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"streams: width must be at least 1, got {self.width}")

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        self.run_groups(recipe, [queue], on_event)

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        arrays: list[tuple[Array, Queue]] = []
        first: dict[int, list[Parts]] = {}
        left: list[Queue] = []
        with precision_of(recipe), with_threads(self.threads):
            for queue in queues:
                taken = take_parts(recipe, queue, self.width, self.name)
                if not taken:
                    continue
                resident = recipe.resident_of(taken[0].task)
                found = probe(recipe, [parts.trial for parts in taken], resident, rows=1)
                on_event(found.to_event(len(taken)))
                if not found.fuses:
                    left.append(Requeued(queue, [parts.trial for parts in taken]))
                    continue
                for parts in taken:
                    first[len(arrays)] = [parts]
                    arrays.append((Array(recipe, parts, resident, 1), queue))
            if arrays:
                left += train_in_slots(recipe, arrays, first, self.name, on_event)
        for queue in left:
            Sequential(threads=self.threads).run(recipe, queue, on_event)
