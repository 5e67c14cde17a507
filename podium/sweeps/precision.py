"""How a device computes for a sweep: precision of matrix products, autocast, threads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from podium.sweeps.recipe import Recipe
from podium.task import Task


@contextmanager
def precision_of(recipe: Recipe) -> Iterator[None]:
    """Set whether float32 matrix products and convolutions use TF32, and restore the earlier setting."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    short = recipe.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """Run operations inside with `count` threads; None leaves the number as it is."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computing(recipe: Recipe, task: Task) -> torch.autocast:
    """The autocast context of a forward pass; enabled where the recipe or the task wants bf16."""
    # Autocast's cache of converted parameters would outlive a captured graph's memory.
    wanted = "bf16" in (recipe.precision, task.autocast)
    return torch.autocast(recipe.torch_device.type, torch.bfloat16, enabled=wanted, cache_enabled=False)
