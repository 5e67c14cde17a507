"""How pushes and their answers are packed, on a server.

A push is packed by its worker, which also feeds back what was left out; here it is unpacked before anything else
happens to it. An answer is packed as what has changed since the last one: the server remembers what each worker holds,
sends the packed difference, and adds to its memory what the worker will add. So what an answer leaves out is part of
the next difference, which is error feedback by itself. It costs a copy of the parameters per worker. The first answer
of a stretch, or of a restored server, is whole.

Tang et al., 2019, arXiv:1905.05957, pack both ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from podium.comm.base import Message
from podium.config import parse_spec
from podium.engine.flat import Flat
from podium.errors import CommError, UnknownName
from podium.exchange.codecs import CODECS
from podium.exchange.codecs.base import Codec, Memory, Span, Turn
from podium.exchange.reducing import make_packing, span_of
from podium.servers.ranges import Range


class Wires:
    """One server's packing."""

    def __init__(self, flat: Flat, push: Codec, pull: Codec) -> None:
        self._flat, self._asked, self._push, self._pull = flat, push, push, pull
        self._held: dict[tuple[int, int], list[Tensor]] = {}  # (worker, unit) -> what the worker has
        self._memory: dict[tuple[int, int], Memory] = {}
        self._spans: dict[tuple[int, int, int], Span] = {}

    @property
    def packs_answers(self) -> bool:
        return not self._pull.exact

    def begin(self, chosen: str | None) -> None:
        """A stretch begins: nobody holds anything of ours yet. `chosen`: the codec that the workers chose, if they did.

        It comes over the network, so it can only be one of Podium's own.
        """
        self._push = self._asked
        if chosen is not None:
            name, _ = parse_spec(chosen, "codec")
            if name not in CODECS:
                raise UnknownName("codec", name, CODECS)
            self._push = make_packing(chosen).codec
        self._held.clear()
        self._memory.clear()
        self._spans.clear()

    def unpack(self, message: Message, ranges: Sequence[Range]) -> Message:
        """A push with its gradients as they are meant."""
        if self._push.exact or not ranges:
            return message
        try:
            turn = Turn(*message.meta["turn"])
            grads = []
            for wire, part in zip(message.body, ranges, strict=True):
                like, span = self._flat.params[part.buffer], self._span(part)
                fits = self._push.wire_like(span, turn, like.dtype)
                if (wire.numel(), wire.dtype) != fits:
                    raise ValueError(f"{fits[0]} elements of {fits[1]} must come, got {wire.numel()} of {wire.dtype}")
                grad = torch.zeros(part.stop - part.start, dtype=like.dtype)
                self._push.decode_add(wire, grad, span, turn)
                grads.append(grad)
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, RuntimeError) as error:
            raise CommError(
                f"a push of rank {message.source} is not packed as {self._push.name} has it: {error}"
            ) from error
        return message._replace(body=tuple(grads))

    def pack(
        self, worker: int, unit: int, ranges: Sequence[Range], params: Sequence[Tensor], version: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """What to answer with, and what the worker will then hold."""
        held = self._held.get((worker, unit))
        if held is None:
            self._held[worker, unit] = [p.clone() for p in params]
            return params, params
        memory = self._memory.setdefault((worker, unit), Memory([]))
        turn, wires = Turn(step=version, rank=worker), []
        for part, now, before in zip(ranges, params, held, strict=True):
            span = self._span(part)
            wire = self._pull.encode(now - before, span, turn, memory)
            self._pull.decode_add(wire, before, span, turn)
            wires.append(wire)
        memory.commit()
        return wires, held

    def _span(self, part: Range) -> Span:
        key = (part.buffer, part.start, part.stop)
        if key not in self._spans:
            self._spans[key] = span_of(self._flat, part)
        return self._spans[key]
