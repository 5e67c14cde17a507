"""How many samples fit into a worker's memory at a time, by what passes have taken so far.

Cost model: between steps a worker holds a fixed amount; a pass over b samples takes more, at most in proportion to b.
What is fixed in a pass is counted as if it grew, too, so the answer errs on the side of fewer; but what has gone well
once is never said not to fit. It does not know of other workers on the same device, other than by the memory that they
hold already.
"""

from __future__ import annotations

import torch

PART = 0.9
"""Of the device's memory that this worker can have, the part that is planned with."""


class Memory:
    """One worker's memory, as passes showed it."""

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
        """How many samples fit at a time; None where there is no telling: on a CPU, or before the first pass."""
        if self._device.type != "cuda" or not self._largest:
            return None
        free, _ = torch.cuda.mem_get_info(self._device)
        mine = torch.cuda.memory_reserved(self._device)
        held = torch.cuda.memory_allocated(self._device)
        return fitting(self._largest, self._peak_bytes - held, PART * (free + mine) - held)


def fitting(samples: int, taken_bytes: float, free_bytes: float) -> int | None:
    """How many samples fit, where `samples` took `taken_bytes`; None where no memory was seen to be taken."""
    if taken_bytes <= 0:
        return None
    return max(samples, int(samples * free_bytes / taken_bytes))
