"""MNIST from its IDX files, with LeNet-5, a perceptron and a small convolutional net. LeCun et al., 1998."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from podium.data.base import ArrayDataset, Data
from podium.data.idx import read_idx_pair
from podium.errors import ConfigError
from podium.task import Task, accuracy
from podium.tasks.recipes import AdamRecipe, Sgd, need_data_dir

_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte and t10k-…"


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
    folder = need_data_dir("mnist-lenet5", data_dir, _FILES)
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


def mnist_mlp(
    *,
    data_dir: str | None = None,
    hidden: Sequence[int] = (256, 128),
    dropout: float | None = None,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    batch_size: int = 64,
    epochs: int = 10,
) -> Task:
    """MNIST with a multi-layer perceptron (784-256-128-10); `dropout` adds a dropout layer after each hidden one."""
    return _sgd_task("mnist-mlp", data_dir, partial(mnist_net, tuple(hidden), dropout), lr, momentum, weight_decay,
                     batch_size, epochs)  # fmt: skip


def mnist_cnn(
    *,
    data_dir: str | None = None,
    channels: Sequence[int] = (32, 64),
    dropout: float | None = None,
    lr: float = 0.02,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    batch_size: int = 64,
    epochs: int = 10,
) -> Task:
    """MNIST with two 3 × 3 convolutions and two linear layers (1.2 million parameters), as in PyTorch's example.

    `dropout` adds a dropout layer before each linear one.
    """
    return _sgd_task("mnist-cnn", data_dir, partial(mnist_convolutions, tuple(channels), dropout), lr, momentum,
                     weight_decay, batch_size, epochs)  # fmt: skip


def _sgd_task(
    name: str,
    data_dir: str | None,
    model: Callable[[], nn.Module],
    lr: float,
    momentum: float,
    weight_decay: float,
    batch_size: int,
    epochs: int,
) -> Task:
    folder = need_data_dir(name, data_dir, _FILES)
    return Task(
        name=name,
        model=model,
        data=partial(mnist, folder),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay),
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


def mnist_net(hidden: Sequence[int], dropout: float | None) -> nn.Sequential:
    """Linear layers with ReLU between them, on the flattened image."""
    layers: list[nn.Module] = [nn.Flatten()]
    for wide, narrow in itertools.pairwise((784, *hidden)):
        layers += [nn.Linear(wide, narrow), nn.ReLU(), *_dropout(dropout)]
    return nn.Sequential(*layers, nn.Linear(hidden[-1], 10))


def mnist_convolutions(channels: Sequence[int], dropout: float | None) -> nn.Sequential:
    """Two convolutions without padding, pooling by two, a hidden layer of 128."""
    if len(channels) != 2:
        raise ConfigError(f"mnist-cnn: channels must be two numbers, got {list(channels)}")
    first, second = channels
    return nn.Sequential(
        nn.Conv2d(1, first, 3), nn.ReLU(),
        nn.Conv2d(first, second, 3), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), *_dropout(dropout),
        nn.Linear(144 * second, 128), nn.ReLU(), *_dropout(dropout),
        nn.Linear(128, 10),
    )  # fmt: skip


def _dropout(rate: float | None) -> list[nn.Module]:
    return [] if rate is None else [nn.Dropout(rate)]


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
