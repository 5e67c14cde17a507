"""Small tasks for trying out executors: each a function of options, as a user's own would be."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.parametrizations import weight_norm
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from podium import Task
from podium.data.base import ArrayDataset, Data
from podium.errors import ConfigError
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import ReferenceTrainer
from podium.sweeps.trial import GO, Evaluation, Outcome, Trial, Verdict
from podium.task import accuracy

FEATURES, CLASSES, SAMPLES = 12, 4, 120


@cache
def data() -> Data:
    draw = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES + 40, FEATURES, generator=draw)
    y = (x @ torch.randn(FEATURES, CLASSES, generator=draw)).argmax(1)
    return Data(train=ArrayDataset(x[:SAMPLES], y[:SAMPLES]), test=ArrayDataset(x[SAMPLES:], y[SAMPLES:]))


def task_of(
    model: Callable[[], nn.Module], optimizer: Callable[..., Optimizer] = torch.optim.SGD, **options: Any
) -> Task:
    return Task(
        name="toy",
        model=model,
        data=data,
        loss=cross_entropy,
        optimizer=partial(_optimizer, optimizer, options),
        metrics={"accuracy": accuracy},
        batch_size=16,
        epochs=3,
    )


def _optimizer(make: Callable[..., Optimizer], options: dict[str, Any], model: nn.Module) -> Optimizer:
    return make([p for p in model.parameters() if p.requires_grad], **{"lr": 0.1, **options})


def net(*, width: int = 16, dropout: float = 0.0, norm: bool = True) -> nn.Sequential:
    middle = [nn.BatchNorm1d(width)] if norm else []
    return nn.Sequential(nn.Linear(FEATURES, width), *middle, nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, CLASSES))


def toy(*, width: int = 16, dropout: float = 0.0, norm: bool = True, lr: float = 0.1) -> Task:
    """BatchNorm, dropout, SGD; `momentum`, `weight_decay` and so on go to the optimizer."""
    return task_of(partial(net, width=width, dropout=dropout, norm=norm), lr=lr)


def one_cycle(optimizer: Optimizer, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.3, total_steps=max(2, steps))


def plain_one_cycle(optimizer: Optimizer, steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=max(2, steps), cycle_momentum=False)


def falling(optimizer: Optimizer, steps: int) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.5**step)


def odd(*, kind: str, k: float = 0.0, lr: float = 0.1) -> Task:
    """Models that differ by `k` in a way that neither names nor shapes show."""
    task = task_of(partial(odd_model, kind=kind, k=k), lr=lr)
    if kind == "loss tuple":
        return dataclasses.replace(task, loss=_Weighted((1.0, 1.0 + k)))
    if kind == "loss inside":
        return dataclasses.replace(task, loss=_Outer(_Weighted((1.0, 1.0 + k))))
    if kind == "autocast":
        return dataclasses.replace(task, autocast="bf16" if k else "off")
    if kind == "recursive":
        return dataclasses.replace(task, data=_recursive_data())
    if kind == "hooked gradient":
        return dataclasses.replace(task, optimizer=partial(_hooking, k))
    return task


def _hooking(k: float, model: nn.Module) -> Optimizer:
    if k:
        next(model.parameters()).register_hook(lambda grad: grad * 0.1)
    return torch.optim.SGD(model.parameters(), 0.1)


def odd_model(kind: str, k: float) -> nn.Module:
    model = nn.Linear(FEATURES, CLASSES)
    if kind == "hook":
        model.register_forward_hook(lambda module, inputs, output: output * (1 + k))
    elif kind == "numpy":
        model.mask = np.ones(5000)
        model.mask[2500] += k
    elif kind == "tensor":
        model.mask = torch.ones(9000)
        model.mask[8000] += k
    elif kind == "sparse":  # compared by identity: better apart than wrongly together
        model.mask, model.scale = _SPARSE[bool(k)], torch.tensor(1.0, dtype=torch.bfloat16)
    elif kind == "parametrized":
        weight_norm(model)
    elif kind == "local class":

        class Own(nn.Linear):
            @property
            def half(self) -> int:
                return self.out_features // 2

            @staticmethod
            def twice(x: Tensor) -> Tensor:
                return 2 * x

        return Own(FEATURES, CLASSES)
    return model


_SPARSE = [torch.eye(3).to_sparse(), 2 * torch.eye(3).to_sparse()]


def _recursive_data() -> Callable[[], Data]:
    def open_data(depth: int = 1) -> Data:
        return open_data(depth - 1) if depth else data()

    return open_data


class _Weighted(nn.Module):
    def __init__(self, weights: tuple[float, ...]) -> None:
        super().__init__()
        self.weights = weights

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(outputs, targets) * self.weights[1]


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        loss: Tensor = self.inner(outputs, targets)
        return loss


class Words(nn.Module):
    """Reads its numbers as words, some of them padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 6, padding_idx=0), nn.Linear(6, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        words = (x > 0.5).long() + (x > 1.8).long() * 2
        out: Tensor = self.head(self.words(words).mean(1))
        return out


class Tied(nn.Module):
    """The second layer is the first one, transposed back: one parameter in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(FEATURES, FEATURES)
        self.two = nn.Linear(FEATURES, FEATURES)
        self.two.weight = self.one.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.two(torch.tanh(self.one(x)))))
        return out


class Counting(nn.Module):
    """Keeps a counter in Python, and lets it change what is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(FEATURES, CLASSES), 0

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            self.calls += 1
        out: Tensor = self.layer(x) * (1 + 0.1 * self.calls)
        return out


class Late(Counting):
    """Keeps a counter that matters only much later."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.layer(x) * (2 if self.calls > 100 else 1)
        return out


class Judging(Counting):
    """Keeps something in Python that only evaluation looks at."""

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        out: Tensor = self.layer(x)
        return out if self.training else out * (1 + self.calls)


class Reassigning(nn.Module):
    """Puts a new tensor in the place of a buffer."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.count = self.count + 1
        out: Tensor = self.layer(x) / (1 + self.count)
        return out


class Dropping(nn.Module):
    """Leaves a layer out now and then, by Python's own chance."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.Linear(FEATURES, FEATURES), nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() > 0.05:
            x = x + self.layer(x)
        out: Tensor = self.head(x)
        return out


class DroppingByItsOwn(Dropping):
    """The same by a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(3)

    def forward(self, x: Tensor) -> Tensor:
        if self.chance.random() > 0.05:
            x = x + self.layer(x)
        out: Tensor = self.head(x)
        return out


class Shortened(nn.Module):
    """Right in double precision; in single, wrong wherever there is more than one row, as a kernel might be."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        in_rows = torch._C._functorch.is_batchedtensor(out)
        return out if x.dtype == torch.float64 or not in_rows else out * 1.5


class Caching(nn.Module):
    """Makes a table at its first step, and keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.table = nn.Linear(FEATURES, CLASSES), None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, FEATURES, dtype=x.dtype)
        out: Tensor = self.layer(x + self.table)
        return out


