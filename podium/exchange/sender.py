"""The one object between a bucket and the network: it packs a bucket by a codec and sums it by a collective.

A strategy issues buckets, or spans of any flat tensor, while backward still runs (`issue`, `sum_span`), and then waits
for the sums (`complete`). The collective, the codec and error feedback are chosen only here, so that every codec works
with every strategy and every collective.

    issue(bucket)  ->  codec.encode  ->  collective.all_reduce  ->  the communicator: memory, backend or schedule
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from podium.comm.base import Communicator, Handle
from podium.engine.flat import Flat
from podium.exchange.codec_choice import Check, choose
from podium.exchange.codecs.auto import AutoCodec
from podium.exchange.codecs.base import Codec, Memory, Rounds, RoundsCodec, Span, StepContext
from podium.exchange.codecs.dense import Dense
from podium.exchange.codecs.feedback import keep_own_residual, with_residual
from podium.exchange.collectives.base import Collective
from podium.exchange.packing import Packing
from podium.exchange.residuals import Residuals
from podium.exchange.spans import spans_of
from podium.records.recorder import Recorder


class Sender:
    """One worker's outgoing tensors: their collective, their packing and their residuals."""

    def __init__(self, comm: Communicator, flat: Flat, packing: Packing, collective: Collective) -> None:
        self.comm, self.flat, self._asked = comm, flat, collective
        self.collective = collective
        """The collective in use; `prepare` may replace the configured one."""
        self.memory = Memory(flat.grads, sum(p.stop - p.start for p in flat.pieces if not p.row))
        """The codec's state between steps."""
        self.residuals = Residuals(comm, flat, self.memory, packing.codec)
        self.spans = spans_of(flat)
        """Each bucket as a codec sees it."""
        self.news: list[dict[str, Any]] = []
        """Decisions about packing since the last `record_news`."""
        self._handles: list[Handle] = []
        self._packed: list[_Summed | _Gathered | _InRounds] = []
        self._halfway = False  # waiting for one of several sums of a codec
        self._spent_ns = 0  # since the last `complete`, on packing, waiting and unpacking
        self._set(packing)

    def _set(self, packing: Packing) -> None:
        self.packing = packing
        self.packings = [packing] * len(self.spans)
        """How each bucket is packed."""
        self.push: tuple[str | None, Packing] = (None, packing)
        """How pushes to servers are packed; with the codec's name where it differs from the run's first codec."""
        self._check: Check | None = None
        self._prepared_for = -1

    def use(self, packing: Packing, name: str | None) -> None:
        """Pack by another codec from here on; pushes carry `name`, so that servers unpack by it."""
        self.residuals.use(packing.codec)
        self._set(packing)
        self.push = (name, packing)

    @property
    def is_exact(self) -> bool:
        """Whether packing loses nothing."""
        return all(packing.codec.exact for packing in self.packings)

    @property
    def _is_alone(self) -> bool:
        """Whether this worker has no other rank to pack for."""
        return self.comm.size == 1 and not self.packing.codec.takes_momentum and not self.comm.servers

    # A step.

    def issue(self, bucket: int, context: StepContext) -> None:
        """Start to sum a bucket's gradients over the workers; never waits."""
        packing, span = self.packings[bucket], self.spans[bucket]
        if packing.codec.exact or self._is_alone:
            self.residuals.add_to(span.of(self.flat.grads), span)
            self._handles.append(self.collective.all_reduce(self.comm, self.flat.bucket(bucket)))
            return
        self.sum_span(span.of(self.flat.grads), packing, span, context)
        if bucket == len(self.spans) - 1:
            self._handles.append(self.collective.all_reduce(self.comm, self.flat.tail))

    def sum_span(self, tensor: Tensor, packing: Packing, span: Span, context: StepContext) -> None:
        """Start to sum this span; never waits. The caller must not touch the tensor until `complete`."""
        codec, comm, began = packing.codec, self.comm, self.comm.clock.now_ns()
        if codec.exact or (comm.size == 1 and not codec.takes_momentum):
            self.residuals.add_to(tensor, span, ends_with_step=False)
            self._handles.append(self.collective.all_reduce(comm, tensor))
        else:
            comm.clock.touch(round(codec.passes * tensor.nbytes))
            self._packed.append(self._pack(tensor, packing, span, context))
        self._spent_ns += comm.clock.now_ns() - began

    def _pack(
        self, tensor: Tensor, packing: Packing, span: Span, context: StepContext
    ) -> _Summed | _Gathered | _InRounds:
        codec = packing.codec
        if isinstance(codec, RoundsCodec):
            whole = with_residual(codec, tensor, span, self.memory) if packing.keeps_residual else tensor
            rounds = codec.rounds(whole, span, context, self.memory)
            wire = rounds.first()
            residual = (whole, self.memory) if packing.keeps_residual else None
            return _InRounds(span, tensor, rounds, residual, wire, self.all_reduce(wire))
        wire = packing.pack(tensor, span, context, self.memory)
        if codec.reduction == "sum":
            return _Summed(codec, span, tensor, wire, self.all_reduce(wire))
        wires = torch.empty((self.comm.size, wire.numel()), dtype=wire.dtype, device=wire.device)
        return _Gathered(codec, span, tensor, wires, self.all_gather(wire, wires.view(-1)))

    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum a tensor without packing."""
        return self.collective.all_reduce(self.comm, tensor)

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        """Gather every worker's flat tensor into `into`, in rank order."""
        return self.collective.all_gather(self.comm, tensor, into)

    def complete(self, context: StepContext) -> None:
        """Wait for everything that was issued; every tensor then holds the sum over the workers."""
        began = self.comm.clock.now_ns()
        (packed, self._packed), (handles, self._handles) = (self._packed, []), (self._handles, [])
        in_rounds = [one for one in packed if isinstance(one, _InRounds)]
        self._halfway = bool(in_rounds)
        while in_rounds:
            in_rounds = [one for one in in_rounds if one.next_round(self.comm, self.all_reduce)]
        self.comm.wait(*handles, *(one.handle for one in packed if not isinstance(one, _InRounds)))
        for one in packed:
            one.unpack(context)
        self._halfway = False
        spent, self._spent_ns = self._spent_ns + self.comm.clock.now_ns() - began, 0
        if self._check is not None and (found := self._check.add(spent, self.comm)) is not None:
            self._learn(found)

    def step_done(self) -> None:
        """The step is done: its residual becomes valid."""
        self.residuals.step_done(nothing_is_packed=self._is_alone or self.is_exact)

    def drop(self) -> None:
        """Forget everything that was issued: the exchange has failed."""
        if self._halfway or any(isinstance(one, _InRounds) for one in self._packed):
            self.memory.forget()  # a codec with several sums knows its residual only after the last one
        self._handles.clear()
        self._packed.clear()
        self._halfway = False

    # Choices.

    def prepare(self) -> None:
        """Prepare the collective for the present members, and choose codecs under `codec=auto`.

        Collective; a second call in the same generation does nothing.
        """
        if self._prepared_for == self.comm.generation:
            return
        self.collective = self._asked.prepare(self.comm)
        self._prepared_for = self.comm.generation
        codec = self.packing.codec
        if isinstance(codec, AutoCodec):
            choice = choose(codec, self.comm, self.collective, self.spans, self.flat.grads)
            self.packings, self.push = choice.packings, (choice.specs[0], choice.packings[0])
            self.news.append({"kind": "codec", **choice.facts})
            self._check = Check(choice, codec.check_after) if codec.check_after else None

    def record_news(self, recorder: Recorder, step: int) -> None:
        """Write the decisions about packing as records."""
        news, self.news = self.news, []
        for facts in news:
            kind = facts.pop("kind")
            recorder.write(kind, self.comm.clock.now_ns(), step=step, **facts)

    def _learn(self, found: dict[str, Any]) -> None:
        """Stop packing where it takes longer than dense was predicted to take."""
        self.news.append({"kind": "codec_check", **found})
        if not found["keeps"]:
            self.packings = [Packing(Dense(), feedback=False)] * len(self.packings)
        self._check = None


