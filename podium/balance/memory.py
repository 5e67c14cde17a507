"""How many samples fit into a worker's memory at a time, estimated from past passes.

Cost model: between steps a worker has a fixed amount allocated; a pass over b samples takes more, at most in proportion
to b. The fixed memory of a pass is counted as if it grew with b too, so the estimate errs on the side of fewer; but a
size that succeeded once always fits. Of other workers on the same device it sees only the memory they have allocated
already.
"""

from __future__ import annotations

import torch

PART = 0.9
"""The part of this worker's available device memory that may be planned for."""


class Memory:
    """One worker's memory, learnt from its passes."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._largest = 0  # samples of the largest pass so far
        self._peak_bytes = 0  # at its end

    def observe(self, samples: int) -> None:
        """A pass over this many samples at a time succeeded."""
        if self._device.type != "cuda" or samples <= self._largest:
            return
        self._largest = samples
        self._peak_bytes = torch.cuda.max_memory_allocated(self._device)

    @property
    def most(self) -> int | None:
        """How many samples fit at a time; None where unknown: on a CPU, or before the first pass."""
        if self._device.type != "cuda" or not self._largest:
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        mine = torch.cuda.memory_reserved(self._device)
        held = torch.cuda.memory_allocated(self._device)
        return fitting(self._largest, self._peak_bytes - held, PART * (free + mine) - held)


def fitting(samples: int, taken_bytes: float, free_bytes: float) -> int | None:
    """How many samples fit, where `samples` took `taken_bytes`; None where `taken_bytes` is not positive."""
    if taken_bytes <= 0:
        return None
    return max(samples, int(samples * free_bytes / taken_bytes))