class Fussy(nn.Module):
    """Takes batches of 16 only."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            assert len(x) % 16 == 0
        out: Tensor = self.layer(x)
        return out


class Converting(nn.Module):
    """Makes its input single precision itself, as models do that are given bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.float())
        return out


class Asking(nn.Module):
    """Asks its layers for their sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x.reshape(-1, self.layer.in_features))
        return out


class Extra(nn.Module):
    """Has more in its state than tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state["version"] == 3


class Noisy(nn.Module):
    """Draws from torch's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x + 0.1 * torch.randn_like(x))
        return out


class Looking(nn.Module):
    """Looks at a value, which one call for many rows cannot."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out * 2 if float(out.detach().mean()) > 0 else out


class Recurrent(nn.Module):
    """Features as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(3, 8, batch_first=True), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.cells(x.view(len(x), -1, 3))
        out: Tensor = self.head(states[:, -1])
        return out


class Partly(nn.Module):
    """Some parameters are frozen, some are used by nobody."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(FEATURES, 8).requires_grad_(False)
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.relu(self.frozen(x)))
        return out


class Queue:
    """Gives out a list of trials and keeps what comes back; `judge` may stop them."""

    def __init__(self, trials: list[Trial], judge: Callable[[Trial, Evaluation], Verdict] | None = None) -> None:
        self.waiting, self.judge = list(trials), judge
        self.outcomes: dict[int, Outcome] = {}
        self.states: dict[int, dict[str, Tensor]] = {}
        self.reports: list[tuple[int, Evaluation]] = []

    def take(self) -> Trial | None:
        return self.waiting.pop(0) if self.waiting else None

    def expects_more(self) -> bool:
        return bool(self.waiting)

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        self.reports.append((trial.number, evaluation))
        return GO if self.judge is None else self.judge(trial, evaluation)

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        return [self.report(trial, evaluation) for trial, evaluation in rows]

    def begin_again(self, trial: Trial) -> None:
        self.reports = [(number, evaluation) for number, evaluation in self.reports if number != trial.number]

    def hand_in(self, outcome: Outcome, state: Any) -> None:
        assert outcome.trial.number not in self.outcomes, "handed in twice"
        self.outcomes[outcome.trial.number] = outcome
        self.states[outcome.trial.number] = state

    def stop_requested(self) -> bool:
        return False


def recipe_of(task: Any, **settings: Any) -> Recipe:
    return Recipe(**{"task": task, "device": "cpu", "dtype": "float64", **settings})


def device_data_of(recipe: Recipe, trial: Trial) -> DeviceData:
    return DeviceData(recipe.data_of(recipe.task_of(trial)), recipe.torch_device, recipe.torch_dtype)


def array_of(recipe: Recipe, trials: list[Trial], device_data: DeviceData | None = None, **settings: Any) -> Array:
    """An array with these trials loaded, ready for its first step."""
    parts = [recipe.make(trial) for trial in trials]
    array = Array(recipe, parts[0], device_data or device_data_of(recipe, trials[0]), len(trials), **settings)
    for row, one in enumerate(parts):
        array.load(row, one)
    array.refill([0] * len(trials))
    return array


def alone_after(recipe: Recipe, trial: Trial, steps: int) -> ReferenceTrainer:
    alone = ReferenceTrainer(recipe, trial, device_data_of(recipe, trial))
    for _ in range(steps):
        alone.step()
    return alone


def apart(one: dict[str, Tensor], two: dict[str, Tensor]) -> float:
    """The largest difference between two states, relative to each tensor's largest element."""
    assert one.keys() == two.keys()
    worst = 0.0
    for name in one:
        size = max(float(one[name].double().abs().max()), 1e-12) if one[name].numel() else 1.0
        difference = float((one[name].double() - two[name].double()).abs().max()) if one[name].numel() else 0.0
        worst = max(worst, difference / size)
    return worst
