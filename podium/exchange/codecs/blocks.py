"""Work in blocks that fit a core's cache, on scratch memory that is reused.

Fresh memory is slow on a CPU: every page is faulted in. So intermediates are as small as a block, and each thread
reuses its own. A GPU is faster with one large block, and its allocator already caches freed memory.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

BLOCK = 1 << 16
"""Elements per block on a CPU: 256 KB of float32, so that three of them fit the second-level cache."""


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.kept: dict[tuple[torch.dtype, int], Tensor] = {}


_SCRATCH = _Scratch()


def scratch(numel: int, dtype: torch.dtype, device: torch.device, slot: int = 0) -> Tensor:
    """Temporary memory, overwritten when the same thread requests the same dtype and slot again."""
    if device.type != "cpu":
        return torch.empty(numel, dtype=dtype, device=device)
    kept = _SCRATCH.kept.get((dtype, slot))
    if kept is None or kept.numel() < numel:
        kept = _SCRATCH.kept[dtype, slot] = torch.empty(max(numel, BLOCK), dtype=dtype)
    return kept[:numel]


def blocks(numel: int, device: torch.device, size: int = BLOCK) -> Iterator[tuple[int, int]]:
    """Start and stop of each block; one block on a GPU."""
    step = size if device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def as_float32(block: Tensor, slot: int = 0) -> Tensor:
    """This block in float32: itself, or a copy in scratch."""
    if block.dtype == torch.float32:
        return block
    return scratch(block.numel(), torch.float32, block.device, slot).copy_(block)


def add_into(base: Tensor, change: Tensor, alpha: float, out: Tensor) -> None:
    """`out = base + alpha * change`; `change` is first converted to the dtype of `base`."""
    if change.dtype != base.dtype:
        change = scratch(change.numel(), base.dtype, base.device, slot=7).copy_(change)
    torch.add(base, change, alpha=alpha, out=out)


def view_as(raw: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes of a wire as numbers; a copy where they are not aligned for a view."""
    if raw.storage_offset() % dtype.itemsize or raw.data_ptr() % dtype.itemsize:
        raw = raw.clone()
    return raw.view(dtype)


def words(count: int, *key: int) -> npt.NDArray[np.uint64]:
    """Random 64-bit words that depend on the key alone, the same on every machine."""
    entropy = [part & 0xFFFF_FFFF_FFFF_FFFF for part in key]
    return np.random.PCG64(np.random.SeedSequence(entropy)).random_raw(count)


def below(limits: npt.NDArray[np.int64], *key: int) -> npt.NDArray[np.int64]:
    """One random whole number from 0 to below each limit (at most 2**31)."""
    high = words(len(limits), *key) >> np.uint64(32)
    return ((high * limits.astype(np.uint64)) >> np.uint64(32)).astype(np.int64)
