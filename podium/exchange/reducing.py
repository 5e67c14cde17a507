"""Sums over the workers, packed by a codec: what stands between a strategy and the network.

A strategy issues spans of a flat tensor while backward still runs (`issue`) and then has them summed (`complete`).
Which collective carries them, how they are packed and what is fed back later is decided here, once, so that every codec
works with every strategy and every collective.

Error feedback: what a codec leaves out of this exchange is added to the next. The residual is the worker's state: it
belongs to a step, is kept in checkpoints, and goes where the worker goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from podium.config import convert, parse_spec
from podium.errors import ConfigError
from podium.exchange.codecs import make_codec
from podium.exchange.codecs.base import Codec, Matrix, Memory, Rounds, RoundsCodec, Span, Turn
from podium.exchange.codecs.feedback import RESIDUAL, keep_own_residual, keep_residual, with_residual

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Handle
    from podium.engine.flat import Flat, Piece
    from podium.exchange.collectives.base import Collective
    from podium.servers.ranges import Range


@dataclass(frozen=True)
class Packing:
    """A codec, and whether what it leaves out is fed back."""

    codec: Codec
    feedback: bool

    @property
    def keeps_residual(self) -> bool:
        """Whether the caller has to keep what was left out."""
        return self.feedback and not self.codec.keeps_residual

    def pack(self, tensor: Tensor, span: Span, turn: Turn, memory: Memory) -> Tensor:
        """The wire for one who is alone with its codec; what it leaves out is remembered."""
        if not self.keeps_residual:
            return self.codec.encode(tensor, span, turn, memory)
        whole = with_residual(self.codec, tensor, span, memory)
        wire = self.codec.encode(whole, span, turn, memory)
        keep_residual(self.codec, whole, wire, span, turn, memory)
        return wire


def make_packing(spec: str) -> Packing:
    """From `name` or `name:key=value;key=value`; `feedback` is for whoever sends, all else is the codec's own."""
    name, options = parse_spec(spec, "codec")
    feedback = options.pop("feedback", None)
    codec = make_codec(name, options)
    if feedback is None:
        return Packing(codec, codec.wants_feedback)
    wanted = convert(feedback, bool, f"codec {name}: feedback")
    if wanted and not codec.feeds_back:
        raise ConfigError(f"codec {name}: feedback has no meaning with it, got feedback={feedback}")
    return Packing(codec, wanted)


class _Sent(NamedTuple):
    """A span on its way."""

    packing: Packing
    span: Span
    tensor: Tensor  # where the sum is wanted
    handle: Handle
    wire: Tensor  # as it was sent; where wires are summed, the sum once the handle is done
    gathered: Tensor | None = None
    rounds: Rounds | None = None
    whole: Tensor | None = None  # what goes through the rounds: the tensor and what was left before


