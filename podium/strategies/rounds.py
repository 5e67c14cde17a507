"""A round: what lies between two exchanges, where workers step by themselves in between.

A round is to such strategies what a step is to synchronous ones: the unit of retry. Should a worker be lost in the
middle of it, the others go back to where it began, and its samples are divided among those who are left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from podium.engine.buffers import Snapshot
from podium.engine.generators import State

if TYPE_CHECKING:
    from podium.engine.worker import Batch


@dataclass
class Round:
    """This worker's part of the round under way."""

    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    """Summed over the samples."""
    busy_ns: int = 0
    """Time spent computing, on the world's clock."""

    def add(self, batch: Batch, loss: float, busy_ns: int) -> None:
        self.steps += 1
        self.samples += batch.samples
        self.loss += loss * batch.samples
        self.busy_ns += busy_ns


class Mark(NamedTuple):
    """All that a worker was when its round began."""

    state: dict[str, Any]
    generators: State
    buffers: Snapshot
    samples_since: int  # that its buffers have seen since they were made alike


def joined(tensors: list[Tensor]) -> Tensor:
    """All of them as one flat tensor, to travel together."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors]) if tensors else torch.empty(0)


def part_again(flat: Tensor, tensors: list[Tensor]) -> None:
    """The inverse of `joined`: back to where they came from."""
    offset = 0
    for tensor in tensors:
        tensor.copy_(flat[offset : offset + tensor.numel()].view_as(tensor))
        offset += tensor.numel()
