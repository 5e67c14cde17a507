"""AD-PSGD: asynchronous gossip in pairs. Nobody waits for the slowest, and nobody holds the parameters.

Lian et al., 2018, Asynchronous Decentralized Parallel Stochastic Gradient Descent, arXiv 1710.06952.

Workers at even places are active, those at odd ones passive. An active worker calls a passive one, drawn at random,
with its parameters; the passive one takes the average of both and answers with it, and so

    x_i, x_j <- (x_i + x_j) / 2        then        x_i <- x_i - eta g_i, with g_i taken before the averaging

Calls go one way between the two kinds only, so there is nothing to deadlock. The gradient is computed while the call is
under way. A passive worker answers between its steps and while it waits for samples; an active one that has no answer
yet goes on by itself for up to `ahead` steps, and takes the average up when it comes: x_i + average - what it sent. So
the sum over all workers changes by their steps alone, and a slow passive worker holds up nobody by more than that.

Samples are leased one after the other, so that a fast worker trains on more of them. They are lent by a server beside
the first worker, which holds no parameters. The learning rate is the task's own: a lease is a worker's part of a global
step, and the mean replica moves by an N-th of each. A lease's step is scaled by its samples, as under `gossip`.

Replicas differ while training goes on: validation in the middle is that of the first worker. `finish` averages
parameters and moments exactly. What travels are parameters as they are: codecs have no part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from podium.comm.base import DEPARTED
from podium.errors import CommError, ConfigError, Lost
from podium.servers.gate import Rules
from podium.servers.server import PATIENCE
from podium.strategies.base import Strategy
from podium.strategies.gossip import average, need_dense

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message, Meta
    from podium.engine.worker import Batch, Worker


@dataclass
class PairState:
    calls: tuple[int, ...]  # whom this worker may call; nobody, if it is passive or alone
    draws: np.random.Generator
    sent: list[Tensor]  # the parameters that went with the call under way, …
    average: list[Tensor]  # … and what they were averaged to
    call: Handle | None = None
    age: int = 0  # steps since it went out
    samples: int = 0
    through: set[int] = field(default_factory=set)  # active workers that will call no more


@final
@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy[PairState]):
    """Asynchronous decentralised SGD."""

    name: ClassVar[str] = "ad-psgd"
    talks: ClassVar[bool] = True
    packs: ClassVar[bool] = False
    compares_speeds: ClassVar[bool] = False
    takes_gradients: ClassVar[bool] = False
    lends_only: ClassVar[bool] = True

    graph: Literal["complete", "ring"] = "complete"
    """Whom an active worker may call: any passive one, or those next to it."""
    ahead: int = 4
    """Steps that an active worker does while its call is unanswered, before it waits."""
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        for name in ("ahead", "bucket_bytes"):
            if getattr(self, name) < 1:
                raise ConfigError(f"ad-psgd: {name} must be at least 1, got {getattr(self, name)}")

    @property
    def server_count(self) -> int:
        return 1

    @property
    def colocated(self) -> bool:
        return True

    @property
    def feed(self) -> Literal["step", "cursor", "round"]:
        return "cursor"

    def init(self, worker: Worker) -> PairState:
        need_dense(worker, self.name)
        comm = worker.comm
        most, size = comm.message_bytes, sum(p.nbytes for p in worker.params)
        if most is not None and size > most:
            raise ConfigError(f"{self.name}: all parameters go in one message of at most {most} bytes, got {size}")
        if comm.index == 0:
            comm.wait(comm.call(comm.servers[0], "seed", self._work(worker)))
        draws = np.random.default_rng([worker.turn.seed, worker.position, comm.rank])
        sent, average_ = ([torch.empty_like(p) for p in worker.params] for _ in range(2))
        state = PairState(self._peers(worker), draws, sent, average_)
        comm.barrier()
        worker.lease_done = -1
        self._next_lease(worker, state)
        return state

    def step(self, worker: Worker, state: PairState, batch: Batch) -> Tensor:
        if state.call is None and state.calls:
            self._call(worker, state)
        loss = self._own_step(worker, batch)
        worker.lease_done = batch.lease
        self._next_lease(worker, state)
        state.age, state.samples = state.age + 1, state.samples + batch.samples
        if state.call is not None and (state.call.done or state.age >= self.ahead):
            self._take_average(worker, state)
        return loss

    def finish(self, worker: Worker, state: PairState) -> None:
        """Active workers say that they are through, passive ones answer until all are; then all average exactly."""
        comm = worker.comm
        self._take_average(worker, state)
        if _is_active(worker, comm.rank):
            for rank in comm.workers[1::2]:
                comm.send(rank, "through", {})
        else:
            while not state.through >= set(comm.workers[::2]):
                self._hear(worker, state, comm.recv(PATIENCE * comm.deadline_s))
        comm.wait(comm.call(comm.servers[0], "leave", {}), deadline_s=PATIENCE * comm.deadline_s)
        average(worker, worker.params, state.samples)
        worker.agree()

    # Pairs.

    def _peers(self, worker: Worker) -> tuple[int, ...]:
        comm = worker.comm
        if not _is_active(worker, comm.rank):
            return ()
        near = (comm.index - 1, comm.index + 1)
        return tuple(
            rank for place, rank in enumerate(comm.workers) if place % 2 and (self.graph == "complete" or place in near)
        )

    def _call(self, worker: Worker, state: PairState) -> None:
        """Send the parameters to a passive worker, to be averaged with its own; never waits."""
        for copy, mine in zip(state.sent, worker.params, strict=True):
            copy.copy_(mine)
        to = state.calls[state.draws.integers(len(state.calls))]
        state.call, state.age = worker.comm.call(to, "average", {}, state.sent, state.average), 0

    def _take_average(self, worker: Worker, state: PairState) -> None:
        """What the call under way came to, as far as it differs from what was sent."""
        if state.call is None:
            return
        worker.comm.wait(state.call, deadline_s=PATIENCE * worker.comm.deadline_s)
        state.call = None
        for mine, sent, average_ in zip(worker.params, state.sent, state.average, strict=True):
            mine.add_(average_.sub_(sent))
        worker.comm.clock.touch(2 * worker.flat.nbytes)

    def _hear(self, worker: Worker, state: PairState, message: Message) -> None:
        """What another worker wants of this one, which is between two steps."""
        comm = worker.comm
        if message.kind == "average":
            for mine, theirs in zip(worker.params, message.body, strict=True):
                mine.add_(theirs.to(mine.device)).mul_(0.5)
            comm.clock.touch(worker.flat.nbytes)
            comm.reply(message, {}, worker.params)
        elif message.kind == "through":
            state.through.add(message.source)
        elif message.kind != DEPARTED:
            raise CommError(f"rank {comm.rank}: rank {message.source} sent an unknown {message.kind!r}")
        elif message.source in comm.workers:
            raise Lost(f"rank {comm.rank}: rank {message.source} is gone")

    # Samples.

    def _own_step(self, worker: Worker, batch: Batch) -> Tensor:
        """One step of the optimizer, scaled by the lease's part of the samples of a global step."""
        scale = batch.weight * self._parts(worker)
        if abs(scale - 1) < 1e-9:
            return worker.train_locally(batch)
        before = [p.clone() for p in worker.params]
        loss = worker.train_locally(batch)
        for mine, was in zip(worker.params, before, strict=True):
            torch.lerp(was, mine, scale, out=mine)
        return loss

    def _next_lease(self, worker: Worker, state: PairState) -> None:
        """Give the last lease back as done and ask for the next, answering others meanwhile.

        The feed finds it there. It may have to wait until everybody is through with theirs.
        """
        comm, patience_s = worker.comm, PATIENCE * worker.comm.deadline_s
        draw = comm.call(comm.servers[0], "draw", {"done": worker.lease_done, "wishes": list(worker.wishes)})
        worker.lease_done = -1
        while (message := comm.poll(draw, deadline_s=patience_s)) is not None:
            self._hear(worker, state, message)
        (answer,) = comm.wait(draw)
        assert answer is not None
        worker.next_lease = answer.meta

    def _work(self, worker: Worker) -> Meta:
        """What is to be lent in this stretch."""
        comm = worker.comm
        return {
            "lends_only": True,
            "workers": list(comm.workers),
            "addresses": list(comm.addresses.items()),
            "servers": list(comm.servers),
            "rules": Rules().to_dict(),
            "mitigation": "none",
            "strength": None,
            "clip_norm": None,
            "leases": True,
            "samples": worker.samples,
            "position": worker.position,
            "end": worker.horizon,
            "batch_size": worker.batch_size,
            "parts": self._parts(worker),
            "codec": None,
            "unit_bytes": 8 << 20,
        }

    def _parts(self, worker: Worker) -> int:
        """Into how many leases a global step is cut."""
        return min(worker.comm.size, worker.batch_size)


def _is_active(worker: Worker, rank: int) -> bool:
    return worker.comm.workers.index(rank) % 2 == 0
