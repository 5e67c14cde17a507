"""Handwritten digits, 8 × 8 pixels, 1,797 of them: the default, since they come with scikit-learn and need no network.

Alpaydin and Kaynak, 1998: the test part of the UCI set "Optical Recognition of Handwritten Digits".
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from podium.data.base import ArrayDataset, Data
from podium.errors import DataError
from podium.task import Task, accuracy
from podium.tasks.recipes import Sgd, mlp

TEST_SHARE = 0.2
SPLIT_SEED = 1797
"""Fixes the test split, whatever the run's seed: runs stay comparable."""


def digits_mlp(
    *,
    hidden: Sequence[int] = (64,),
    lr: float = 0.3,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    batch_size: int = 64,
    epochs: int = 20,
) -> Task:
    """Handwritten digits (scikit-learn's, 8 × 8) with a small multi-layer perceptron; seconds on one core."""
    return Task(
        name="digits-mlp",
        model=partial(mlp, (64, *hidden, 10)),
        data=partial(digits, flat=True),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay),
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


def digits_cnn(
    *,
    channels: Sequence[int] = (16, 32),
    lr: float = 0.1,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    batch_size: int = 64,
    epochs: int = 20,
) -> Task:
    """Handwritten digits (scikit-learn's, 8 × 8) with two convolutions and a linear layer."""
    return Task(
        name="digits-cnn",
        model=partial(digits_net, tuple(channels)),
        data=partial(digits, flat=False),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay),
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


def digits_net(channels: Sequence[int]) -> nn.Sequential:
    """3 × 3 convolutions, each followed by ReLU, the last ones by pooling to 4 × 4 and a linear layer."""
    layers: list[nn.Module] = []
    for before, after in zip((1, *channels), channels, strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * channels[-1], 10))


@cache
def digits(*, flat: bool) -> Data:
    """Pixels scaled to a range of 1, minus the mean training image; a fifth of each class is for testing.

    Rows of 64, or 1 × 8 × 8 images when not `flat`.
    """
    table = np.loadtxt(_digits_file(), delimiter=",", dtype=np.float32)
    if table.shape != (1797, 65):
        raise DataError(f"{_digits_file()}: must hold 1797 rows of 64 pixels and a label, got {table.shape}")
    pixels, labels = table[:, :64] / 16, table[:, 64].astype(np.int64)
    for_test = _kept_for_testing(labels)
    # Without centring, the loss is so steep along the mean image that stale gradients of a few steps diverge.
    pixels -= pixels[~for_test].mean(axis=0)
    pixels = pixels if flat else pixels.reshape(-1, 1, 8, 8)
    train, test = (
        ArrayDataset(torch.from_numpy(pixels[part]), torch.from_numpy(labels[part])) for part in (~for_test, for_test)
    )
    return Data(train=train, test=test)


def _kept_for_testing(labels: np.ndarray) -> np.ndarray:
    order = np.random.Generator(np.random.Philox(key=SPLIT_SEED)).permutation(len(labels))
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        members = order[labels[order] == label]
        chosen[members[: round(TEST_SHARE * len(members))]] = True
    return chosen


def _digits_file() -> Path:
    # Found, not imported: importing scikit-learn would cost every rank a second.
    spec = importlib.util.find_spec("sklearn")
    if spec is None or spec.origin is None:
        raise DataError("digits: scikit-learn, which brings the data, must be installed, but is not found")
    path = Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if not path.is_file():
        raise DataError(f"{path}: must hold scikit-learn's digits, but there is no such file")
    return path
