"""AD-PSGD: asynchronous gossip in pairs. No worker waits for the slowest, and no server holds the parameters.

Lian et al., 2018, Asynchronous Decentralized Parallel Stochastic Gradient Descent, arXiv 1710.06952.

Workers at even places are active, those at odd ones passive. An active worker calls a passive one, drawn at random,
with its parameters; the passive one takes the average of both and answers with it, and so

    x_i, x_j <- (x_i + x_j) / 2        then        x_i <- x_i - eta g_i, with g_i taken before the averaging

Only active workers call, so pairs cannot deadlock. The gradient is computed while the call is in flight. A passive
worker answers between its steps and while it waits for samples. An active worker without an answer continues alone for
up to `ahead` steps and applies the average when it arrives: x_i + average - what it sent. So the sum over all workers
changes by their steps alone, and an active worker waits for a slow passive one only after `ahead` steps.

Workers lease samples, so that a fast worker trains on more of them. A server beside the first worker lends them; it
holds no parameters. The learning rate is the task's own: a lease is a worker's part of a global step, and the mean
replica moves by an N-th of each. A lease's step is scaled by its samples, as under `gossip`.

Replicas differ during training: validation before the end is that of the first worker. `finish` averages parameters and
moments exactly. Parameters are sent as they are, without a codec.
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
from podium.servers.leases.lease import PATIENCE
from podium.servers.wire.messages import Draw, DrawReply, Leave, decode, encode
from podium.servers.worker_side.seeding import seed_for
from podium.strategies.averaging import average, need_dense
from podium.strategies.base import Strategy
from podium.strategies.checks import at_least
from podium.strategies.traits import Cadence, Payload, ServerSpec

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


@dataclass
class PairState:
    calls: tuple[int, ...]  # workers that this one may call; none where it is passive or alone
    draws: np.random.Generator
    sent: list[Tensor]  # the parameters sent with the call in flight, …
    average: list[Tensor]  # … and the average in its answer
    call: Handle | None = None
    age: int = 0  # steps since the call
    samples: int = 0
    through: set[int] = field(default_factory=set)  # active workers that have made their last call


@final
@dataclass(frozen=True, kw_only=True)
class ADPSGD(Strategy[PairState]):
    """Asynchronous decentralised SGD."""

    name: ClassVar[str] = "ad-psgd"
    cadence: ClassVar[Cadence] = Cadence(every="lease", compares_speeds=False)
    payload: ClassVar[Payload] = Payload(kind="parameters", point_to_point=True)
    server_spec: ClassVar[ServerSpec] = ServerSpec(count=1, colocated=True, role="lender")

    graph: Literal["complete", "ring"] = "complete"
    """Which workers an active one may call: any passive one, or its two neighbours."""
    ahead: int = 4
    """Steps that an active worker takes while its call is unanswered, before it waits."""
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        at_least(1, self, "ahead", "bucket_bytes")

    def init(self, worker: Worker) -> PairState:
        need_dense(worker, self.name)
        comm = worker.comm
        most, size = comm.message_bytes, sum(p.nbytes for p in worker.params)
        if most is not None and size > most:
            raise ConfigError(f"{self.name}: all parameters go in one message of at most {most} bytes, got {size}")
        if comm.index == 0:
            seed = seed_for(worker, Rules())._replace(lends_only=True)
            comm.wait(comm.call(comm.servers[0], "seed", encode(seed)))
        draws = np.random.default_rng([worker.context.seed, worker.position, comm.rank])
        sent, average_ = ([torch.empty_like(p) for p in worker.params] for _ in range(2))
        state = PairState(self._peers(worker), draws, sent, average_)
        comm.barrier()
        worker.leases.clear()
        self._next_lease(worker, state)
        return state

    def step(self, worker: Worker, state: PairState, batch: Batch) -> Tensor:
        if state.call is None and state.calls:
            self._call(worker, state)
        loss = self._own_step(worker, batch)
        worker.leases.applied(batch.lease)
        self._next_lease(worker, state)
        state.age, state.samples = state.age + 1, state.samples + batch.samples
        if state.call is not None and (state.call.done or state.age >= self.ahead):
            self._take_average(worker, state)
        return loss

    def finish(self, worker: Worker, state: PairState) -> None:
        """Active workers announce their last step, passive ones answer until all have done so; then all average."""
        comm = worker.comm
        self._take_average(worker, state)
        if _is_active(worker, comm.rank):
            for rank in comm.workers[1::2]:
                comm.send(rank, "through", {})
        else:
            while not state.through >= set(comm.workers[::2]):
                self._hear(worker, state, comm.recv(PATIENCE * comm.deadline_s))
        comm.wait(comm.call(comm.servers[0], "leave", encode(Leave())), deadline_s=PATIENCE * comm.deadline_s)
        average(worker, state.samples, worker.params)
        worker.end_round()

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
        """Apply the answer of the call in flight: the average minus what was sent."""
        if state.call is None:
            return
        worker.comm.wait(state.call, deadline_s=PATIENCE * worker.comm.deadline_s)
        state.call = None
        for mine, sent, average_ in zip(worker.params, state.sent, state.average, strict=True):
            mine.add_(average_.sub_(sent))
        worker.comm.clock.touch(2 * worker.flat.nbytes)

    def _hear(self, worker: Worker, state: PairState, message: Message) -> None:
        """Answer another worker, between two steps of this one."""
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
        """Return the last lease as done and request the next, answering other workers meanwhile.

        The feed takes the lease from `worker.leases`. With no samples left, the server answers once all leases are
        returned.
        """
        comm, patience_s = worker.comm, PATIENCE * worker.comm.deadline_s
        asked = Draw(worker.leases.take_applied(), worker.votes.requested)
        draw = comm.call(comm.servers[0], "draw", encode(asked))
        while (message := comm.poll(draw, deadline_s=patience_s)) is not None:
            self._hear(worker, state, message)
        (answer,) = comm.wait(draw)
        assert answer is not None
        worker.leases.put(decode(DrawReply, answer).told(answer.body))

    def _parts(self, worker: Worker) -> int:
        """The number of leases into which a global step is cut."""
        return min(worker.comm.size, worker.progress.batch_size)


def _is_active(worker: Worker, rank: int) -> bool:
    return worker.comm.workers.index(rank) % 2 == 0
