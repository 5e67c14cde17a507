"""`fused`: trials of one structure as the rows of one array; arrays of different structures side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

import torch

from podium.errors import ConfigError
from podium.sweeps.executors.arrays import ArrayExecutor, requeue
from podium.sweeps.executors.base import OnEvent, Queue
from podium.sweeps.fused.array import Array, Mode
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.probe import ProbeResult
from podium.sweeps.fused.slots import ArrayGroup
from podium.sweeps.fused.widths import widest
from podium.sweeps.parts import Parts
from podium.sweeps.recipe import Recipe

WIDTH = {"cuda": 256, "cpu": 64}
"""Rows of an array, at most, unless `width` is given."""


@final
@dataclass(frozen=True, kw_only=True)
class Fused(ArrayExecutor):
    """Many models in one: stacked parameters, one step for all, captured as one CUDA graph on a GPU."""

    width: int | None = None
    """Rows of an array; as many as there are trials, up to what memory holds, when not given."""
    compiled: bool = False
    """Whether the step goes through `torch.compile` first: faster steps after a wait of a minute or so."""
    captured: bool = True
    """Whether a step is captured in a CUDA graph (on a GPU)."""
    fast: bool | None = None
    """Whether layers are replaced by ones written for many models at once; None: on a GPU."""
    probed: bool = True
    """Whether each structure is first verified against the same trials alone."""
    mode: Mode = "forward"
    """What `vmap` maps, where nothing is probed: recurrent nets need `gradient`."""
    narrows: bool = True
    """Whether trials move into narrower arrays when other trials have ended. That depends on timing, so two runs of a
    sweep may differ in rounding; without narrowing they do not."""
    threads: int | None = None
    """Threads of each operation on the CPU; torch's own number when not given. Small models are faster with one."""

    name = "fused"
    copies_rows = True

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise ConfigError(f"fused: width must be at least 1, got {self.width}")
        if self.mode not in ("forward", "gradient"):
            raise ConfigError(f"fused: mode must be 'forward' or 'gradient', got {self.mode!r}")

    def rows_at_a_time(self, recipe: Recipe) -> int:
        return self.width or WIDTH[recipe.torch_device.type]

    def verify(
        self, recipe: Recipe, queue: Queue, taken: Sequence[Parts], data: DeviceData, on_event: OnEvent
    ) -> ProbeResult:
        if self.probed:
            return super().verify(recipe, queue, taken, data, on_event)
        return ProbeResult(fuses=True, mode=self.mode)

    def groups_of(
        self, recipe: Recipe, queue: Queue, taken: Sequence[Parts], data: DeviceData, found: ProbeResult, share: float
    ) -> Iterator[ArrayGroup]:
        rows = self.width or widest(recipe, taken[0], data, len(taken), found.mode, share)
        if recipe.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        compiled = self.compiled and found.mode == "forward"
        array = Array(recipe, taken[0], data, rows, mode=found.mode, fast=self.fast, compiled=compiled)
        yield ArrayGroup(array, requeue(recipe, queue, taken[rows:]), list(taken[:rows]))

    def run_in(
        self, step: CapturedStep, recipe: Recipe, queue: Queue, taken: Sequence[Parts], on_event: OnEvent
    ) -> None:
        """Train these trials and the rest of the queue in the one array of this step, after clearing its rows."""
        # No local variable for the array: its memory must be freed once its trials have moved into a narrower one.
        rows = step.arrays[0].rows
        for row in range(rows):
            step.arrays[0].release(row)
        group = [ArrayGroup(step.arrays[0], requeue(recipe, queue, taken[rows:]), list(taken[:rows]))]
        self.train(recipe, group, on_event, step=step)
