"""Small tasks and loops whose data may come out otherwise on every rank, as a split without a seed does.

Ranks load this file by its path: it imports no test.
"""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from podium.data.base import ArrayDataset, Data, Dataset, MapDataset
from podium.task import Task

TASK = f"{Path(__file__).resolve()}:task"
SAMPLES, TESTED = 192, 64
_OWN = random.SystemRandom()
"""Differs in every process, whoever seeds what."""


def arrays(count: int = SAMPLES + TESTED) -> tuple[np.ndarray, np.ndarray]:
    """Inputs, each of which holds its own number, and targets; the same everywhere."""
    inputs = np.random.default_rng(3).normal(size=(count, 5)).astype(np.float32)
    inputs[:, 0] = np.arange(count)
    return inputs, (inputs[:, 1:2] > 0).astype(np.float32)


class Noisy(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Augmentation as people write it: `how` says which generator it draws from."""

    def __init__(self, how: str) -> None:
        inputs, targets = arrays(SAMPLES)
        self.inputs, self.targets = torch.from_numpy(inputs), torch.from_numpy(targets)
        self.how, self.own = how, np.random.default_rng()

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        draw = {
            "torch": lambda: float(torch.randn(())),
            "numpy": lambda: float(np.random.randn()),
            "python": random.random,
            "own": lambda: float(self.own.normal()),
        }[self.how]
        return self.inputs[index] + 0.01 * draw(), self.targets[index]


def data(how: str) -> Data:
    inputs, targets = arrays()
    order = list(range(len(inputs)))
    if how == "split":
        _OWN.shuffle(order)
    train, test = order[:SAMPLES], order[SAMPLES:]
    if how == "test":
        _OWN.shuffle(test)
    if how == "length":
        train = train[: SAMPLES - own_rank()]  # by rank: two draws are equal now and then, and nothing differs then
    if how == "labels":  # of 192 samples a rank has a few of its own
        targets = targets.copy()
        targets[_OWN.sample(range(SAMPLES), 3)] += 1.0
    if how == "subset":
        both = torch.utils.data.TensorDataset(torch.from_numpy(inputs), torch.from_numpy(targets))
        _OWN.shuffle(order)
        parts = (torch.utils.data.Subset(both, order[:SAMPLES]), torch.utils.data.Subset(both, order[SAMPLES:]))
        return Data(MapDataset(parts[0]), MapDataset(parts[1]))
    if how in ("torch", "numpy", "python", "own"):
        return Data(MapDataset(Noisy(how)), ArrayDataset(inputs[test], targets[test]))
    return Data(*(ArrayDataset(inputs[rows], targets[rows]) for rows in (train, test)))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))


def task(how: str = "same") -> Task:
    return Task(
        name="apart",
        model=model,
        data=lambda: data(how),
        loss=nn.functional.mse_loss,
        optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.01),
        batch_size=48,
        epochs=1,
    )


class Watched(Dataset):
    """Notes which samples were trained on: those that are asked for with their keys."""

    def __init__(self, held: Dataset) -> None:
        self.held, self.used = held, [0] * (SAMPLES + TESTED)

    def __len__(self) -> int:
        return len(self.held)

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
        inputs, targets = self.held.gather(indices, keys)
        for number in inputs[:, 0].tolist() if keys is not None else ():
            self.used[round(number)] += 1
        return inputs, targets


def own_rank() -> int:
    """The rank whose process this is."""
    import multiprocessing

    name = multiprocessing.current_process().name
    return int(name.removeprefix("podium-")) if name.startswith("podium-") else int(os.environ.get("RANK", "0"))


def loop(how: str) -> None:
    """A loop of one's own; `how` says what differs by rank."""
    import podium

    torch.manual_seed(0)
    net, rank = model(), own_rank()
    rate = 0.01 * (1 + rank) if how == "rate" else 0.01
    run = podium.join(net, torch.optim.SGD(net.parameters(), lr=rate), seed=rank if how == "seed" else 0)
    rows = 24 * (1 + rank) if how == "batch_size" else 24
    train = data(how).train
    for inputs, targets in run.batches(train, batch_size=rows, epochs=1 + rank if how == "epochs" else 1):
        run.step(lambda x=inputs, y=targets: nn.functional.mse_loss(net(x), y))
    if run.is_first:
        print("trained", run.param_hash(), flush=True)


if __name__ == "__main__":
    import sys

    loop(sys.argv[1])
