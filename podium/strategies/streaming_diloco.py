"""Streaming DiLoCo: the model in fragments, of which one at a time is on its way while training goes on.

    every sync_every / fragments steps, the next fragment f in turn:
        send     d = sum of w_i (x_i - x), with w_i the worker's part of the samples since f was last sent
    overlap steps later:
        merge    m = outer_momentum m + d;  x = x + outer_lr (d + outer_momentum m)
                 x_i = mix x_i + (1 - mix) x

A fragment is every `fragments`-th layer. At no time is more than one fragment under way, so the network has to carry a
fragment in `overlap` steps, where DiLoCo has it carry the whole model while all wait. Fewer bits are the run's codec's
to give. With one fragment, no overlap and nothing mixed in it is DiLoCo.

Douillard et al., 2025, arXiv 2501.18512.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Span
from podium.exchange.reducing import matrices_of
from podium.exchange.residuals import Sends
from podium.strategies.averaging import mean_moments, need_plain_codec, turn_of
from podium.strategies.base import Strategy
from podium.strategies.diloco import MOMENTUM, Outer
from podium.strategies.rounds import Round

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.flat import Flat
    from podium.engine.worker import Batch, Worker
    from podium.exchange.codecs.base import Turn


@dataclass
class Fragment:
    """Part of the parameters, and when it was last sent."""

    spans: list[tuple[int, Span]]
    """Runs of parameters that lie side by side, each with the bucket whose packing it has."""
    position: int
    samples: int = 0
    """How many this worker had seen then."""


class Flight(NamedTuple):
    """A fragment under way."""

    fragment: Fragment
    due: int  # the step after which it is merged
    turn: Turn
    words: Tensor
    handle: Handle


@dataclass
class StreamState:
    """What all agree on, piece by piece, and what is under way."""

    anchor: list[Tensor]
    drift: list[Tensor]
    """Where what is under way lies; laid out as the parameters are."""
    fragments: list[Fragment]
    began: int
    steps: int = 0
    samples: int = 0
    flight: Flight | None = None


def layers_of(flat: Flat) -> list[list[int]]:
    """Pieces that belong to one module and lie side by side: a weight and its bias, in order of registration."""
    layers: list[list[int]] = []
    for i in reversed(range(len(flat.pieces))):  # they lie in reverse
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
    """DiLoCo whose exchanges hide behind training.

    Nobody waits at a merge unless a worker is more than `overlap` steps behind. A stretch that ends brings home what is
    under way; what was trained since is merged plainly, as in DiLoCo. After a loss, all go on from one survivor's
    parameters as they were when a fragment was last sent: what others had learnt and not yet merged is gone.
    """

    name: ClassVar[str] = "streaming-diloco"
    by_rounds: ClassVar[bool] = True
    sends: ClassVar[Sends] = "drifts"
    survives_loss: ClassVar[bool] = True

    sync_every: int = 50
    """Steps between two merges of the same fragment."""
    fragments: int = 2
    """How many the layers are dealt out to; must divide sync_every."""
    overlap: int = 1
    """Steps between sending and merging."""
    mix: float = 0.5
    """How much of its own parameters a worker keeps in a merge."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        if self.sync_every < 1:
            raise ConfigError(f"streaming-diloco: sync_every must be at least 1, got {self.sync_every}")
        if self.fragments < 1 or self.sync_every % self.fragments:
            raise ConfigError(
                f"streaming-diloco: fragments must divide sync_every ({self.sync_every}), got {self.fragments}"
            )
        if not 0 <= self.overlap < self._every:
            raise ConfigError(
                f"streaming-diloco: overlap must be from 0 to below sync_every / fragments ({self._every}), so that a "
                f"fragment is home before the next is sent, got {self.overlap}"
            )
        if not 0 <= self.mix < 1:
            raise ConfigError(f"streaming-diloco: mix must be from 0 to below 1, got {self.mix:g}")
        self._outer.check("streaming-diloco")

    @property
    def _outer(self) -> Outer:
        return Outer(lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov)

    @property
    def _every(self) -> int:
        """Steps between two fragments."""
        return self.sync_every // self.fragments

    @property
    def outer_every(self) -> int:
        return self.sync_every if self.outer_momentum else 0

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
        """The round ends here; what the workers have to say to each other goes with the fragment."""
        turn = turn_of(worker)
        self._issue(worker, state, fragment, turn)
        words = torch.tensor([*worker.wishes, worker.round.loss, worker.round.samples], dtype=torch.float64)
        worker.round = Round()
        state.flight = Flight(fragment, state.steps + self.overlap, turn, words, worker.comm.all_reduce(words))

    @staticmethod
    def _issue(worker: Worker, state: StreamState, fragment: Fragment, turn: Turn) -> None:
        outgoing = worker.outgoing
        weight = (state.samples - fragment.samples) / max(1, worker.position - fragment.position)
        if worker.position == fragment.position:  # nothing trained since, but mixing has left something
            weight = state.samples / max(1, worker.position - state.began)
        for bucket, span in fragment.spans:
            drift = span.of(state.drift)
            torch.sub(span.of(worker.params), span.of(state.anchor), out=drift).mul_(weight)
            outgoing.reducer.issue(drift, outgoing.packings[bucket], span, turn)
        fragment.position, fragment.samples = worker.position, state.samples

    def _merge(self, worker: Worker, state: StreamState, flight: Flight) -> None:
        """The outer step of what has come home, and what was agreed on with it."""
        worker.outgoing.complete(flight.turn)
        worker.comm.wait(flight.handle)
        worker.outgoing.step_done()
        stop, pause, switch, loss, samples = flight.words.tolist()
        worker.heed((stop > 0, pause > 0, switch > 0))
        worker.step_loss = loss / samples if samples else None
        for _, span in flight.fragment.spans:
            anchor, momentum = span.of(state.anchor), None
            if self.outer_momentum:
                momentum = span.of(worker.kept[MOMENTUM])
            self._outer.step(anchor, span.of(state.drift), momentum)
            span.of(worker.params).mul_(self.mix).add_(anchor, alpha=1 - self.mix)
            worker.comm.clock.touch(anchor.nbytes)
        state.flight = None

    def finish(self, worker: Worker, state: StreamState) -> None:
        if state.steps == 0:
            return
        if state.flight is not None:
            self._merge(worker, state, state.flight)
        if worker.comm.size > 1 or worker.outgoing.memory.of_span:
            self._settle(worker, state)
        elif worker.round.steps:
            worker.agree()  # the mean of one is itself, in bits
        mean_moments(worker, state.samples / max(1, worker.position - state.began))

    def _settle(self, worker: Worker, state: StreamState) -> None:
        """All become the mean of all, of each fragment by the samples since it was last sent."""
        turn = turn_of(worker)
        open_ = [f for f in state.fragments if self.mix or f.position < worker.position]
        for fragment in open_:
            self._issue(worker, state, fragment, turn)
        if worker.round.steps:
            worker.agree()
        worker.outgoing.complete(turn)
        worker.outgoing.step_done()
        for _, span in (span for fragment in open_ for span in fragment.spans):
            span.of(state.anchor).add_(span.of(state.drift))
        for param, anchor in zip(worker.params, state.anchor, strict=True):
            param.copy_(anchor)
