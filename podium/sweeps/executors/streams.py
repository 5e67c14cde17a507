"""`streams`: one process, one CUDA graph with a branch for each model; the models need not be alike.

Nothing is stacked, so models of different structure run together. The graph saves the host's work for every launch, and
small kernels of different models run at the same time. On the CPU the models take turns.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from podium.errors import ConfigError
from podium.sweeps.executors.arrays import ArrayExecutor
from podium.sweeps.executors.base import Queue
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.probe import ProbeResult
from podium.sweeps.fused.slots import ArrayGroup
from podium.sweeps.parts import Parts
from podium.sweeps.recipe import Recipe


@final
@dataclass(frozen=True, kw_only=True)
class Streams(ArrayExecutor):
    """A branch of one graph for each model."""

    width: int = 16
    """How many models train at a time, of each structure."""
    threads: int | None = None
    """Threads of each operation on the CPU; torch's own number when not given. Small models are faster with one."""

    name = "streams"
    rows_probed = 1

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ConfigError(f"streams: width must be at least 1, got {self.width}")

    def rows_at_a_time(self, recipe: Recipe) -> int:
        return self.width

    def groups_of(
        self, recipe: Recipe, queue: Queue, taken: Sequence[Parts], data: DeviceData, found: ProbeResult, share: float
    ) -> Iterator[ArrayGroup]:
        for parts in taken:
            yield ArrayGroup(Array(recipe, parts, data, 1), queue, [parts])
