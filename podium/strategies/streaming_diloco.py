"""Streaming DiLoCo: the model is cut into fragments, and one fragment at a time is synchronised during training.

    every sync_every / fragments steps, the next fragment f in turn:
        send     d = sum of w_i (x_i - x), with w_i the worker's part of the samples since f was last sent
    overlap steps later:
        merge    m = outer_momentum m + d;  x = x + outer_lr (d + outer_momentum m)
                 x_i = mix x_i + (1 - mix) x

A fragment is every `fragments`-th layer. At most one fragment is in flight, and the network has `overlap` steps of time
to carry it, where under DiLoCo all workers wait for the whole model. The run's codec packs fragments. With one
fragment, no overlap and mix 0 it is DiLoCo.

Douillard et al., 2025, arXiv 2501.18512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Span
from podium.exchange.spans import matrices_of
from podium.strategies.averaging import mean_moments, need_plain_codec, round_context
from podium.strategies.base import Strategy
from podium.strategies.checks import above_zero, at_least, fraction
from podium.strategies.diloco import MOMENTUM, Outer
from podium.strategies.traits import Cadence, Payload

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.batch import Batch
    from podium.engine.flat import Flat
    from podium.engine.worker import Worker
    from podium.exchange.codecs.base import StepContext


@dataclass
class Fragment:
    """Some of the layers, and when they were last sent."""

    spans: list[tuple[int, Span]]
    """Contiguous runs of parameters, each with the bucket whose packing it uses."""
    position: int
    samples: int = 0
    """Samples that this worker had seen by then."""


class Flight(NamedTuple):
    """A fragment in flight."""

    fragment: Fragment
    due: int  # the step after which it is merged
    context: StepContext
    ballots: Tensor
    handle: Handle


@dataclass
class StreamState:
    """The parameters that all workers agree on, and the fragment in flight."""

    anchor: list[Tensor]
    drift: list[Tensor]
    """Holds the fragment in flight; laid out as the parameters are."""
    fragments: list[Fragment]
    began: int
    steps: int = 0
    samples: int = 0
    flight: Flight | None = None


def layers_of(flat: Flat) -> list[list[int]]:
    """Adjacent pieces that belong to one module: a weight and its bias, in order of registration."""
    layers: list[list[int]] = []
    for i in reversed(range(len(flat.pieces))):  # the flat buffer has them in reverse
        piece, before = flat.pieces[i], flat.pieces[layers[-1][-1]] if layers else None
        alike = before is not None and piece.name.rpartition(".")[0] == before.name.rpartition(".")[0]
        if alike and before is not None and (piece.buffer, piece.stop) == (before.buffer, before.start):
            layers[-1].append(i)
        else:
            layers.append([i])
    return layers


def _span_of(flat: Flat, layer: list[int]) -> tuple[int, Span]:
    pieces = [flat.pieces[i] for i in reversed(layer)]
    start, stop = pieces[0].start, pieces[-1].stop
    matrices = matrices_of([(p, 0, p.stop - p.start, p.start - start) for p in pieces])
    return flat.bucket_of[layer[0]], Span(pieces[0].buffer, start, stop, matrices)


@final
@dataclass(frozen=True, kw_only=True)
class StreamingDiLoCo(Strategy[StreamState]):
    """DiLoCo whose exchanges overlap with training.

    A merge waits only for a worker that is more than `overlap` steps behind. A segment that ends completes the merge in
    flight; steps since then are averaged plainly, as in DiLoCo. After the loss of a worker, all continue from one
    survivor's parameters as they were when a fragment was last sent: the other workers' steps since then are lost.
    """

    name: ClassVar[str] = "streaming-diloco"
    payload: ClassVar[Payload] = Payload(kind="drifts")

    sync_every: int = 50
    """Steps between two merges of the same fragment."""
    fragments: int = 2
    """Number of fragments; must divide sync_every."""
    overlap: int = 1
    """Steps between sending and merging."""
    mix: float = 0.5
    """The weight of a worker's own parameters in a merge."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        at_least(1, self, "sync_every")
        above_zero(self, "outer_lr")
        fraction(self, "mix", "outer_momentum", below_one=True)
        if self.fragments < 1 or self.sync_every % self.fragments:
            raise ConfigError(
                f"streaming-diloco: fragments must divide sync_every ({self.sync_every}), got {self.fragments}"
            )
        if not 0 <= self.overlap < self._every:
            raise ConfigError(
                f"streaming-diloco: overlap must be from 0 to below sync_every / fragments ({self._every}), so that a "
                f"fragment is merged before the next is sent, got {self.overlap}"
            )

    @property
    def _outer(self) -> Outer:
        return Outer(lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov)

    @property
    def _every(self) -> int:
        """Steps between two fragments."""
        return self.sync_every // self.fragments

    @property
    def cadence(self) -> Cadence:
        outer_every = self.sync_every if self.outer_momentum else 0
        return Cadence(every="round", survives_loss=True, outer_every=outer_every)

    def init(self, worker: Worker) -> StreamState:
        need_plain_codec(worker, self.name)
        self._outer.prepare(worker)
        layers = layers_of(worker.flat)
        if len(layers) < self.fragments:
            raise ConfigError(
                f"streaming-diloco: fragments must be at most the layers of the model ({len(layers)}), "
                f"got {self.fragments}"
            )
        spans = [_span_of(worker.flat, layer) for layer in layers]
        fragments = [Fragment(spans[f :: self.fragments], worker.position) for f in range(self.fragments)]
        anchor = [flat.clone() for flat in worker.params]
        return StreamState(anchor, [torch.zeros_like(flat) for flat in anchor], fragments, worker.position)

    def step(self, worker: Worker, state: StreamState, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        state.steps, state.samples = state.steps + 1, state.samples + batch.samples
        if state.flight is not None and state.steps >= state.flight.due:
            self._merge(worker, state, state.flight)
        if state.steps % self._every == 0:
            self._send(worker, state, state.fragments[(state.steps // self._every - 1) % self.fragments])
        if state.flight is not None and state.steps >= state.flight.due:  # where nothing overlaps
            self._merge(worker, state, state.flight)
        return loss

    def _send(self, worker: Worker, state: StreamState, fragment: Fragment) -> None:
        """The round ends here; votes and losses travel with the fragment."""
        context = round_context(worker)
        self._issue(worker, state, fragment, context)
        ballots = worker.votes.ballot(worker.progress.close_round())
        state.flight = Flight(fragment, state.steps + self.overlap, context, ballots, worker.comm.all_reduce(ballots))

    @staticmethod
    def _issue(worker: Worker, state: StreamState, fragment: Fragment, context: StepContext) -> None:
        sender = worker.sender
        weight = (state.samples - fragment.samples) / max(1, worker.position - fragment.position)
        if worker.position == fragment.position:  # no samples since, but mixing has left a drift
            weight = state.samples / max(1, worker.position - state.began)
        for bucket, span in fragment.spans:
            drift = span.of(state.drift)
            torch.sub(span.of(worker.params), span.of(state.anchor), out=drift).mul_(weight)
            sender.sum_span(drift, sender.packings[bucket], span, context)
        fragment.position, fragment.samples = worker.position, state.samples

    def _merge(self, worker: Worker, state: StreamState, flight: Flight) -> None:
        """Wait for a fragment, take its outer step and count the votes that came with it."""
        worker.sender.complete(flight.context)
        worker.comm.wait(flight.handle)
        worker.sender.step_done()
        worker.votes.count(flight.ballots)
        for _, span in flight.fragment.spans:
            anchor, momentum = span.of(state.anchor), None
            if self.outer_momentum:
                momentum = span.of(worker.strategy_state[MOMENTUM])
            self._outer.step(anchor, span.of(state.drift), momentum)
            span.of(worker.params).mul_(self.mix).add_(anchor, alpha=1 - self.mix)
            worker.comm.clock.touch(anchor.nbytes)
        state.flight = None

    def finish(self, worker: Worker, state: StreamState) -> None:
        if state.steps == 0:
            return
        if state.flight is not None:
            self._merge(worker, state, state.flight)
        if worker.comm.size > 1 or worker.sender.memory.of_span:
            self._settle(worker, state)
        elif worker.round.steps:
            worker.end_round()  # the mean of one is itself, in bits
        mean_moments(worker, state.samples / max(1, worker.position - state.began))

    def _settle(self, worker: Worker, state: StreamState) -> None:
        """All workers take the mean of their parameters, weighted by samples since each fragment was last sent."""
        context = round_context(worker)
        open_ = [f for f in state.fragments if self.mix or f.position < worker.position]
        for fragment in open_:
            self._issue(worker, state, fragment, context)
        if worker.round.steps:
            worker.end_round()
        worker.sender.complete(context)
        worker.sender.step_done()
        for _, span in (span for fragment in open_ for span in fragment.spans):
            span.of(state.anchor).add_(span.of(state.drift))
        for param, anchor in zip(worker.params, state.anchor, strict=True):
            param.copy_(anchor)
