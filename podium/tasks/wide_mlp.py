"""A wide network on little data: much to send and little to learn, for measuring communication."""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch.nn.functional import cross_entropy

from podium.data.base import ArrayDataset, Data
from podium.errors import ConfigError
from podium.task import Task, accuracy
from podium.tasks.recipes import Sgd, mlp

CLASSES = 10


def wide_mlp(
    *,
    features: int = 2048,
    width: int = 2560,
    depth: int = 4,
    samples: int = 640,
    lr: float = 0.05,
    momentum: float = 0.9,
    batch_size: int = 64,
    epochs: int = 2,
) -> Task:
    """Synthetic classes with a wide perceptron (25 M parameters in 10 tensors); for measuring communication."""
    return Task(
        name="wide-mlp",
        model=partial(mlp, (features, *[width] * depth, CLASSES)),
        data=partial(blobs, features, samples),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum),
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


def blobs(features: int, samples: int) -> Data:
    """Samples scattered about one centre per class, from a fixed seed; a fifth as many again for testing."""
    if features < 1 or samples < 5:
        raise ConfigError(f"wide-mlp: features must be at least 1 and samples at least 5, got {features} and {samples}")
    draw = np.random.Generator(np.random.Philox(key=25))
    centres = draw.standard_normal((CLASSES, features), dtype=np.float32) / 4

    def scatter(count: int) -> ArrayDataset:
        labels = draw.integers(CLASSES, size=count)
        inputs = centres[labels] + draw.standard_normal((count, features), dtype=np.float32)
        return ArrayDataset(torch.from_numpy(inputs), torch.from_numpy(labels))

    return Data(train=scatter(samples), test=scatter(samples // 5))
