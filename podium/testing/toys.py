"""Small tasks for tests, plain PyTorch as their reference, and training in any world.

Everything is a module-level function or a `partial`, so that a task can be sent to other processes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import LRScheduler, StepLR

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.data.base import ArrayDataset, Data
from podium.data.order import GlobalOrder
from podium.engine.build import Job
from podium.engine.recovery import Control
from podium.engine.report import Report
from podium.engine.training import Training, run_server
from podium.records.recorder import Record, Recorder
from podium.servers.build import make_server
from podium.strategies.base import Strategy
from podium.task import Task, accuracy
from podium.testing.worlds import Memory, World

FEATURES, CLASSES = 6, 3
SAMPLES = 44
"""Not a multiple of the batch: every epoch ends with a short one."""
BATCH = 12

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "sgd": partial(SGD, lr=0.2),
    "momentum": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": partial(SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(Adam, lr=0.02, weight_decay=0.01),
    "adamw": partial(AdamW, lr=0.02, weight_decay=0.1),
    "adagrad": partial(Adagrad, lr=0.05),
    "rmsprop": partial(RMSprop, lr=0.01, momentum=0.5),
}


# Models.


def plain_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, CLASSES))


def dropout_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, CLASSES))


def batch_norm_model() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, CLASSES))


def everything_model() -> nn.Module:
    """Dropout and BatchNorm: the state that a checkpoint most easily gets wrong."""
    return nn.Sequential(
        nn.Linear(FEATURES, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, CLASSES)
    )


class Tied(nn.Module):
    """One matrix used forwards and, transposed, backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, FEATURES)
        self.outer = nn.Linear(FEATURES, FEATURES)
        self.outer.weight = self.inner.weight
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.outer(torch.tanh(self.inner(x)))))
        return out


def frozen_model() -> nn.Module:
    model = plain_model()
    next(model.parameters()).requires_grad_(False)
    return model


class Unused(nn.Module):
    """A layer that no forward pass reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.spare = nn.Linear(8, 8)
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)))
        return out


class Branching(nn.Module):
    """A layer that few samples use: many batches, and even more shares of a batch, hold none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(FEATURES, CLASSES)
        self.branch = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.trunk(x)
        rare = (x[:, 0] > 1.2).nonzero().flatten()
        return out.index_add(0, rare, self.branch(x[rare])) if len(rare) else out


class Scaled(nn.Module):
    """A zero-dimensional parameter between others."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 8)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.last = nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(torch.tanh(self.first(x)) * self.scale)
        return out


class TwoDtypes(nn.Module):
    """Alternating float32 and float64 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(FEATURES, 8)
        self.b = nn.Linear(8, 8).double()
        self.c = nn.Linear(8, 8)
        self.d = nn.Linear(8, CLASSES).double()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.b(torch.tanh(self.a(x)).double())).float()
        out: Tensor = self.d(torch.tanh(self.c(x)).double())
        return out


def channels_last_model() -> nn.Module:
    conv = nn.Sequential(nn.Unflatten(1, (2, 1, 3)), nn.Conv2d(2, 4, (1, 2)), nn.Tanh(), nn.Conv2d(4, 4, (1, 2)))
    model: nn.Module = nn.Sequential(*conv, nn.Flatten(), nn.Linear(4, CLASSES))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,no-any-return]  # torch's stub lacks it


class Sometimes(nn.Module):
    """A branch that only training steps `first` to `last` use."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.main, self.branch = nn.Linear(FEATURES, CLASSES), nn.Linear(FEATURES, CLASSES)
        self.first, self.last, self.passes = first, last, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        out: Tensor = self.main(x)
        return out + self.branch(x) if self.first <= self.passes <= self.last else out


class Alike(nn.Module):
    """Frozen parameters and buffers that every rank draws independently of the seed."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__()
        draw = torch.Generator()
        draw.seed()
        self.frozen = nn.Parameter(torch.randn(FEATURES, FEATURES, generator=draw), requires_grad=False)
        self.register_buffer("shift", torch.randn(FEATURES, generator=draw))
        self.register_buffer("flags", torch.rand(3, generator=draw) > 0.5)
        self.register_buffer("turns", torch.polar(torch.ones(2), torch.rand(2, generator=draw)), persistent=False)
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(x @ self.frozen + self.shift)
        return out