class Reducer:
    """Sums flat tensors over the workers."""

    def __init__(self, comm: Communicator, collective: Collective, memory: Memory) -> None:
        self.comm, self.collective, self.memory = comm, collective, memory
        self.spent_ns = 0
        """Time since the last `complete` that went into packing, waiting and unpacking."""
        self._handles: list[Handle] = []
        self._sent: list[_Sent] = []
        self._halfway = False

    @property
    def knows_what_is_left(self) -> bool:
        """Whether all that was issued is known to the memory: of codecs with several sums, only after the last."""
        return not self._halfway and all(one.rounds is None for one in self._sent)

    def issue_exactly(self, tensor: Tensor) -> None:
        """Sum a tensor as it is, whatever the codec."""
        self._handles.append(self.collective.all_reduce(self.comm, tensor))

    def issue(self, tensor: Tensor, packing: Packing, span: Span, turn: Turn) -> None:
        """Begin to sum this span; never waits. The tensor is the exchange's until `complete`."""
        began = self.comm.clock.now_ns()
        self._issue(tensor, packing, span, turn)
        self.spent_ns += self.comm.clock.now_ns() - began

    def _issue(self, tensor: Tensor, packing: Packing, span: Span, turn: Turn) -> None:
        codec, comm = packing.codec, self.comm
        if codec.exact or (comm.size == 1 and not codec.takes_momentum):
            take_leftover(self.memory, tensor, span)
            return self.issue_exactly(tensor)
        comm.clock.touch(round(codec.passes * tensor.nbytes))
        if isinstance(codec, RoundsCodec):
            whole = with_residual(codec, tensor, span, self.memory) if packing.keeps_residual else tensor
            rounds = codec.rounds(whole, span, turn, self.memory)
            wire = rounds.first()
            handle = self.collective.all_reduce(comm, wire)
            sent = _Sent(packing, span, tensor, handle, wire, rounds=rounds, whole=whole)
        else:
            wire = packing.pack(tensor, span, turn, self.memory)
            if codec.reduction == "sum":
                sent = _Sent(packing, span, tensor, self.collective.all_reduce(comm, wire), wire)
            else:
                into = torch.empty((comm.size, wire.numel()), dtype=wire.dtype, device=wire.device)
                sent = _Sent(packing, span, tensor, self.collective.all_gather(comm, wire, into.view(-1)), wire, into)
        self._sent.append(sent)

    def complete(self, turn: Turn) -> None:
        """Wait for all that was issued; every tensor then holds the sum over the workers."""
        began = self.comm.clock.now_ns()
        self._complete(turn)
        self.spent_ns += self.comm.clock.now_ns() - began

    def _complete(self, turn: Turn) -> None:
        (sent, self._sent), (handles, self._handles) = (self._sent, []), (self._handles, [])
        under_way = [one for one in sent if one.rounds is not None]
        self._halfway = bool(under_way)
        while under_way:
            under_way = [again for one in under_way if (again := self._next_round(one)) is not None]
        self.comm.wait(*handles, *(one.handle for one in sent if one.rounds is None))
        for one in sent:
            codec = one.packing.codec
            if one.rounds is not None:
                self._end_rounds(one, one.rounds)
            elif one.gathered is not None:
                codec.combine(one.gathered, one.tensor, one.span, turn)
            else:
                one.tensor.zero_()
                codec.decode_add(one.wire, one.tensor, one.span, turn)
        self._halfway = False

    def _next_round(self, one: _Sent) -> _Sent | None:
        """Wait for one sum and issue the next, if there is one."""
        assert one.rounds is not None
        self.comm.wait(one.handle)
        wire = one.rounds.next(one.wire)
        if wire is None:
            return None
        return one._replace(wire=wire, handle=self.collective.all_reduce(self.comm, wire))

    def _end_rounds(self, one: _Sent, rounds: Rounds) -> None:
        assert one.whole is not None
        if one.packing.keeps_residual:
            keep_own_residual(rounds, one.whole, one.span, self.memory)
        rounds.finish(one.tensor)

    def drop(self) -> None:
        """Forget what was issued: the exchange has failed."""
        if not self.knows_what_is_left:
            self.memory.forget()
        self._handles.clear()
        self._sent.clear()
        self._halfway = False


def take_leftover(memory: Memory, tensor: Tensor, span: Span) -> bool:
    """Where nothing is packed any more, what was left out before goes out with this tensor, once; whether there was."""
    left = memory.get(RESIDUAL, span)
    if left is None:
        return False
    tensor += left
    memory.put(RESIDUAL, span).zero_()
    return True


def matrices_of(pieces: Sequence[tuple[Piece, int, int, int]]) -> tuple[Matrix, ...]:
    """The matrices among parts of parameters, each (piece, start and stop in it, where it lies in the span)."""
    found = []
    for piece, start, stop, offset in pieces:
        rows = piece.shape[0] if len(piece.shape) >= 2 else 0
        cols = (piece.stop - piece.start) // rows if rows else 0
        if cols < 2 or piece.stride[0] != cols:  # a vector, or its rows do not lie one after the other
            continue
        first, last = -(-start // cols), stop // cols
        if last - first >= 2:
            at = offset + first * cols - start
            found.append(Matrix(f"{piece.name}@{first}", at, last - first, cols))
    return tuple(found)


def span_of(flat: Flat, part: Range) -> Span:
    """The span that is a server's range."""
    pieces = [(flat.pieces[p.piece], p.start, p.stop, p.offset) for p in part.parts]
    return Span(part.buffer, part.start, part.stop, matrices_of(pieces))


def spans_of(flat: Flat) -> list[Span]:
    """One span per bucket."""
    spans = []
    for bucket in flat.buckets:
        parts = [(flat.pieces[i], 0, flat.pieces[i].stop - flat.pieces[i].start) for i in bucket.pieces]
        matrices = matrices_of([(p, a, b, p.start - bucket.start) for p, a, b in parts])
        spans.append(Span(bucket.buffer, bucket.start, bucket.stop, matrices))
    return spans
