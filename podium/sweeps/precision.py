"""How a device computes for a sweep: precision of products, autocast, threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from podium.sweeps.recipe import Recipe
from podium.task import Task


@contextmanager
def precision_of(recipe: Recipe) -> Iterator[None]:
    """The sweep's way to multiply single precision numbers on a GPU; what was set before comes back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    short = recipe.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """So many threads for each operation inside; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computing(recipe: Recipe, task: Task) -> torch.autocast:
    """What a forward pass of this recipe runs in: autocast, switched on where it is asked for."""
    # Its cache of converted parameters would outlive a captured graph's memory.
    wanted = "bf16" in (recipe.precision, task.autocast)
    return torch.autocast(recipe.torch_device.type, torch.bfloat16, enabled=wanted, cache_enabled=False)
