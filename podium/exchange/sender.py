"""The one object between a bucket and the network: it packs a bucket by a codec and sums it by a collective.

A strategy issues buckets, or spans of any flat tensor, while backward still runs (`issue`, `sum_span`), and then has
them summed (`complete`). Which collective carries them, how they are packed and what is fed back later is decided here,
once, so that every codec works with every strategy and every collective.

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
    """What one worker sends: by which collective, how it is packed, and what was left out of it."""

    def __init__(self, comm: Communicator, flat: Flat, packing: Packing, collective: Collective) -> None:
        self.comm, self.flat, self._asked = comm, flat, collective
        self.collective = collective
        """What sums: as asked for, until `prepare` has seen the members."""
        self.memory = Memory(flat.grads, sum(p.stop - p.start for p in flat.pieces if not p.row))
        """What the codec remembers from one step to the next."""
        self.residuals = Residuals(comm, flat, self.memory, packing.codec)
        self.spans = spans_of(flat)
        """What each bucket is made of, for a codec."""
        self.news: list[dict[str, Any]] = []
        """What was decided about packing since the last `record_news`."""
        self._handles: list[Handle] = []
        self._packed: list[_Summed | _Gathered | _InRounds] = []
        self._halfway = False  # in a codec with several sums, not all of which have come
        self._spent_ns = 0  # since the last `complete`, on packing, waiting and unpacking
        self._set(packing)

    def _set(self, packing: Packing) -> None:
        self.packing = packing
        self.packings = [packing] * len(self.spans)
        """How each bucket is packed."""
        self.push: tuple[str | None, Packing] = (None, packing)
        """How what goes to servers is packed; with its name, where it is not what the run began with."""
        self._check: Check | None = None
        self._prepared_for = -1

    def use(self, packing: Packing, name: str | None) -> None:
        """Pack by another codec from here on; `name` tells servers of it."""
        self.residuals.use(packing.codec)
        self._set(packing)
        self.push = (name, packing)

    @property
    def is_exact(self) -> bool:
        """Whether nothing is left out."""
        return all(packing.codec.exact for packing in self.packings)

    @property
    def _is_alone(self) -> bool:
        """Whether there is nobody to pack anything for."""
        return self.comm.size == 1 and not self.packing.codec.takes_momentum and not self.comm.servers

    # A step.

    def issue(self, bucket: int, context: StepContext) -> None:
        """Begin to sum a bucket's gradients over the workers; never waits."""
        packing, span = self.packings[bucket], self.spans[bucket]
        if packing.codec.exact or self._is_alone:
            self.residuals.add_to(span.of(self.flat.grads), span)
            self._handles.append(self.collective.all_reduce(self.comm, self.flat.bucket(bucket)))
            return
        self.sum_span(span.of(self.flat.grads), packing, span, context)
        if bucket == len(self.spans) - 1:
            self._handles.append(self.collective.all_reduce(self.comm, self.flat.tail))

    def sum_span(self, tensor: Tensor, packing: Packing, span: Span, context: StepContext) -> None:
        """Begin to sum this span; never waits. The tensor is the exchange's until `complete`."""
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
        """Sum a tensor as it is, whatever the codec."""
        return self.collective.all_reduce(self.comm, tensor)

    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        """Every worker's flat tensor, one after the other."""
        return self.collective.all_gather(self.comm, tensor, into)

    def complete(self, context: StepContext) -> None:
        """Wait for all that was issued; every tensor then holds the sum over the workers."""
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
        """A step became true, and with it what it left out."""
        self.residuals.step_done(nothing_is_packed=self._is_alone or self.is_exact)

    def drop(self) -> None:
        """Forget what was issued: the exchange has failed."""
        if self._halfway or any(isinstance(one, _InRounds) for one in self._packed):
            self.memory.forget()  # of codecs with several sums, what is left out is known only after the last
        self._handles.clear()
        self._packed.clear()
        self._halfway = False

    # Choices.

    def prepare(self) -> None:
        """Make the collective ready for the present members, and choose codecs where that is left to us.

        Collective, and does nothing a second time.
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
        """Put on record what was decided about packing."""
        news, self.news = self.news, []
        for facts in news:
            kind = facts.pop("kind")
            recorder.write(kind, self.comm.clock.now_ns(), step=step, **facts)

    def _learn(self, found: dict[str, Any]) -> None:
        """Packing is given up where it takes longer than going without was predicted to."""
        self.news.append({"kind": "codec_check", **found})
        if not found["keeps"]:
            self.packings = [Packing(Dense(), feedback=False)] * len(self.packings)
        self._check = None


# A span under way, by how its codec combines what the workers send.


class _Summed(NamedTuple):
    """Wires are added up on their way."""

    codec: Codec
    span: Span
    tensor: Tensor  # where the sum is wanted
    wire: Tensor  # as it was sent; the sum once the handle is done
    handle: Handle

    def unpack(self, context: StepContext) -> None:
        self.tensor.zero_()
        self.codec.decode_add(self.wire, self.tensor, self.span, context)


class _Gathered(NamedTuple):
    """Every worker gets every wire."""

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
    residual: tuple[Tensor, Memory] | None  # what goes through the rounds, and where what is left of it is kept
    wire: Tensor
    handle: Handle

    def next_round(self, comm: Communicator, all_reduce: Callable[[Tensor], Handle]) -> bool:
        """Wait for one sum and issue the next; whether there is one."""
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
