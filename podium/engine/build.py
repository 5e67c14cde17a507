"""A rank's job, and the parts it is built from: data, replica, packing."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.optim import Optimizer

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.data.base import Data
from podium.data.order import GlobalOrder
from podium.engine.fingerprints import Digest
from podium.engine.generators import derived_seed, seed_generators, undrawn
from podium.engine.gradient_pass import PassOptions
from podium.engine.parts import check_parts
from podium.engine.replica import Replica
from podium.engine.worker import Worker
from podium.errors import ConfigError, DataError
from podium.exchange.codecs.dense import Dense
from podium.exchange.collectives import collective_of
from podium.exchange.packing import Packing, make_packing
from podium.strategies.base import Strategy
from podium.task import BufferPolicy, Task

T = TypeVar("T")


OF_A_RANK = frozenset(
    [
        "device",
        "threads",
        "data_dir",
        "out",
        "run_dir",
        "resume",
        "replay",
        "cluster",
        "launcher",
        "deadline_s",
        "heartbeat_s",
        "start_deadline_s",
        "tls_cert",
        "tls_key",
        "tls_ca",
        "strategy_options",
    ]
)
"""Fields of a configuration that may differ from rank to rank: paths on its host, and deadlines.

The options of a strategy are compared as part of the strategy.
"""


@dataclass(frozen=True)
class Job:
    """What a rank trains, and how."""

    config: RunConfig
    """Resolved: the given `RunConfig`, with the task's values for fields that are None."""
    task: Task
    strategy: Strategy[Any]
    run_dir: Path | None = None
    """Where checkpoints and the model go; None: nothing is saved."""
    task_is_named: bool = True
    """Whether `config.task` names the task, so that another process can make it."""
    warnings: tuple[str, ...] = ()
    """Shown to the user before the run begins."""
    digests: Mapping[str, Digest] | None = None
    """Of the data, where one process made them for all ranks."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "config", resolved(self.config, self.task))

    @property
    def batch_size(self) -> int:
        return _known(self.config.batch_size)

    @property
    def clip_norm(self) -> float | None:
        return self.config.clip_norm

    @property
    def sends_rows(self) -> bool:
        """Whether embeddings travel by rows; not under `clip_norm`, which needs whole gradients."""
        return self.strategy.server_spec.sends_rows and self.clip_norm is None

    @property
    def packing(self) -> Packing:
        return packing_for(self.config, self.strategy)

    @property
    def buffers(self) -> BufferPolicy:
        return _known(self.config.buffers)

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks, besides the data and the model."""
        config = {name: value for name, value in self.config.to_dict().items() if name not in OF_A_RANK}
        # Paths may differ from host to host.
        options = {k: v for k, v in self.config.task_options.items() if not (isinstance(v, str) and os.sep in v)}
        return {**config, "task": self.task.name, "task_options": options, "strategy": repr(self.strategy)}

    def total_steps(self, order: GlobalOrder) -> int:
        by_epochs = order.steps(self.batch_size, _known(self.config.epochs))
        return min(by_epochs, self.config.steps or by_epochs)


_BY_TASK = ("epochs", "batch_size", "accumulate", "clip_norm", "autocast", "buffers")


def resolved(config: RunConfig, task: Task) -> RunConfig:
    """The configuration with the task's values for fields that are None."""
    left_open = {name: getattr(task, name) for name in _BY_TASK if getattr(config, name) is None}
    return dataclasses.replace(config, **left_open) if left_open else config


def _known(value: T | None) -> T:
    """A setting that `resolved` has filled in."""
    assert value is not None
    return value


def packing_for(config: RunConfig, strategy: Strategy[Any]) -> Packing:
    """How a strategy's gradients are packed; dense for a strategy that sends none."""
    return make_packing(config.codec) if strategy.payload.is_sent else Packing(Dense(), feedback=False)


def fitted(packing: Packing, optimizer: Optimizer) -> Packing:
    """The packing for this optimizer: a codec that applies the momentum itself takes the optimizer's values."""
    codec = packing.codec
    if not codec.takes_momentum:
        return packing
    for group in optimizer.param_groups:
        codec.check(group)
    chosen = {(group["momentum"], group["nesterov"]) for group in optimizer.param_groups}
    if len(chosen) > 1:
        raise ConfigError(f"codec {codec.name}: all parameter groups must have one momentum, got {sorted(chosen)}")
    ((momentum, nesterov),) = chosen
    asked = {"momentum": codec.momentum, "nesterov": codec.nesterov}  # type: ignore[attr-defined]  # it takes momentum
    found = {"momentum": momentum, "nesterov": nesterov}
    taken = {name: found[name] if value is None else value for name, value in asked.items()}
    return Packing(dataclasses.replace(codec, **taken), packing.feedback)  # type: ignore[type-var]  # codecs are dataclasses


def open_data(task: Task, workers: int, batch_size: int) -> Data:
    """The task's data; raises where there is not enough."""
    data = task.data()
    if len(data.train) == 0 or len(data.test) == 0:
        raise DataError(
            f"task {task.name}: training and test data must not be empty, got {len(data.train)} and {len(data.test)}"
        )
    if len(data.train) < workers:
        raise ConfigError(f"task {task.name}: {workers} workers need at least {workers} samples, got {len(data.train)}")
    if batch_size < workers:
        raise ConfigError(f"batch_size must be at least one sample per worker ({workers}), got {batch_size}")
    return data


def build_worker(job: Job, comm: Communicator, total_steps: int, device: torch.device) -> Worker:
    """A worker whose replica is made from the seed; rank 0 continues the same random stream, as plain PyTorch would."""
    task, config = job.task, job.config
    with comm.computing(), undrawn() if comm.shares_process else nullcontext():
        seed_generators(config.seed)
        model = task.model().to(device)
        optimizer = task.optimizer(model)
        schedule = None if task.schedule is None else task.schedule(optimizer, total_steps)
        check_parts(task.name, model, optimizer, schedule)
        replica = Replica(
            model,
            optimizer,
            schedule=schedule,
            clip_norm=job.clip_norm,
            bucket_bytes=job.strategy.bucket_bytes,
            rows=job.sends_rows,
            allocate=comm.allocate,
        )
        options = PassOptions(
            loss=task.loss,
            weigh=task.weigh,
            accumulate=_known(config.accumulate),
            autocast=_known(config.autocast),
        )
        packing = fitted(job.packing, optimizer)
        worker = Worker(replica, comm, options, collective=collective_of(config), packing=packing, seed=config.seed)
        if comm.rank != 0:
            seed_generators(derived_seed(config.seed, comm.rank))
        if comm.shares_process:
            worker.generators.fork()
    return worker
