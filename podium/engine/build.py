"""What a rank is to do, and the parts it is built from: data, replica, server."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from podium.comm.base import Communicator, Meta
from podium.config import RunConfig, devices_in
from podium.data.base import Data
from podium.data.order import GlobalOrder
from podium.engine.fingerprints import Digest
from podium.engine.flat import Flat
from podium.engine.generators import Others, generator_state, seed_generators, undrawn
from podium.engine.worker import Worker
from podium.errors import ConfigError, DataError
from podium.exchange.codecs.dense import Dense
from podium.exchange.collectives import collective_of
from podium.exchange.reducing import Packing, make_packing
from podium.records.recorder import Recorder, read_records
from podium.servers.copies import Copies
from podium.servers.replay import AsRecorded
from podium.servers.server import Server
from podium.strategies.base import Strategy
from podium.task import BufferPolicy, Task

_MOST_LANES = 4
"""Threads that move a server's parameters: memory gives no more to more of them."""


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
"""Fields of a configuration that may differ from rank to rank: places on its host, and patience.

The options of a strategy are compared as part of the strategy.
"""


@dataclass(frozen=True)
class Job:
    """What a rank is to do."""

    config: RunConfig
    task: Task
    strategy: Strategy[Any]
    run_dir: Path | None = None
    """Where checkpoints and the model go; None keeps nothing."""
    task_is_named: bool = True
    """Whether `config.task` names the task, so that another process can make it for itself."""
    warnings: tuple[str, ...] = ()
    """What the user has to be told before the run begins."""
    digests: Mapping[str, Digest] | None = None
    """Of the data, where one process made them for all ranks."""

    @property
    def batch_size(self) -> int:
        return self.config.batch_size or self.task.batch_size

    @property
    def clip_norm(self) -> float | None:
        return self.config.clip_norm or self.task.clip_norm

    @property
    def sends_rows(self) -> bool:
        """Whether embeddings travel by rows: not where the norm of whole gradients is needed."""
        return self.strategy.sends_rows and self.clip_norm is None

    @property
    def packing(self) -> Packing:
        """How what is sent is packed."""
        return packing_for(self.config, self.strategy)

    @property
    def buffers(self) -> BufferPolicy:
        return self.config.buffers or self.task.buffers

    @property
    def facts(self) -> dict[str, Any]:
        """What must be the same on all ranks, besides the data and the model."""
        config = {name: value for name, value in self.config.to_dict().items() if name not in OF_A_RANK}
        # Paths may differ from host to host.
        options = {k: v for k, v in self.config.task_options.items() if not (isinstance(v, str) and os.sep in v)}
        resolved = {"batch_size": self.batch_size, "clip_norm": self.clip_norm, "buffers": self.buffers}
        named = {"task": self.task.name, "task_options": options, "strategy": repr(self.strategy)}
        return {**config, **resolved, **named}

    def total_steps(self, order: GlobalOrder) -> int:
        by_epochs = order.steps(self.batch_size, self.config.epochs or self.task.epochs)
        return min(by_epochs, self.config.steps or by_epochs)


def packing_for(config: RunConfig, strategy: Strategy[Any]) -> Packing:
    """How a strategy's gradients are packed; one that sends none packs none."""
    return make_packing(config.codec) if strategy.exchanges else Packing(Dense(), feedback=False)


def fitted(packing: Packing, optimizer: Optimizer) -> Packing:
    """The packing for this optimizer: a codec that does the momentum takes it over from there."""
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
    """The task's data, checked to be enough."""
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
    """The replica, made from the seed; rank 0 goes on with the same random stream, as plain PyTorch would."""
    task, config = job.task, job.config
    with comm.computing(), undrawn() if comm.shares_process else nullcontext():
        seed_generators(config.seed)
        model = task.model().to(device)
        optimizer = task.optimizer(model)
        schedule = None if task.schedule is None else task.schedule(optimizer, total_steps)
        check_parts(task.name, model, optimizer, schedule)
        worker = Worker(
            model,
            optimizer,
            comm,
            loss=task.loss,
            schedule=schedule,
            bucket_bytes=job.strategy.bucket_bytes,
            clip_norm=job.clip_norm,
            accumulate=config.accumulate or task.accumulate,
            autocast=config.autocast or task.autocast,
            rows=job.sends_rows,
            collective=collective_of(config),
            packing=fitted(job.packing, optimizer),
            weigh=task.weigh,
            seed=config.seed,
        )
        if comm.rank != 0:
            seed_generators(derived_seed(config.seed, comm.rank))
        if comm.shares_process:
            worker.rng, worker.others = generator_state(device), Others()
    return worker


