"""Dense: the numbers as they are; the baseline for every other codec."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from podium.exchange.codecs.base import Codec, Memory, Span, StepContext


@final
@dataclass(frozen=True, kw_only=True)
class Dense(Codec):
    """Nothing is packed, nothing is lost."""

    name: ClassVar[str] = "dense"
    reduction: ClassVar[Literal["sum", "gather"]] = "sum"
    exact: ClassVar[bool] = True
    biased: ClassVar[bool] = False

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        return tensor.clone()

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        out.add_(wire, alpha=alpha)
