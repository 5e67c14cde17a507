"""Top-k: the largest elements are sent, the others stay in the residual.

Aji and Heafield, 2017, arXiv:1704.05021; Stich et al., Sparsified SGD with memory, 2018, arXiv:1809.07599. Workers keep
different elements, so wires are gathered, and their volume grows with the number of workers. See `sparse` for the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.sparse import Select, choose, pack, room_for, unpack_add


@final
@dataclass(frozen=True, kw_only=True)
class TopK(Codec):
    """The largest elements of a span."""

    name: ClassVar[str] = "top-k"
    reduction: ClassVar[Literal["sum", "gather"]] = "gather"

    ratio: float = 0.01
    """Share of the elements that is kept; at least one element is."""
    select: Select = "sampled"
    """Find the largest by a threshold estimated from a sample (fast), or exactly."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"top-k: ratio must be above 0 and at most 1, got {self.ratio}")

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        k = room_for(span.numel, self.ratio)
        return pack(tensor, choose(tensor, k, self.select), k)

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        unpack_add(wire, out, room_for(span.numel, self.ratio), alpha)
