"""Tasks whose model, loss and data draw from torch's, numpy's and Python's global generators.

Ranks load this file by its path: it imports no test.
"""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from podium.data.base import ArrayDataset, Data, MapDataset
from podium.task import Task

TASK = f"{Path(__file__).resolve()}:task"


def drawn() -> list[float]:
    """One number from each; the normal one, so that numpy keeps a second one for later."""
    return [float(torch.rand(())), float(np.random.randn()), random.random()]


class Augmented(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        self.inputs = torch.randn(96, 5, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index] + 0.01 * sum(drawn()), self.inputs[index, :1].tanh()


class Model(nn.Module):
    """Its parameters are drawn from numpy; so is noise, in training."""

    def __init__(self, log: str) -> None:
        super().__init__()
        self.linear, self.log = nn.Linear(5, 1), log
        self.linear.weight.data = torch.from_numpy(np.random.randn(1, 5).astype(np.float32))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            numbers = drawn()
            if self.log:
                where = f"{os.getpid()}-{threading.get_ident()}.txt"
                with (Path(self.log) / where).open("a") as file:
                    file.write(" ".join(map(str, numbers)) + "\n")
            x = x + 0.01 * sum(numbers)
        return self.linear(x)  # type: ignore[no-any-return]


def data() -> Data:
    test = torch.randn(8, 5, generator=torch.Generator().manual_seed(4))
    return Data(MapDataset(Augmented()), ArrayDataset(test, test[:, :1].tanh()))


def task(log: str = "") -> Task:
    return Task(
        name="drawing",
        model=lambda: Model(log),
        data=data,
        loss=nn.functional.mse_loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.05),
        batch_size=24,
        epochs=3,
    )
