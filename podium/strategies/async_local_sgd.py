"""Asynchronous local SGD: many local steps on leased samples, then one push of their sum; no worker waits.

    worker    theta_i = theta as the servers answered;  H_i steps of the task's own optimizer;  push theta - theta_i
    servers   theta moves by the outer optimizer, once per push: delayed Nesterov (`podium/servers/outer.py`)

A lease is H_i local batches, each a worker's part of a global step, so all samples are used once per epoch. The rate
of a local step is that of the global step in which its batch lies. With `steps=speed` the length of a lease is
proportional to its worker's speed (DyLU), so that all workers push about equally often.

The inner optimizer's moments stay on the worker; at the end of a segment they are averaged by samples, and workers keep
the outer momentum until they send it to the servers of the next segment.

Liu et al., 2024, Asynchronous Local-SGD Training for Language Modeling, arXiv 2401.09135.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.balance.ranges import check_ranges, weights_of
from podium.servers.gate import Rules
from podium.servers.ranges import Range
from podium.servers.wire.messages import lease_of
from podium.servers.worker_side.collecting import leave
from podium.servers.worker_side.pushing import Pushes, PushPlan
from podium.servers.worker_side.seeding import seed_for, seed_together, seeded_here
from podium.servers.worker_side.served import Served, meet, unit_bytes_for
from podium.strategies.averaging import average, need_plain_codec
from podium.strategies.base import Strategy
from podium.strategies.checks import above_zero, at_least, fraction
from podium.strategies.traits import Cadence, Payload, ServerSpec

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker

_KEPT = "outer "
"""The outer optimizer's entries in the worker's strategy state begin with this."""


@dataclass
class State:
    served: Served
    there: list[Tensor]  # the servers' parameters as this worker last received them
    samples: int = 0  # that this worker has trained on since the segment began


@dataclass(frozen=True, kw_only=True)
class Leasing(Strategy[State]):
    """Workers train alone on leases of several batches and exchange with servers after each lease."""

    cadence: ClassVar[Cadence] = Cadence(every="lease", survives_loss=True, compares_speeds=False)
    payload: ClassVar[Payload] = Payload(kind="own")

    period: int = 8
    """Local steps between two exchanges; with `steps=speed`, those of the fastest worker."""
    steps: Literal["equal", "speed"] = "equal"
    """Whether all workers take `period` steps, or each as many as fit into the fastest worker's time for them."""
    servers: int = 1
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """Whether servers have processes of their own or live in the workers'."""
    ranges: str = "equal"
    """How much of the parameters each server holds: `equal`, by `speed`, or numbers, as with parameter-server."""
    pull: str = "dense"
    """The codec that packs the servers' answers, `NAME[:K=V;…]`; the run's `codec` packs the workers' pushes."""
    replicas: int = 1
    """How many servers hold each range; with 2 or more, a lost server loses nothing."""
    snapshot_every: int = 100
    """Updates between two snapshots of a server, from which it is restored when no server has a copy; 0: none."""
    unit_bytes: int | None = None
    """Size of one message: 8 MB over a network, 32 MB in shared memory, when not given."""
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        at_least(1, self, "period", "servers", "replicas", "bucket_bytes", "unit_bytes")
        at_least(0, self, "snapshot_every")
        check_ranges(self.name, self.ranges, self.servers)
        self.server_spec.check_options(self.name)

    @cached_property
    def server_spec(self) -> ServerSpec:
        return ServerSpec(
            count=self.servers,
            colocated=self.placement == "colocated",
            role="outer",
            replicas=self.replicas,
            snapshot_every=self.snapshot_every,
            pull=self.pull,
            replaceable=True,
            not_replayed="steps=speed (its leases follow the clock)" if self.steps == "speed" else "",
        )

    def init(self, worker: Worker) -> State:
        need_plain_codec(worker, self.name)
        unit_bytes = self.unit_bytes or unit_bytes_for(worker)
        weights = weights_of(self.name, self.ranges, worker.comm, updates=worker.comm.size)
        served = meet(worker, unit_bytes, weights)
        seed = seed_for(worker, Rules(), unit_bytes)._replace(
            weights=weights, local_steps=self.period, by_speed=self.steps == "speed", outer=self.outer(worker)
        )
        places = seeded_here(worker, self.server_spec.colocated)
        seed_together(worker, served, places, seed, lambda ranges: self.outer_state(worker, ranges))
        worker.progress.close_round()
        return State(served, [flat.clone() for flat in worker.params])

    def step(self, worker: Worker, state: State, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if worker.leases.next is None:  # that was the last batch of the lease
            state.samples += worker.round.samples
            self.exchange(worker, state, batch)
        return loss

    def finish(self, worker: Worker, state: State) -> None:
        """All workers copy the servers' parameters and average their moments."""
        live = leave(worker, state.served, lambda ranges, states: self.bring_home(worker, ranges, states))
        if live is not None and live == set(worker.comm.workers):  # else all workers will copy the moments of one
            average(worker, state.samples)

    # Different in each subclass.

    @abstractmethod
    def outer(self, worker: Worker) -> Meta:
        """The outer optimizer's settings."""

    @abstractmethod
    def exchange(self, worker: Worker, state: State, batch: Batch) -> None:
        """Exchange with the servers at the end of a lease."""

    def outer_state(self, worker: Worker, ranges: Sequence[Range]) -> list[dict[str, Any]]:
        """The outer optimizer's state of these ranges, one mapping per part."""
        return [{} for r in ranges for _ in r.parts]

    def bring_home(self, worker: Worker, ranges: Sequence[Range], states: Sequence[Mapping[str, Any]]) -> None:
        """Store the servers' outer optimizer state for some ranges: one mapping per part."""

    # Shared.

    def push(self, worker: Worker, state: State, batch: Batch, *, bare: bool = False) -> None:
        """Push the flat gradient buffers; the answer holds the next lease and, unless `bare`, the parameters."""
        done = worker.round
        plan = PushPlan(
            batch.lease,
            done.samples,
            [self.outer(worker)] * len(worker.optimizer.param_groups),
            self.server_spec.pull_codec,
            whole=True,
            bare=bare,
            pace=done.busy_ns / max(1, done.steps),
        )
        pushes = Pushes(worker, state.served, batch._replace(samples=done.samples, weight=1.0), plan)
        pushes.finish(done.loss / max(1, done.samples))
        reply = pushes.take()
        worker.sender.step_done()
        worker.progress.close_round()
        worker.leases.applied(batch.lease)
        worker.leases.put(lease_of(reply))


@final
@dataclass(frozen=True, kw_only=True)
class AsyncLocalSGD(Leasing):
    """At the end of its lease, a worker pushes its drift to the servers and pulls their parameters."""

    name: ClassVar[str] = "async-local-sgd"

    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    delay: int | None = None
    """Pushes between two uses of momentum, which together count as one outer step; as many as there are workers when
    not given."""

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self, "outer_lr")
        fraction(self, "outer_momentum", below_one=True)
        at_least(1, self, "delay")

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
        kept = {
            name.removeprefix(_KEPT): flats for name, flats in worker.strategy_state.items() if name.startswith(_KEPT)
        }
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
                for key, value in next(found).items():  # a count is stored once per element
                    flats = worker.strategy_state.setdefault(_KEPT + key, [torch.zeros_like(p) for p in worker.params])
                    r.of(flats)[place] = value