class Half(nn.Module):
    """Parameters in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = plain_model().to(torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x.to(torch.bfloat16))
        return out.float()


UNUSUAL: dict[str, Callable[[], nn.Module]] = {
    "used late": partial(Sometimes, 3, 99),
    "used early": partial(Sometimes, 0, 3),
    "tied": Tied,
    "frozen": frozen_model,
    "unused": Unused,
    "scalar": Scaled,
    "two-dtypes": TwoDtypes,
    "channels-last": channels_last_model,
}


# Tasks.


@cache
def toy_data(samples: int) -> Data:
    """Three noisy classes, the same in every process."""
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(samples + 20, FEATURES, generator=generator)
    noise = torch.randn(samples + 20, CLASSES, generator=generator)
    targets = (inputs @ torch.randn(FEATURES, CLASSES, generator=generator) + 0.3 * noise).argmax(dim=1)
    return Data(ArrayDataset(inputs[:samples], targets[:samples]), ArrayDataset(inputs[samples:], targets[samples:]))


def make_optimizer(model: nn.Module, kind: str) -> Optimizer:
    return OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])


def two_groups(model: nn.Module) -> Optimizer:
    """Biases without weight decay and with their own learning rate."""
    weights = [p for p in model.parameters() if p.dim() > 1]
    biases = [p for p in model.parameters() if p.dim() <= 1]
    groups: list[dict[str, Any]] = [{"params": weights}, {"params": biases, "lr": 0.05, "weight_decay": 0.0}]
    return AdamW(groups, lr=0.02, weight_decay=0.1)


def halve_every_third(optimizer: Optimizer, _total_steps: int) -> LRScheduler:
    return StepLR(optimizer, step_size=3, gamma=0.5)


def toy(
    *,
    model: Callable[[], nn.Module] = plain_model,
    optimizer: str | Callable[[nn.Module], Optimizer] = "momentum",
    samples: int = SAMPLES,
    **fields: Any,
) -> Task:
    """Two epochs of four steps over 44 samples by default."""
    given = {"loss": cross_entropy, "metrics": {"accuracy": accuracy}, "batch_size": BATCH, "epochs": 2, **fields}
    return Task(
        name="toy",
        model=model,
        data=partial(toy_data, samples),
        optimizer=partial(make_optimizer, kind=optimizer) if isinstance(optimizer, str) else optimizer,
        **given,
    )


# The reference.


class Plain(NamedTuple):
    """The result of plain PyTorch."""

    state: dict[str, Tensor]
    param_hash: str
    optimizer: Optimizer
    losses: list[float]


def train_plainly(task: Task, *, seed: int = 0, steps: int | None = None) -> Plain:
    """The usual PyTorch training loop, over the same samples in the same order."""
    torch.manual_seed(seed)
    data, model = task.data(), task.model()
    optimizer = task.optimizer(model)
    order = GlobalOrder(len(data.train), seed)
    total = min(order.steps(task.batch_size, task.epochs), steps or 10**9)
    schedule = None if task.schedule is None else task.schedule(optimizer, total)
    cast = torch.autocast("cpu", dtype=torch.bfloat16) if task.autocast == "bf16" else nullcontext()
    losses, position = [], 0
    for _ in range(total):
        piece = order.slice_at(position, task.batch_size)
        inputs, targets = data.train.gather(order.indices(piece), order.keys(piece))
        optimizer.zero_grad()
        with cast:
            loss = task.loss(model(inputs), targets)
        loss.backward()
        if task.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        position += piece.count
        losses.append(float(loss.detach()))
    return Plain(model.state_dict(), hash_of(model), optimizer, losses)


def hash_of(model: nn.Module) -> str:
    """The same as `Worker.param_hash` for these parameters."""
    digest = hashlib.sha256()
    for name, p in model.named_parameters():
        digest.update(name.encode() + p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


# Training in any world.


class Trained(NamedTuple):
    """One worker's result."""

    state: dict[str, Tensor]
    report: Report
    records: list[Record]
    position: int
    optimizer: dict[str, dict[str, Any]]  # the optimizer's state, by parameter name
    groups: list[dict[str, Any]]  # … and its settings, by group

    @property
    def losses(self) -> list[float]:
        return [row["loss"] for row in self.records if row["kind"] == "step"]

    @property
    def step_times(self) -> list[int]:
        return [row["t_ns"] for row in self.records if row["kind"] == "step"]


class Uncontrolled(Control):
    """No launcher: no stop request, no progress reports."""

    def stop_requested(self) -> bool:
        return False

    def progress(self, facts: dict[str, Any]) -> None:
        pass


def train_in(
    world: World,
    task: Task,
    strategy: Strategy[Any],
    workers: int = 1,
    *,
    run_dir: Path | None = None,
    **config: Any,
) -> list[Trained]:
    """Train in a world, without a launcher; returns each worker's result."""
    settings = RunConfig(task=task.name, workers=workers, eval_every=0, **config)
    job = Job(settings, task, strategy, run_dir, task_is_named=False)
    outcomes = world.run(partial(train_rank, job=job), workers, strategy.server_spec.count)
    return outcomes[:workers]


def train(task: Task, strategy: Strategy[Any], workers: int = 1, **config: Any) -> list[Trained]:
    """Train in threads."""
    return train_in(Memory(), task, strategy, workers, **config)


def train_rank(comm: Communicator, job: Job) -> Trained | list[Record]:
    """Run one rank: a worker returns its result, a server its records."""
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return recorder.kept
    training = Training(job, comm, recorder, Uncontrolled())
    report = training.run()
    kept = training.worker.state()
    return Trained(kept["model"], report, recorder.kept, training.worker.position, kept["optimizer"], kept["groups"])


# Comparing.


def assert_same_bits(state: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), f"{name} differs by {(state[name] - value).abs().max():g}"


def assert_close(state: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-6) -> None:
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(state[name], value, rtol=1e-5, atol=tolerance, msg=told)


def hashes(trained: Sequence[Trained]) -> set[str]:
    return {t.report.param_hash for t in trained}


def assert_alike(trained: Sequence[Trained]) -> None:
    """All workers ended with the same parameters and optimizer state, in bits."""
    assert len(hashes(trained)) == 1, f"workers ended with different parameters: {sorted(hashes(trained))}"
    for rank, other in enumerate(trained[1:], 1):
        assert other.optimizer.keys() == trained[0].optimizer.keys()
        for name, state in trained[0].optimizer.items():
            for kind, value in state.items():
                assert torch.equal(torch.as_tensor(other.optimizer[name][kind]), torch.as_tensor(value)), (
                    f"worker {rank}: {kind} of {name} is not that of worker 0; `finish` must make parameters and "
                    "moments alike (podium.strategies.averaging.mean_moments)"
                )


def samples_used(trained: Sequence[Trained]) -> int:
    return sum(row["samples"] for worker in trained for row in worker.records if row["kind"] == "step")
