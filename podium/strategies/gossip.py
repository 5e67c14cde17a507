"""Gossip: each worker takes its own steps and mixes its parameters with those of a few neighbours.

    x_i <- sum over j of W_ij x_j  -  eta g_i

Lian et al., 2017, Can Decentralized Algorithms Outperform Centralized Algorithms?, arXiv 1705.09056 (D-PSGD). A step
costs each worker one message of the model's size per neighbour, however many workers there are, and it waits for its
neighbours only. `podium/strategies/graphs.py` has the graphs and their weights.

With `overlap`, as in the paper's algorithm, workers mix the parameters from before the step, and send them while the
gradient is computed. Without it, workers step first and mix the result, x_i <- sum of W_ij (x_j - eta g_j): they wait
for the network, and on the complete graph plain SGD equals all-reduce.

`push_sum`: in graphs where some workers receive from more neighbours than others, replicas drift from the mean, unless
each worker also mixes a scalar weight, which begins at 1, and divides by it wherever it uses parameters: Assran et al.,
2019, Stochastic Gradient Push, arXiv 1811.10792. Here x_i are numerators, and gradients are taken at x_i / w_i. On
the regular graphs the weights stay at 1.

A worker's step is weighted by its samples: where a global step was divided unevenly, the optimizer's move is scaled by
this worker's part of the step times the number of workers, so that the mean replica moves by the mean over samples.

Workers exchange votes every `agree_every` steps, so a stop takes effect up to `agree_every` + 1 steps later. Replicas
differ during training: validation before the end is that of the first worker. `finish` averages parameters and moments
exactly. Parameters are sent as they are, without a codec.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from podium.comm.schedule import Chain, Move
from podium.errors import ConfigError
from podium.strategies.averaging import average, need_dense
from podium.strategies.base import Strategy
from podium.strategies.checks import at_least
from podium.strategies.graphs import NEEDS_PUSH_SUM, Graph, Mixing, mixing
from podium.strategies.traits import Payload

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Handle
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


@dataclass
class GossipState:
    rooms: list[_Room]  # by flat buffer: numerators, which are the parameters themselves without push-sum
    weights: _Room  # push-sum's scalar
    salt: int
    turn: int = 0
    samples: int = 0
    votes: tuple[Handle, Tensor] | None = None  # in flight


@final
@dataclass(frozen=True, kw_only=True)
class Gossip(Strategy[GossipState]):
    """Synchronous decentralised SGD."""

    name: ClassVar[str] = "gossip"
    payload: ClassVar[Payload] = Payload(kind="parameters", point_to_point=True)

    graph: Graph = "one-peer"
    """Which workers mix with each other; `random` needs `push_sum`."""
    push_sum: bool = False
    """Whether workers also mix a scalar weight and divide their parameters by it."""
    overlap: bool = True
    """Whether parameters are sent while the gradient is computed; the mixed parameters then lack this step."""
    agree_every: int = 16
    """Steps between two exchanges of votes and losses."""
    bucket_bytes: int = 8 << 20

    def __post_init__(self) -> None:
        at_least(1, self, "agree_every", "bucket_bytes")
        if self.graph in NEEDS_PUSH_SUM and not self.push_sum:
            raise ConfigError(
                f"gossip: graph={self.graph} needs push_sum=true, since workers receive from unequal numbers of workers"
            )

    def init(self, worker: Worker) -> GossipState:
        need_dense(worker, self.name)
        if worker.comm.size > 1:
            worker.comm.meet()
        weights = _Room(torch.ones(1, dtype=torch.float64))
        return GossipState([_Room(p) for p in worker.params], weights, worker.context.seed + worker.position)

    def step(self, worker: Worker, state: GossipState, batch: Batch) -> Tensor:
        comm = worker.comm
        part = mixing(self.graph, comm.index, comm.size, state.turn, directed=self.push_sum, seed=state.salt)
        if comm.size == 1:
            loss = worker.train_locally(batch)
        elif self.overlap:
            sent = self._send(worker, state, part)
            loss = self._own_step(worker, state, batch)
            self._mix(worker, state, part, sent)
            self._add_steps(worker, state)
        else:
            loss = self._own_step(worker, state, batch)
            self._add_steps(worker, state)
            self._mix(worker, state, part, self._send(worker, state, part))
        if comm.size > 1:
            self._take_parameters(worker, state)
        state.turn += 1
        state.samples += batch.samples
        self._exchange_votes(worker, state)
        return loss

    def finish(self, worker: Worker, state: GossipState) -> None:
        """Average exactly: afterwards all replicas are equal, and push-sum's weights are no longer needed."""
        self._count_votes(worker, state)
        average(worker, state.samples, [room.own for room in state.rooms])
        worker.end_round()

    # A step.

    def _own_step(self, worker: Worker, state: GossipState, batch: Batch) -> Tensor:
        """One step of the optimizer; the parameters' buffers then hold its move, scaled by samples."""
        loss = worker.train_locally(batch)
        scale, weight = batch.weight * worker.comm.size, float(state.weights.own)
        for step, room in zip(worker.params, state.rooms, strict=True):
            step.sub_(room.own if weight == 1.0 else room.own / weight).mul_(scale)
        return loss

    def _add_steps(self, worker: Worker, state: GossipState) -> None:
        for step, room in zip(worker.params, state.rooms, strict=True):
            room.own.add_(step)

    def _send(self, worker: Worker, state: GossipState, part: Mixing) -> list[Handle]:
        """Start to exchange numerators with the neighbours; never waits."""
        rooms = [*([state.weights] if self.push_sum else []), *state.rooms]
        return [room.exchange(worker.comm, part) for room in rooms]

    def _mix(self, worker: Worker, state: GossipState, part: Mixing, sent: list[Handle]) -> None:
        worker.comm.wait(*sent)
        for room in state.rooms:
            room.mix(part)
        if self.push_sum:
            state.weights.mix(part)
        worker.comm.clock.touch(worker.flat.nbytes * (1 + len(part.receives)))

    def _take_parameters(self, worker: Worker, state: GossipState) -> None:
        """Set the parameters to the numerators over the weight."""
        weight = float(state.weights.own)
        for mine, room in zip(worker.params, state.rooms, strict=True):
            mine.copy_(room.own if weight == 1.0 else room.own / weight)

    # Votes are counted one step after they are sent: they have arrived by then, unless a worker is further behind.

    def _exchange_votes(self, worker: Worker, state: GossipState) -> None:
        self._count_votes(worker, state)
        if state.turn % self.agree_every == 0:
            ballots = worker.votes.ballot(worker.progress.close_round())
            state.votes = worker.comm.all_reduce(ballots), ballots

    def _count_votes(self, worker: Worker, state: GossipState) -> None:
        if state.votes is None:
            return
        (handle, ballots), state.votes = state.votes, None
        worker.comm.wait(handle)
        worker.votes.count(ballots)


class _Room:
    """A flat tensor, followed by room for the neighbours' tensors."""

    def __init__(self, tensor: Tensor) -> None:
        self._all = tensor.detach().clone()
        self._numel = tensor.numel()

    @property
    def own(self) -> Tensor:
        return self._all[: self._numel]

    def exchange(self, comm: Communicator, part: Mixing) -> Handle:
        numel, wanted = self._numel, (1 + len(part.receives)) * self._numel
        if self._all.numel() < wanted:
            self._all = torch.cat([self.own, self.own.new_empty(wanted - numel)])
        chain = Chain(Move("send", peer, 0, 0, numel) for peer in part.sends)
        chain += [Move("put", p, 0, k * numel, (k + 1) * numel) for k, p in enumerate(part.receives, 1)]
        return comm.exchange([chain], self._all[:wanted])

    def mix(self, part: Mixing) -> None:
        own = self.own.mul_(part.own)
        for k in range(1, 1 + len(part.receives)):
            own.add_(self._all[k * self._numel : (k + 1) * self._numel], alpha=part.weight)
