"""MNIST from its IDX files, with LeNet-5. LeCun et al., 1998."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from podium.data.base import ArrayDataset, Data
from podium.data.idx import read_idx_pair
from podium.task import Task, accuracy
from podium.tasks.recipes import AdamRecipe, Sgd, need_data_dir


def mnist_lenet5(
    *,
    data_dir: str | None = None,
    optimizer: Literal["sgd", "adam"] = "sgd",
    lr: float | None = None,
    momentum: float = 0.5,
    weight_decay: float = 0.0,
    batch_size: int = 64,
    epochs: int = 10,
) -> Task:
    """MNIST with LeNet-5 (61,706 parameters); `data_dir` holds the four IDX files, packed (.gz) or not.

    `lr` is 0.05 for `sgd` and 0.001 for `adam`, which has no `momentum`, when not given.
    """
    make: Sgd | AdamRecipe = Sgd(lr=0.05 if lr is None else lr, momentum=momentum, weight_decay=weight_decay)
    if optimizer == "adam":
        make = AdamRecipe(lr=0.001 if lr is None else lr, weight_decay=weight_decay)
    folder = need_data_dir("mnist-lenet5", data_dir, "train-images-idx3-ubyte, train-labels-idx1-ubyte and t10k-…")
    return Task(
        name="mnist-lenet5",
        model=lenet5,
        data=partial(mnist, folder),
        loss=cross_entropy,
        optimizer=make,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


def lenet5() -> nn.Sequential:
    """LeNet-5 as it is built today: ReLU and max pooling, all maps connected."""
    return nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(),
        nn.Linear(120, 84), nn.ReLU(),
        nn.Linear(84, 10),
    )  # fmt: skip


def mnist(folder: Path) -> Data:
    """Images as 1 × 28 × 28 numbers of about zero mean and unit variance."""
    train, test = (ArrayDataset(*read_idx_pair(folder, split), prepare=scale) for split in ("train", "t10k"))
    return Data(train=train, test=test)


def scale(pixels: Tensor) -> Tensor:
    """Bytes to numbers, by the training set's mean and deviation."""
    return pixels[:, None].to(torch.float32).div_(255).sub_(0.1307).div_(0.3081)
