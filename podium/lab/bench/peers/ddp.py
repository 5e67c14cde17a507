"""DistributedDataParallel in the loop of its documentation, for every bench that compares with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from podium.task import Task

Batches = Iterator[tuple[Tensor, Tensor]]

_SENDS_BUFFERS = (  # torch 2.13 has renamed the option
    "forward_sync_buffers"
    if "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters
    else "broadcast_buffers"
)
DDP_TUNED = "ddp_tuned"
DDP_OPTIONS: dict[str, dict[str, Any]] = {
    "ddp": {},
    "ddp_bucket_views": {"gradient_as_bucket_view": True},
    DDP_TUNED: {"gradient_as_bucket_view": True, _SENDS_BUFFERS: False},
}
"""DDP as a plain script has it, and tuned: its ranks also keep freed memory, and send no buffers, as Podium's do."""


def join_gloo(rank: int, size: int, store: Path) -> None:
    """Make this process a rank of gloo's default group."""
    dist.init_process_group("gloo", store=FileStore(str(store), size), rank=rank, world_size=size)


def ddp_step(
    task: Task, batches: Batches, prepare: Callable[[Any], None] = lambda model: None, **options: Any
) -> tuple[Callable[[], None], torch.nn.Module]:
    """A training step on the next batch, and the model; `options` are DDP's, `prepare` gets the wrapped model."""
    torch.manual_seed(0)
    model = DistributedDataParallel(task.model(), **options)
    prepare(model)
    return plain_step(task, model, batches), model


def plain_step(task: Task, model: torch.nn.Module, batches: Batches) -> Callable[[], None]:
    """A training step on the next batch, as in any script."""
    optimizer = task.optimizer(model)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()

    return step
