"""Recommendation: two large embedding tables of which a batch touches few rows.

The data are generated from a fixed seed, not the run's: users of a few tastes meet items of a few kinds, popular ones
more often; whether a user likes an item follows from taste and kind, with noise.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.optim import Adagrad, Optimizer

from podium.data.base import ArrayDataset, Data
from podium.errors import ConfigError
from podium.task import Task

_TASTES = 6


def recommend(
    *,
    users: int = 20_000,
    items: int = 5_000,
    width: int = 16,
    samples: int = 40_000,
    sparse: bool = True,
    lr: float = 0.1,
    batch_size: int = 128,
    epochs: int = 3,
) -> Task:
    """Whether a user likes an item: large sparse embedding tables, synthetic; accuracy is measured."""
    if min(users, items, width) < 1 or samples < 10:
        raise ConfigError(
            f"recommend: users, items and width must be at least 1 and samples at least 10, "
            f"got {users}, {items}, {width} and {samples}"
        )
    return Task(
        name="recommend",
        model=partial(Recommender, users, items, width, sparse),
        data=partial(encounters, users, items, samples),
        loss=binary_cross_entropy_with_logits,
        optimizer=partial(_adagrad, lr=lr),
        metrics={"accuracy": liked},
        batch_size=batch_size,
        epochs=epochs,
    )


class Recommender(nn.Module):
    """An embedding each for the user and the item, and a small network on both."""

    def __init__(self, users: int, items: int, width: int, sparse: bool) -> None:
        super().__init__()
        self.users = nn.Embedding(users, width, sparse=sparse)
        self.items = nn.Embedding(items, width, sparse=sparse)
        self.head = nn.Sequential(nn.Linear(3 * width, 32), nn.ReLU(), nn.Linear(32, 1))
        for table in (self.users, self.items):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, pairs: Tensor) -> Tensor:
        person, item = self.users(pairs[:, 0]), self.items(pairs[:, 1])
        seen: Tensor = self.head(torch.cat([person, item, person * item], dim=1))
        return seen[:, 0]


def encounters(users: int, items: int, samples: int) -> Data:
    """Pairs (user, item), and whether the user liked the item; a fifth is for testing."""
    draw = np.random.Generator(np.random.Philox(key=5200))
    taste, kind = draw.integers(_TASTES, size=users), draw.integers(_TASTES, size=items)
    likes = draw.random((_TASTES, _TASTES)) < 0.5
    who = (users * draw.random(samples) ** 3).astype(np.int64)  # low numbers come more often
    what = (items * draw.random(samples) ** 3).astype(np.int64)
    liked = likes[taste[who], kind[what]] ^ (draw.random(samples) < 0.05)
    x = torch.from_numpy(np.stack([who, what], axis=1))
    y = torch.from_numpy(liked.astype(np.float32))
    cut = samples - samples // 5
    return Data(train=ArrayDataset(x[:cut], y[:cut]), test=ArrayDataset(x[cut:], y[cut:]))


def liked(outputs: Tensor, targets: Tensor) -> float:
    """Share of pairs that are predicted correctly."""
    return float(((outputs > 0) == (targets > 0.5)).to(torch.float64).mean())


def _adagrad(model: nn.Module, lr: float) -> Optimizer:
    return Adagrad(model.parameters(), lr=lr)
