"""How many rows an array may have: peak memory is linear in the number of rows.

    peak(rows) = fixed + rows × each

Both are measured by taking a step with two arrays of few rows. On the CPU nothing is measured: arrays there are small
compared to the machine's memory, and rows beyond the caches gain nothing.
"""

from __future__ import annotations

import torch

from podium.sweeps.fused.array import Array, Mode
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.parts import Parts
from podium.sweeps.recipe import Recipe

SHARE_OF_FREE = 0.8
"""How much of the free memory an array may take: captured graphs have their own memory pool."""
_FEW = (2, 4)


def widest(
    recipe: Recipe, first: Parts, device_data: DeviceData, wanted: int, mode: Mode = "forward", share: float = 1.0
) -> int:
    """As many rows as wanted, or as many as fit into `share` of the memory that may be taken."""
    if recipe.torch_device.type != "cuda" or wanted <= _FEW[1]:
        return wanted
    try:
        fixed, each = memory_line(recipe, first, device_data, mode)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return 1
    free, _ = torch.cuda.mem_get_info(recipe.torch_device)
    fits = int((SHARE_OF_FREE * share * free - fixed) // max(each, 1))
    return max(1, min(wanted, fits))


def memory_line(recipe: Recipe, first: Parts, device_data: DeviceData, mode: Mode) -> tuple[int, int]:
    """(fixed, each) in bytes."""
    device = recipe.torch_device
    peaks = []
    for rows in _FEW:
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        again = recipe.make(first.trial)  # loading consumes a trial's parts
        array = Array(recipe, again, device_data, rows, mode=mode)
        array.load(0, again)
        array.refill([0] + [None] * (rows - 1))
        array.step()
        torch.cuda.synchronize(device)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
        del array
    each = (peaks[1] - peaks[0]) // (_FEW[1] - _FEW[0])
    return max(0, peaks[0] - each * _FEW[0]), max(1, each)
