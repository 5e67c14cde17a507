"""Parts that several tasks share. All of them can be pickled, so a task may be sent to another process."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from torch import nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from podium.errors import ConfigError, DataError


@final
@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Makes an SGD optimizer for a model's trainable parameters; raises ConfigError before any rank is started."""

    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        for name, high in (("lr", math.inf), ("momentum", 1.0), ("weight_decay", math.inf)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value < high:
                what = "a number of 0 or more" if high == math.inf else "a number from 0 up to but not 1"
                raise ConfigError(f"SGD: {name} must be {what}, got {value!r}")

    def __call__(self, model: nn.Module) -> Optimizer:
        params = [p for p in model.parameters() if p.requires_grad]
        return SGD(params, lr=self.lr, momentum=self.momentum, weight_decay=self.weight_decay)


@final
@dataclass(frozen=True, kw_only=True)
class AdamRecipe:
    """Makes an Adam optimizer for a model's trainable parameters, with torch's defaults except for these fields."""

    lr: float
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.lr, int | float) or not self.lr >= 0:
            raise ConfigError(f"Adam: lr must be a number of 0 or more, got {self.lr!r}")

    def __call__(self, model: nn.Module) -> Optimizer:
        return Adam([p for p in model.parameters() if p.requires_grad], lr=self.lr, weight_decay=self.weight_decay)


def cosine(optimizer: Optimizer, total_steps: int) -> LRScheduler:
    """From the optimizer's learning rate down to 0 along half a cosine."""
    return CosineAnnealingLR(optimizer, T_max=total_steps)


def mlp(sizes: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths, inputs first and outputs last, with ReLU between them."""
    if len(sizes) < 2 or any(not isinstance(size, int) or size < 1 for size in sizes):
        raise ConfigError(f"MLP: layer widths must be whole numbers of at least 1, got {list(sizes)}")
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(sizes):
        layers += [nn.Linear(wide, narrow), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def need_data_dir(task: str, data_dir: str | None, files: str) -> Path:
    """The folder with the task's files; without one, an error that names the files.

    One folder may hold the files of several tasks: those of `mnist-lenet5` are then in its folder `mnist`.
    """
    if data_dir is None:
        raise DataError(f"task {task}: needs a folder with {files} (or .gz); pass --data-dir")
    inner = Path(data_dir) / task.partition("-")[0]
    return inner if inner.is_dir() else Path(data_dir)
