"""Adasum: every step, the workers' moves are added where they differ in direction, and averaged where they agree.

    each worker:  d_i = the move of its own optimizer's step on its own samples
    two moves:    a + b  ->  (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b
    all:          pairs of neighbours, then pairs of pairs, and so on; whoever is left over goes on to the next level
                  x = x + the last one left, for each parameter tensor by itself

Orthogonal moves add up, equal ones are averaged. So the learning rate is the one of a single worker, and the step grows
by itself as the workers' moves become independent. The optimizer's moments stay with their workers.

What travels: every worker's whole move to every other, each step, packed by the run's codec; (n - 1) times the model
arrives at each of n workers, where an all-reduce brings twice the model. The products are worked out by each worker for
itself, alike in bits. The paper halves vectors recursively instead, which moves as little as an all-reduce does.

Samples do not weigh: a worker with few of them counts as much as another, one without any moves nothing.

Maleki et al., 2021, arXiv 2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.residuals import Sends
from podium.strategies.averaging import mean_moments, need_plain_codec, turn_of
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.worker import Batch, Worker
    from podium.exchange.codecs.base import Turn


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two moves without what they have in common counted twice."""
    x, y = a.double().flatten(), b.double().flatten()
    common, own, other = (float(torch.dot(*pair)) for pair in ((x, y), (x, x), (y, y)))
    of_a = 1 - common / (2 * own) if own else 1.0
    of_b = 1 - common / (2 * other) if other else 1.0
    return a * of_a + b * of_b


def adasum_tree(moves: Sequence[Tensor]) -> Tensor:
    """All of them, pair by pair, level by level."""
    level = list(moves)
    while len(level) > 1:
        pairs = [adasum(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0]


class AdasumState(NamedTuple):
    """Between two steps there is nothing; in one, where it began."""

    before: list[Tensor]


class _Gathering(NamedTuple):
    """A bucket's moves on their way to everybody."""

    wires: Tensor  # one per row
    handle: Handle


@final
@dataclass(frozen=True, kw_only=True)
class Adasum(Strategy[AdasumState]):
    """Moves are combined after the optimizer's step. With one worker it is plain training in bits."""

    name: ClassVar[str] = "adasum"
    by_rounds: ClassVar[bool] = True
    sends: ClassVar[Sends] = "drifts"
    survives_loss: ClassVar[bool] = True

    bucket_bytes: int = 8 << 20
    """Moves travel in buckets of about this size."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"adasum: bucket_bytes must be at least 1, got {self.bucket_bytes}")

    def init(self, worker: Worker) -> AdasumState:
        need_plain_codec(worker, "adasum")
        return AdasumState([torch.empty_like(flat) for flat in worker.params])

    def step(self, worker: Worker, state: AdasumState, batch: Batch) -> Tensor:
        for before, flat in zip(state.before, worker.params, strict=True):
            before.copy_(flat)
        loss = worker.train_locally(batch)
        if worker.comm.size == 1:
            worker.agree()
        else:
            self._combine(worker, state)
        return loss

    def _combine(self, worker: Worker, state: AdasumState) -> None:
        turn = turn_of(worker)
        for grad, flat, before in zip(worker.flat.grads, worker.params, state.before, strict=True):
            torch.sub(flat, before, out=grad[: flat.numel()])
        under_way = [self._gather(worker, bucket, turn) for bucket in range(worker.buckets)]
        worker.agree(*(one.handle for one in under_way))
        worker.outgoing.step_done()
        for bucket, one in enumerate(under_way):
            self._move(worker, state, bucket, _unpacked(worker, bucket, one.wires, turn))
        worker.comm.clock.touch(worker.comm.size * worker.flat.nbytes)

    @staticmethod
    def _gather(worker: Worker, bucket: int, turn: Turn) -> _Gathering:
        outgoing, comm = worker.outgoing, worker.comm
        packing, span = outgoing.packings[bucket], outgoing.spans[bucket]
        comm.clock.touch(round(packing.codec.passes * span.of(worker.flat.grads).nbytes))
        wire = packing.pack(span.of(worker.flat.grads), span, turn, outgoing.memory)
        wires = torch.empty((comm.size, wire.numel()), dtype=wire.dtype, device=wire.device)
        return _Gathering(wires, outgoing.reducer.collective.all_gather(comm, wire, wires.view(-1)))

    @staticmethod
    def _move(worker: Worker, state: AdasumState, bucket: int, moves: Tensor) -> None:
        """Parameter by parameter, from where the step began."""
        begin = worker.flat.buckets[bucket].start
        for i in worker.flat.buckets[bucket].pieces:
            piece = worker.flat.pieces[i]
            place = slice(piece.start, piece.stop)
            move = adasum_tree(list(moves[:, piece.start - begin : piece.stop - begin]))
            torch.add(state.before[piece.buffer][place], move, out=worker.params[piece.buffer][place])

    def finish(self, worker: Worker, state: AdasumState) -> None:
        mean_moments(worker, 1 / worker.comm.size)


def _unpacked(worker: Worker, bucket: int, wires: Tensor, turn: Turn) -> Tensor:
    """What each worker says of its move of this bucket, one per row."""
    codec, span = worker.outgoing.packings[bucket].codec, worker.outgoing.spans[bucket]
    moves = torch.zeros((len(wires), span.numel), dtype=worker.params[span.buffer].dtype, device=wires.device)
    for rank, wire, move in zip(worker.comm.workers, wires, moves, strict=True):
        codec.decode_add(wire, move, span, turn._replace(rank=rank))
    return moves