def check_parts(who: str, model: nn.Module, optimizer: Optimizer, schedule: LRScheduler | None) -> None:
    """Refuse, before the first step, what cannot be trained."""
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"{who}: optimizer must make a torch.optim.Optimizer, got {type(optimizer).__name__}")
    if isinstance(optimizer, LBFGS):
        raise ConfigError(f"{who}: LBFGS evaluates the loss several times a step, which no strategy here does")
    if isinstance(schedule, ReduceLROnPlateau):
        raise ConfigError(f"{who}: ReduceLROnPlateau needs a metric at every step; use a schedule of steps")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{who}: model must make a torch.nn.Module, got {type(model).__name__}")


def make_server(
    job: Job,
    comm: Communicator,
    recorder: Recorder,
    *,
    replaces: bool = False,
    tell_awaits: Callable[[Meta], None] | None = None,
) -> Server:
    """A server with its ranges, before it has met a worker; or one that takes the place of a lost one.

    `tell_awaits`: as `Server` has it.
    """
    with comm.computing(), undrawn():
        seed_generators(job.config.seed)
        model = job.task.model()
        optimizer = job.task.optimizer(model)
        check_parts(job.task.name, model, optimizer, None)
        flat = Flat(model, optimizer, job.strategy.bucket_bytes, rows=job.sends_rows)  # laid out as the workers' is
    served = [phase for phase in job.strategy.phases if phase.strategy.server_count]
    replay = job.config.replay
    arrivals = None if replay is None else AsRecorded(read_records(Path(replay)), comm.rank)
    server = Server(
        comm,
        flat,
        optimizer,
        recorder=recorder,
        arrivals=arrivals,
        copies=_copies(job, comm),
        codec=job.packing.codec,
        pull=job.strategy.pull_codec,
        lanes=0 if comm.shares_process else min(_MOST_LANES, len(os.sched_getaffinity(0))),
        takes_gradients=any(phase.strategy.takes_gradients for phase in served),
        tell_awaits=tell_awaits,
    )
    if replaces:
        where = server.copies.restore()
        facts = {"source": where, "updates": server.updates, "recorded": sorted(server.recorded.items())}
        recorder.write("restored", comm.clock.now_ns(), **facts)
    return server


def _copies(job: Job, comm: Communicator) -> Copies:
    """Where ranks are processes, servers are copied; where they share one, they are lost together."""
    strategy = job.strategy
    if job.run_dir is None or comm.shares_process:
        return Copies(replicas=strategy.replicas)
    path = job.run_dir / "servers" / f"rank-{comm.rank}.safetensors"
    return Copies(replicas=strategy.replicas, snapshot=path, every=strategy.snapshot_every)


def derived_seed(seed: int, *salts: int) -> int:
    """A seed of its own for each rank or purpose."""
    return int(np.random.SeedSequence([seed, *salts]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def device_of(setting: str, rank: int, first: int = 0) -> torch.device:
    """The device of a rank, by the run's `device`; those of one node that are on `cuda` share its GPUs in turn.

    `first`: the lowest rank of this node.
    """
    names = devices_in(setting)
    name = names[rank % len(names)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        raise ConfigError(f"device={setting}: PyTorch sees no GPU here; use device=cpu or device=auto")
    if ":" not in name:
        before = [names[other % len(names)] for other in range(first, rank)]
        return torch.device("cuda", before.count(name) % count)
    number = int(name.partition(":")[2])
    if number >= count:
        raise ConfigError(f"device={setting}: PyTorch sees {count} GPUs here, numbered from 0, got {name}")
    return torch.device("cuda", number)