# A span in flight, by how its codec combines the workers' wires.


class _Summed(NamedTuple):
    """The collective sums the wires."""

    codec: Codec
    span: Span
    tensor: Tensor  # receives the sum
    wire: Tensor  # as it was sent; the sum once the handle is done
    handle: Handle

    def unpack(self, context: StepContext) -> None:
        self.tensor.zero_()
        self.codec.decode_add(self.wire, self.tensor, self.span, context)


class _Gathered(NamedTuple):
    """Every worker receives every wire."""

    codec: Codec
    span: Span
    tensor: Tensor
    wires: Tensor  # one per row
    handle: Handle

    def unpack(self, context: StepContext) -> None:
        self.codec.combine(self.wires, self.tensor, self.span, context)


@dataclass
class _InRounds:
    """Several sums, one after the other."""

    span: Span
    tensor: Tensor
    rounds: Rounds
    residual: tuple[Tensor, Memory] | None  # the tensor that the rounds sum, and where its residual is stored
    wire: Tensor
    handle: Handle

    def next_round(self, comm: Communicator, all_reduce: Callable[[Tensor], Handle]) -> bool:
        """Wait for one sum and issue the next; returns whether there is one."""
        comm.wait(self.handle)
        wire = self.rounds.next(self.wire)
        if wire is None:
            return False
        self.wire, self.handle = wire, all_reduce(wire)
        return True

    def unpack(self, context: StepContext) -> None:
        if self.residual is not None:
            whole, memory = self.residual
            keep_own_residual(self.rounds, whole, self.span, memory)
        self.rounds.finish(self.tensor)
