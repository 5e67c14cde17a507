"""Adasum: in every step, the workers' moves are added where their directions differ, and averaged where they agree.

    each worker:  d_i = the move of its own optimizer's step on its own samples
    two moves:    a + b  ->  (1 - a.b / 2 a.a) a + (1 - a.b / 2 b.b) b
    all:          combine pairs of neighbours, then pairs of pairs, and so on; an odd one joins the next level
                  x = x + the last one left, for each parameter tensor separately

Orthogonal moves are added, equal ones averaged. So the learning rate is the one of a single worker, and the step grows
by itself as the workers' moves become independent. The optimizer's moments stay with their workers.

In each step every worker sends its whole move to all other workers, packed by the run's codec. Each of n workers
receives n - 1 times the model, where an all-reduce takes twice the model. Every worker computes the products itself,
with equal bits. The paper halves vectors recursively instead, which sends no more than an all-reduce.

Moves are not weighted by samples: a worker with few samples counts as much as any other; one without any adds nothing.

Maleki et al., 2021, arXiv 2006.02924.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from podium.strategies.averaging import mean_moments, need_plain_codec, round_context
from podium.strategies.base import Strategy
from podium.strategies.checks import at_least
from podium.strategies.traits import Cadence, Payload

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker
    from podium.exchange.codecs.base import StepContext


def adasum(a: Tensor, b: Tensor) -> Tensor:
    """The sum of two moves, without counting their common part twice."""
    x, y = a.double().flatten(), b.double().flatten()
    common, own, other = (float(torch.dot(*pair)) for pair in ((x, y), (x, x), (y, y)))
    of_a = 1 - common / (2 * own) if own else 1.0
    of_b = 1 - common / (2 * other) if other else 1.0
    return a * of_a + b * of_b


def adasum_tree(moves: Sequence[Tensor]) -> Tensor:
    """All moves combined, pair by pair, level by level."""
    level = list(moves)
    while len(level) > 1:
        pairs = [adasum(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = pairs + (level[-1:] if len(level) % 2 else [])
    return level[0]


class AdasumState(NamedTuple):
    """Empty between steps; within a step, the parameters before it."""

    before: list[Tensor]


class _Gathering(NamedTuple):
    """A bucket's moves, while they are gathered."""

    wires: Tensor  # one per row
    handle: Handle


@final
@dataclass(frozen=True, kw_only=True)
class Adasum(Strategy[AdasumState]):
    """Moves are combined after the optimizer's step. With one worker it is plain training in bits."""

    name: ClassVar[str] = "adasum"
    cadence: ClassVar[Cadence] = Cadence(every="round", survives_loss=True)
    payload: ClassVar[Payload] = Payload(kind="drifts")

    bucket_bytes: int = 8 << 20
    """Moves travel in buckets of about this size."""

    def __post_init__(self) -> None:
        at_least(1, self, "bucket_bytes")

    def init(self, worker: Worker) -> AdasumState:
        need_plain_codec(worker, "adasum")
        return AdasumState([torch.empty_like(flat) for flat in worker.params])

    def step(self, worker: Worker, state: AdasumState, batch: Batch) -> Tensor:
        for before, flat in zip(state.before, worker.params, strict=True):
            before.copy_(flat)
        loss = worker.train_locally(batch)
        if worker.comm.size == 1:
            worker.end_round()
        else:
            self._combine(worker, state)
        return loss

    def _combine(self, worker: Worker, state: AdasumState) -> None:
        context = round_context(worker)
        for grad, flat, before in zip(worker.flat.grads, worker.params, state.before, strict=True):
            torch.sub(flat, before, out=grad[: flat.numel()])
        under_way = [self._gather(worker, bucket, context) for bucket in range(worker.buckets)]
        worker.end_round(*(one.handle for one in under_way))
        worker.sender.step_done()
        for bucket, one in enumerate(under_way):
            self._move(worker, state, bucket, _unpacked(worker, bucket, one.wires, context))
        worker.comm.clock.touch(worker.comm.size * worker.flat.nbytes)

    @staticmethod
    def _gather(worker: Worker, bucket: int, context: StepContext) -> _Gathering:
        sender, comm = worker.sender, worker.comm
        packing, span = sender.packings[bucket], sender.spans[bucket]
        comm.clock.touch(round(packing.codec.passes * span.of(worker.flat.grads).nbytes))
        wire = packing.pack(span.of(worker.flat.grads), span, context, sender.memory)
        wires = torch.empty((comm.size, wire.numel()), dtype=wire.dtype, device=wire.device)
        return _Gathering(wires, sender.all_gather(wire, wires.view(-1)))

    @staticmethod
    def _move(worker: Worker, state: AdasumState, bucket: int, moves: Tensor) -> None:
        """Add the combined move to each parameter's value before the step."""
        begin = worker.flat.buckets[bucket].start
        for i in worker.flat.buckets[bucket].pieces:
            piece = worker.flat.pieces[i]
            place = slice(piece.start, piece.stop)
            move = adasum_tree(list(moves[:, piece.start - begin : piece.stop - begin]))
            torch.add(state.before[piece.buffer][place], move, out=worker.params[piece.buffer][place])

    def finish(self, worker: Worker, state: AdasumState) -> None:
        mean_moments(worker, 1 / worker.comm.size)


def _unpacked(worker: Worker, bucket: int, wires: Tensor, context: StepContext) -> Tensor:
    """Each worker's move of this bucket, one per row."""
    codec, span = worker.sender.packings[bucket].codec, worker.sender.spans[bucket]
    moves = torch.zeros((len(wires), span.numel), dtype=worker.params[span.buffer].dtype, device=wires.device)
    for rank, wire, move in zip(worker.comm.workers, wires, moves, strict=True):
        codec.decode_add(wire, move, span, context._replace(rank=rank))
    return moves
