"""Regression with several outputs, and its metrics.

The data are generated from a fixed seed, not the run's: a smooth function of the inputs plus noise, so the best
possible R² is known to be near `1 - noise²`. With `data_dir`, arrays from a folder take their place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from podium.data.arrays import read_arrays
from podium.data.base import ArrayDataset, Data
from podium.errors import ConfigError
from podium.task import Task
from podium.tasks.recipes import Sgd, mlp


def regression(
    *,
    data_dir: str | None = None,
    features: int = 16,
    outputs: int = 3,
    samples: int = 2500,
    hidden: Sequence[int] = (64,),
    lr: float = 0.1,
    momentum: float = 0.0,
    batch_size: int = 64,
    epochs: int = 20,
) -> Task:
    """Regression with several outputs, synthetic (or arrays from `data_dir`); MAE, MSE and R² are measured."""
    data: Callable[[], Data] = partial(synthetic, features, outputs, samples)
    if data_dir is not None:
        data = partial(read_arrays, data_dir, prepare=as_rows)
        features, outputs = _widths(data())
    return Task(
        name="regression",
        model=partial(mlp, (features, *hidden, outputs)),
        data=data,
        loss=squared_error,
        optimizer=Sgd(lr=lr, momentum=momentum),
        metrics={"mae": mae, "mse": mse, "r2": r2},
        batch_size=batch_size,
        epochs=epochs,
    )


def synthetic(features: int, outputs: int, samples: int, *, noise: float = 0.1) -> Data:
    """Standard normal inputs; targets of unit variance from a random two-layer network; a fifth is for testing."""
    if min(features, outputs) < 1 or samples < 10:
        raise ConfigError(
            f"regression: features and outputs must be at least 1 and samples at least 10, "
            f"got {features}, {outputs} and {samples}"
        )
    draw = np.random.Generator(np.random.Philox(key=2500))
    inputs = draw.standard_normal((samples, features))
    inner = np.tanh(inputs @ draw.standard_normal((features, 2 * features)) / np.sqrt(features))
    targets = inner @ draw.standard_normal((2 * features, outputs))
    targets = (targets - targets.mean(0)) / targets.std(0) + noise * draw.standard_normal(targets.shape)
    x, y = (torch.from_numpy(a.astype(np.float32)) for a in (inputs, targets))
    cut = samples - samples // 5
    return Data(train=ArrayDataset(x[:cut], y[:cut]), test=ArrayDataset(x[cut:], y[cut:]))


def as_rows(inputs: Tensor) -> Tensor:
    """Flatten each sample to one row of float32."""
    return inputs.to(torch.float32).flatten(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean over samples and outputs."""
    return mse_loss(outputs, _like(outputs, targets))


def mae(outputs: Tensor, targets: Tensor) -> float:
    """Mean absolute error over samples and outputs."""
    return float((outputs - _like(outputs, targets)).abs().mean(dtype=torch.float64))


def mse(outputs: Tensor, targets: Tensor) -> float:
    """Mean squared error over samples and outputs."""
    return float((outputs - _like(outputs, targets)).square().mean(dtype=torch.float64))


def r2(outputs: Tensor, targets: Tensor) -> float:
    """Share of the targets' variance that is explained, averaged over outputs: 1 is perfect, 0 as good as the mean.

    An output whose target is constant scores 1 when it is predicted exactly and 0 otherwise.
    """
    outputs, targets = outputs.to(torch.float64), _like(outputs, targets).to(torch.float64)
    left = (targets - outputs).square().sum(0)
    there = (targets - targets.mean(0)).square().sum(0)
    scores = torch.where(there > 0, 1 - left / there.where(there > 0, 1), (left == 0).to(torch.float64))
    return float(scores.mean())


def _like(outputs: Tensor, targets: Tensor) -> Tensor:
    # A single output may come as a plain column: without this, subtraction would broadcast to a square.
    return targets.to(outputs.dtype).reshape(outputs.shape)


def _widths(data: Data) -> tuple[int, int]:
    inputs, targets = data.train.gather(np.zeros(1, dtype=np.int64))
    return inputs[0].numel(), targets[0].numel()
