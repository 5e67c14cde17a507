"""DistributedDataParallel in the loop of its documentation, for every bench that compares with it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from podium.task import Task

Batches = Iterator[tuple[Tensor, Tensor]]


def join_gloo(rank: int, size: int, store: Path) -> None:
    """Make this process a rank of gloo's default group."""
    dist.init_process_group("gloo", store=FileStore(str(store), size), rank=rank, world_size=size)


def ddp_step(
    task: Task, batches: Batches, prepare: Callable[[Any], None] = lambda model: None, **options: Any
) -> tuple[Callable[[], None], torch.nn.Module]:
    """A training step on the next batch, and the model; `options` are DDP's, `prepare` gets the wrapped model."""
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = DistributedDataParallel(task.model(), **options)
    prepare(model)
    optimizer = task.optimizer(model)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()

    return step, model
