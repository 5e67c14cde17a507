"""`fused`: trials of one structure as the rows of one array; arrays of different structures side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import final

import torch

from podium.errors import ConfigError
from podium.sweeps.executors.base import Executor, OnEvent, Queue, Requeued
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.fused.array import Array, Mode
from podium.sweeps.fused.bundle import Bundle
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.probe import Verified, probe
from podium.sweeps.fused.slots import failed, train_in_slots
from podium.sweeps.fused.widths import widest
from podium.sweeps.recipe import Parts, Recipe, precision_of, with_threads

WIDTH = {"cuda": 256, "cpu": 64}
"""Rows of an array, at most, when nobody says."""


@final
@dataclass(frozen=True, kw_only=True)
class Fused(Executor):
    """Many models in one: stacked parameters, one step for all, captured as one CUDA graph on a GPU."""

    width: int | None = None
    """Rows of an array; as many as there are trials, up to what memory holds, when not given."""
    compiled: bool = False
    """Whether the step goes through `torch.compile` first: faster steps after a wait of a minute or so."""
    captured: bool = True
    """Whether a step is captured in a CUDA graph (on a GPU)."""
    fast: bool | None = None
    """Whether layers are swapped for forms made for many models at once; on a GPU they are, when nobody says."""
    probed: bool = True
    """Whether each structure is first verified against the same trials alone."""
    mode: Mode = "forward"
    """What `vmap` goes over, where nothing is probed: recurrent nets need `gradient`."""
    narrows: bool = True
    """Whether trials move into narrower arrays when others have ended. It depends on times, so two runs of a sweep may
    differ in rounding; without it they do not."""
    threads: int | None = None
    """Threads of each operation on the CPU; torch's own number when not given. Small models are faster with one."""

    name = "fused"
    copies_rows = True

    def __post_init__(self) -> None:
        if self.width is not None and self.width < 1:
            raise ConfigError(f"fused: width must be at least 1, got {self.width}")
        if self.mode not in ("forward", "gradient"):
            raise ConfigError(f"fused: mode must be 'forward' or 'gradient', got {self.mode!r}")

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        self.run_groups(recipe, [queue], on_event)

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        """All groups in one bundle, a branch each. What cannot be fused is trained after them, one by one."""
        arrays: list[tuple[Array, Queue]] = []
        first: dict[int, list[Parts]] = {}
        left: list[Queue] = []
        with precision_of(recipe), with_threads(self.threads):
            for queue in queues:
                if queue.stop_requested():
                    return
                taken = take_parts(recipe, queue, self.width or WIDTH[recipe.torch_device.type], self.name)
                if not taken:
                    continue
                resident = recipe.resident_of(taken[0].task)
                found = self._verify(recipe, taken, resident, on_event, queue.stop_requested)
                if not found.fuses:
                    left.append(Requeued(queue, [parts.trial for parts in taken]))
                    continue
                rows = self._rows(recipe, taken, resident, found, 1 / len(queues))
                first[len(arrays)] = taken[:rows]
                more = Requeued(queue, [parts.trial for parts in taken[rows:]])
                arrays.append((self._array(recipe, taken[0], resident, found, rows), more))
        self._train(recipe, arrays, first, on_event, left=left)

    def run_made(self, recipe: Recipe, queue: Queue, on_event: OnEvent, taken: Sequence[Parts], bundle: Bundle) -> None:
        """Train these trials of the queue, and all others, in a bundle's one array, whatever it held before."""
        rows = bundle.arrays[0].rows
        for row in range(rows):
            bundle.arrays[0].release(row)
        more = Requeued(queue, [parts.trial for parts in taken[rows:]])
        self._train(recipe, [(bundle.arrays[0], more)], {0: list(taken[:rows])}, on_event, bundle=bundle)

    def _train(
        self,
        recipe: Recipe,
        arrays: list[tuple[Array, Queue]],
        first: dict[int, list[Parts]],
        on_event: OnEvent,
        *,
        left: Sequence[Queue] = (),
        bundle: Bundle | None = None,
    ) -> None:
        """Train in these arrays, then one by one what came back from there, and what is `left` anyway."""
        returned: list[Queue] = []
        if arrays:
            with precision_of(recipe), with_threads(self.threads):
                returned = train_in_slots(
                    recipe, arrays, first, self.name, on_event,
                    captured=self.captured, narrows=self.narrows, bundle=bundle,
                )  # fmt: skip
        for queue in (*left, *returned):
            Sequential(threads=self.threads).run(recipe, queue, on_event)

    def _verify(
        self,
        recipe: Recipe,
        taken: Sequence[Parts],
        resident: DeviceData,
        on_event: OnEvent,
        stop: Callable[[], bool],
    ) -> Verified:
        if not self.probed:
            return Verified(fuses=True, mode=self.mode)
        found = probe(recipe, [parts.trial for parts in taken], resident, stop=stop)
        on_event(found.to_event(len(taken)))
        return found

    def _rows(self, recipe: Recipe, taken: Sequence[Parts], resident: DeviceData, found: Verified, share: float) -> int:
        return self.width or widest(recipe, taken[0], resident, len(taken), found.mode, share)

    def _array(self, recipe: Recipe, first: Parts, resident: DeviceData, found: Verified, rows: int) -> Array:
        if recipe.torch_device.type == "cuda":
            torch.cuda.empty_cache()
        return Array(
            recipe, first, resident, rows, mode=found.mode, fast=self.fast,
            compiled=self.compiled and found.mode == "forward",
        )  # fmt: skip


def take_parts(recipe: Recipe, queue: Queue, most: int, executor: str) -> list[Parts]:
    """So many trials from the queue, made; one that cannot be made is handed in as failed."""
    taken: list[Parts] = []
    while len(taken) < most and (trial := queue.take()) is not None:
        try:
            taken.append(recipe.make(trial))
        except Exception as error:  # this trial's, not the sweep's
            queue.hand_in(failed(trial, error, executor), None)
    return taken
