"""Arrays that step side by side: on a GPU one captured graph with a branch for each, replayed step after step.

A replay costs the host a few microseconds for any number of models, and branches run at the same time where the GPU has
room. On the CPU, or where a step cannot be captured, arrays step one after another.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from podium.sweeps.fused.array import Array


_WARM_UP = 3
"""Steps before a capture: libraries choose their kernels and allocate in the first ones."""


class CapturedStep:
    """Steps these arrays together."""

    def __init__(self, arrays: Sequence[Array], *, captured: bool | None = None) -> None:
        """`captured`: whether to capture the step; None captures on a GPU wherever the optimizers allow."""
        self.arrays = list(arrays)
        self.device = arrays[0].device
        possible = self.device.type == "cuda" and all(array.optimizer.capturable for array in arrays)
        self.captured = possible if captured is None else captured and possible
        self._graph: torch.cuda.CUDAGraph | None = None
        self.start_s: float | None = None
        """Seconds of capture and compilation; without a capture, of the first step."""

    def run(self, steps: int) -> None:
        """Take this many steps. On a GPU the call returns before they are done."""
        began = time.perf_counter()
        if self.captured and self._graph is None:
            self._capture()
            self.start_s = time.perf_counter() - began
        for _ in range(steps):
            if self._graph is not None:
                self._graph.replay()
            else:
                self._step()
            if self.start_s is None:
                self.start_s = time.perf_counter() - began

    def close(self) -> None:
        """Drop the graph and the arrays, so that their memory is freed unless something else refers to them."""
        self._graph, self.arrays = None, []

    def _step(self) -> None:
        for array in self.arrays:
            array.step()

    def _capture(self) -> None:
        """Capture one step. Warm-up steps change the arrays, so their values are restored."""
        held = [[tensor.clone() for tensor in array.tensors()] for array in self.arrays]
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                self._step()
                for array in self.arrays:
                    array.tick.zero_()  # repeat the first step: the window may be shorter than the warm-up
        torch.cuda.current_stream(self.device).wait_stream(side)
        torch.cuda.synchronize(self.device)
        gc.collect()  # a tensor freed while capturing would end the capture
        graph = torch.cuda.CUDAGraph()
        branches = [torch.cuda.Stream(self.device) for _ in self.arrays] if len(self.arrays) > 1 else []
        with torch.cuda.graph(graph):
            self._fork_and_join(branches)
        for array, values in zip(self.arrays, held, strict=True):
            for tensor, value in zip(array.tensors(), values, strict=True):
                tensor.copy_(value)
        torch.cuda.synchronize(self.device)
        self._graph = graph

    def _fork_and_join(self, branches: Sequence[torch.cuda.Stream]) -> None:
        if not branches:
            return self._step()
        trunk = torch.cuda.current_stream(self.device)
        for array, branch in zip(self.arrays, branches, strict=True):
            branch.wait_stream(trunk)
            with torch.cuda.stream(branch):
                array.step()
        for branch in branches:
            trunk.wait_stream(branch)
        return None
