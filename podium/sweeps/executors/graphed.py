"""One trial by itself, its whole step captured in one CUDA graph: an array of one row."""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

from torch import Tensor

from podium.sweeps.fused.array import Array
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.parts import Parts
from podium.sweeps.recipe import Recipe
from podium.sweeps.trial import Evaluation, Trial


class GraphedTrainer:
    """A trial in training, with the methods of `ReferenceTrainer`. Trials of one structure use one captured step."""

    def __init__(
        self,
        recipe: Recipe,
        trial: Trial,
        device_data: DeviceData,
        parts: Parts | None = None,
        graphs: MutableMapping[Any, Any] | None = None,
        *,
        compiled: bool = False,
    ) -> None:
        self.recipe, self.trial, self.device_data = recipe, trial, device_data
        self.parts = recipe.make(trial) if parts is None else parts
        shared = {} if graphs is None else graphs
        key = self.parts.structure
        if key not in shared:
            array = Array(recipe, self.parts, device_data, 1, compiled=compiled)
            shared[key] = (array, CapturedStep([array]))
        self.array: Array
        self._bundle: CapturedStep
        self.array, self._bundle = shared[key]
        self.array.load(0, self.parts)
        self.steps_done, self._filled_to = 0, 0

    @property
    def is_over(self) -> bool:
        return self.steps_done >= self.parts.steps

    @property
    def loss(self) -> Tensor:
        return self.array.loss[0]

    def step(self) -> None:
        """One step; on a GPU this returns before the step is done."""
        if self.steps_done >= self._filled_to:
            self.array.refill([self.steps_done])
            self._filled_to = self.steps_done + self.array.window
        self._bundle.run(1)
        self.steps_done += 1

    def evaluate(self) -> Evaluation:
        found = self.array.evaluate([0], [self.steps_done])[0]
        if isinstance(found, Exception):
            raise found
        return found

    def state(self) -> dict[str, Tensor]:
        """Its `state_dict`, on the CPU."""
        return self.array.save(0)
