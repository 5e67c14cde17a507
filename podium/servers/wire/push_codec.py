"""How pushes and their answers are packed, on a server.

A worker packs its push and keeps the residual; the server unpacks a push first. An answer is the packed change since
the last one: the server stores what each worker holds, sends the packed difference, and adds to its stored copy what
the worker will add. So an answer's residual is part of the next difference, which is error feedback by itself. It costs
a copy of the parameters per worker. The first answer of a segment, or of a restored server, is not packed.

Tang et al., 2019, arXiv:1905.05957, pack both ways.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.config import parse_spec
from podium.errors import CommError, UnknownName
from podium.exchange.codecs import CODECS
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.packing import make_packing
from podium.exchange.spans import span_of

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.engine.flat import Flat
    from podium.servers.ranges import Range


class PushCodec:
    """Unpacks pushes and packs answers, for one server."""

    def __init__(self, flat: Flat, push: Codec, pull: Codec) -> None:
        self._flat, self._asked, self._push, self._pull = flat, push, push, pull
        self._held: dict[tuple[int, int], list[Tensor]] = {}  # (worker, unit) -> what the worker has
        self._memory: dict[tuple[int, int], Memory] = {}
        self._spans: dict[tuple[int, int, int], Span] = {}

    @property
    def packs_answers(self) -> bool:
        return not self._pull.exact

    def begin(self, chosen: str | None) -> None:
        """A segment begins: no worker holds parameters yet. `chosen`: the codec that the workers chose, if any.

        The name comes over the network, so it must be one of Podium's own codecs.
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

    def unpack(self, message: Message, packed_in: Sequence[Any] | None, ranges: Sequence[Range]) -> Message:
        """A push with its gradients unpacked; `packed_in`: the step context of the worker's codec."""
        if self._push.exact or not ranges:
            return message
        try:
            if packed_in is None:
                raise ValueError("its context must come with it, got none")
            context = StepContext(*packed_in)
            grads = []
            for wire, part in zip(message.body, ranges, strict=True):
                like, span = self._flat.params[part.buffer], self._span(part)
                fits = self._push.wire_like(span, context, like.dtype)
                if (wire.numel(), wire.dtype) != fits:
                    raise ValueError(f"{fits[0]} elements of {fits[1]} must come, got {wire.numel()} of {wire.dtype}")
                grad = torch.zeros(part.stop - part.start, dtype=like.dtype)
                self._push.decode_add(wire, grad, span, context)
                grads.append(grad)
        except (KeyError, TypeError, ValueError, IndexError, ArithmeticError, RuntimeError) as error:
            raise CommError(
                f"a push of rank {message.source} is not packed as {self._push.name} has it: {error}"
            ) from error
        return message._replace(body=tuple(grads))

    def pack(
        self, worker: int, unit: int, ranges: Sequence[Range], params: Sequence[Tensor], version: int
    ) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """The body of an answer, and the parameters that the worker will then hold."""
        held = self._held.get((worker, unit))
        if held is None:
            self._held[worker, unit] = [p.clone() for p in params]
            return params, params
        memory = self._memory.setdefault((worker, unit), Memory([]))
        context, wires = StepContext(step=version, rank=worker), []
        for part, now, before in zip(ranges, params, held, strict=True):
            span = self._span(part)
            wire = self._pull.encode(now - before, span, context, memory)
            self._pull.decode_add(wire, before, span, context)
            wires.append(wire)
        memory.commit()
        return wires, held

    def _span(self, part: Range) -> Span:
        key = (part.buffer, part.start, part.stop)
        if key not in self._spans:
            self._spans[key] = span_of(self._flat, part)
        return self._spans[key]
