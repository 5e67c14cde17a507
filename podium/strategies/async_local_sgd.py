"""Asynchronous local SGD: many local steps on leased samples, then one push of what they came to; nobody waits.

    worker    theta_i = theta as the servers answered;  H_i steps of the task's own optimizer;  push theta - theta_i
    servers   theta moves by the outer optimizer, once per push: delayed Nesterov (`podium/servers/outer.py`)

A lease is H_i local batches, each a worker's part of a global step, so all samples are used once per epoch. The rate
of a local step is that of the global step in which its batch lies. With `steps=speed` leases are as long as their
worker is fast (DyLU), so that all push about equally often.

The inner optimizer's moments stay on the worker; when a stretch ends they are averaged by samples, and the outer
momentum comes home, to go out again with the next stretch.

Liu et al., 2024, Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, final

import torch
from torch import Tensor

from podium.balance.ranges import check_ranges, weights_of
from podium.errors import ConfigError
from podium.exchange.residuals import Sends
from podium.servers import client
from podium.servers.gate import Rules
from podium.servers.ranges import Range
from podium.strategies.averaging import mean_moments, need_plain_codec
from podium.strategies.base import Strategy
from podium.strategies.rounds import Round

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.engine.worker import Batch, Worker

_KEPT = "outer "
"""What a worker keeps of the outer optimizer begins with this."""


@dataclass
class State:
    served: client.Served
    there: list[Tensor]  # the servers' parameters, as this worker last had them
    samples: int = 0  # that this worker has trained on since the stretch began


@dataclass(frozen=True, kw_only=True)
class Leasing(Strategy[State]):
    """Workers that step by themselves, on leases of several batches, and meet at servers after each."""

    survives_loss: ClassVar[bool] = True
    replaces_servers: ClassVar[bool] = True
    takes_gradients: ClassVar[bool] = False
    sends: ClassVar[Sends] = "own"
    compares_speeds: ClassVar[bool] = False

    period: int = 8
    """Local steps between two exchanges; with `steps=speed`, those of the fastest worker."""
    steps: Literal["equal", "speed"] = "equal"
    """Whether all take as many, or each as many as the fastest worker takes time for its own."""
    servers: int = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """Whether servers have processes of their own or live in the workers'."""
    ranges: str = "equal"
    """How much of the parameters each server holds: `equal`, by `speed`, or numbers, as with parameter-server."""
    pull: str = "dense"
    """The codec that packs what servers answer, `NAME[:K=V;…]`; the run's `codec` packs what workers push."""
    replicas: int = 1
    """How many servers hold each range; with 2 or more, a lost server loses nothing."""
    snapshot_every: int = 100
    """Updates between two snapshots of a server, from which it is restored when nobody has a copy; 0: none."""
    unit_bytes: int | None = None
    """How much travels in one message: 8 MB over a network, 32 MB in shared memory, when not given."""
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("period", "servers", "replicas", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{self.name}: {name} must be at least 1, got {getattr(self, name)}")
        if self.snapshot_every < 0:
            raise ConfigError(f"{self.name}: snapshot_every must be at least 0, got {self.snapshot_every}")
        check_ranges(self.name, self.ranges, self.servers)
        if self.unit_bytes is not None and self.unit_bytes < 1:
            raise ConfigError(f"{self.name}: unit_bytes must be at least 1, got {self.unit_bytes}")
        if self.replicas > self.servers:
            raise ConfigError(
                f"{self.name}: replicas must be at most the number of servers ({self.servers}), got {self.replicas}"
            )
        if self.pull_codec.takes_momentum or self.pull_codec.name == "auto":
            raise ConfigError(f"{self.name}: pull={self.pull}: servers answer with parameters; name a codec for those")

    @property
    def server_count(self) -> int:
        return self.servers

    @property
    def colocated(self) -> bool:
        return self.placement == "colocated"

    @property
    def feed(self) -> Literal["cursor"]:
        return "cursor"

    def as_recorded(self, shares_memory: bool) -> Self:
        if self.steps == "speed" or self.replicas > 1:
            what = "steps=speed (its leases follow the clock)" if self.steps == "speed" else "replicas above 1"
            raise ConfigError(f"replay: {self.name} with {what} cannot be replayed")
        default = client.SHARED_UNIT_BYTES if shares_memory else client.UNIT_BYTES
        return dataclasses.replace(self, unit_bytes=self.unit_bytes or default)

    def init(self, worker: Worker) -> State:
        need_plain_codec(worker, self.name)
        unit_bytes = self.unit_bytes or client.unit_bytes_for(worker)
        weights = weights_of(self.name, self.ranges, worker.comm, updates=worker.comm.size)
        served = client.meet(worker, unit_bytes, weights)
        work = {
            **client.common_work(worker, unit_bytes, weights),
            "rules": Rules().to_dict(),
            "parts": min(worker.comm.size, worker.batch_size),
            "local_steps": self.period,
            "by_speed": self.steps == "speed",
            "outer": self.outer(worker),
        }
        places = client.seeded_here(worker, self.colocated)
        client.seed_together(worker, served, places, work, lambda ranges: self.outer_state(worker, ranges))
        worker.round = Round()
        return State(served, [flat.clone() for flat in worker.params])

    def step(self, worker: Worker, state: State, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if worker.next_lease is None:  # that was the last batch of this one
            state.samples += worker.round.samples
            self.exchange(worker, state, batch)
        return loss

    def finish(self, worker: Worker, state: State) -> None:
        """All take the servers' parameters home, and their moments become the same."""
        live = client.leave(worker, state.served, lambda ranges, states: self.bring_home(worker, ranges, states))
        if live is not None and live == set(worker.comm.workers):  # else all will take one worker's
            _mean_moments(worker, state.samples)

    # What differs.

    @abstractmethod
    def outer(self, worker: Worker) -> Meta:
        """The outer optimizer's settings."""

    @abstractmethod
    def exchange(self, worker: Worker, state: State, batch: Batch) -> None:
        """A lease is done: meet the servers."""

    def outer_state(self, worker: Worker, ranges: Sequence[Range]) -> list[dict[str, Any]]:
        """The outer optimizer's state of these ranges, one mapping per part."""
        return [{} for r in ranges for _ in r.parts]

    def bring_home(self, worker: Worker, ranges: Sequence[Range], states: Sequence[Mapping[str, Any]]) -> None:
        """Keep what the servers had of the outer optimizer, for some ranges: one mapping per part."""

    # Shared.

    def push(self, worker: Worker, state: State, batch: Batch, *, bare: bool = False) -> None:
        """Push what lies in the flat gradients; the answer holds the next lease and, unless `bare`, the parameters."""
        done = worker.round
        pushes = client.Pushes(
            worker,
            state.served,
            batch._replace(samples=done.samples, weight=1.0),
            lease=batch.lease,
            options=[self.outer(worker)] * len(worker.optimizer.param_groups),
            pull=self.pull_codec,
            whole=True,
            bare=bare,
            size=done.samples,
            facts={"pace": done.busy_ns / max(1, done.steps)},
        )
        pushes.finish(done.loss / max(1, done.samples))
        _, facts = pushes.take()
        worker.outgoing.step_done()
        worker.round, worker.lease_done = Round(), batch.lease
        worker.next_lease = facts if "lease" in facts else None


@final
@dataclass(frozen=True, kw_only=True)
class AsyncLocalSGD(Leasing):
    """Deltas to servers, parameters back, whenever a worker is through with its lease."""

    name: ClassVar[str] = "async-local-sgd"

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    delay: int | None = None
    """Pushes between two uses of momentum, which together count as one outer step; as many as there are workers when
    not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.outer_lr > 0:
            raise ConfigError(f"{self.name}: outer_lr must be above 0, got {self.outer_lr}")
        if not 0 <= self.outer_momentum < 1:
            raise ConfigError(f"{self.name}: outer_momentum must be from 0 to below 1, got {self.outer_momentum}")
        if self.delay is not None and self.delay < 1:
            raise ConfigError(f"{self.name}: delay must be at least 1, got {self.delay}")

    def outer(self, worker: Worker) -> Meta:
        return {"lr": self.outer_lr, "momentum": self.outer_momentum, "delay": self.delay or worker.comm.size}

    def exchange(self, worker: Worker, state: State, batch: Batch) -> None:
        for delta, before, now in zip(worker.flat.grads, state.there, worker.params, strict=True):
            torch.sub(before, now, out=delta[: now.numel()])
        self.push(worker, state, batch)
        for before, now in zip(state.there, worker.params, strict=True):
            before.copy_(now)
        worker.comm.clock.touch(2 * worker.flat.nbytes)

    def outer_state(self, worker: Worker, ranges: Sequence[Range]) -> list[dict[str, Any]]:
        kept = {name.removeprefix(_KEPT): flats for name, flats in worker.kept.items() if name.startswith(_KEPT)}
        states = []
        for r in ranges:
            for part in r.parts:
                place = slice(part.offset, part.offset + part.stop - part.start)
                state: dict[str, Any] = {key: r.of(flats)[place] for key, flats in kept.items()}
                states.append({k: v[0].item() if k == "count" else v for k, v in state.items()})
        return states

    def bring_home(self, worker: Worker, ranges: Sequence[Range], states: Sequence[Mapping[str, Any]]) -> None:
        found = iter(states)
        for r in ranges:
            for part in r.parts:
                place = slice(part.offset, part.offset + part.stop - part.start)
                for key, value in next(found).items():  # a count is kept as often as there are elements
                    flats = worker.kept.setdefault(_KEPT + key, [torch.zeros_like(p) for p in worker.params])
                    r.of(flats)[place] = value


def _mean_moments(worker: Worker, samples: int) -> None:
    """Average the inner optimizers' moments by the samples that each worker has trained on. Collective."""
    if worker.comm.size == 1:
        return
    total = torch.tensor([float(samples)], dtype=torch.float64)
    worker.comm.wait(worker.comm.all_reduce(total))
    mean_moments(worker, samples / total.item() if total.item() else 1 / worker.comm.size)
