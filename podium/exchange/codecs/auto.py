"""Auto: pack with the codec that is predicted to be fastest, or not at all.

A placeholder that packs nothing itself: `podium.exchange.codec_choice` chooses the codecs once the workers have met.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext

CANDIDATES = ("fp16", "int8", "ef-sign", "top-k:ratio=0.01", "power-sgd:rank=1", "power-sgd:rank=4")
"""Codecs whose papers report about the accuracy of dense; what they cost is in the rates study (docs/studies)."""


@final
@dataclass(frozen=True, kw_only=True)
class AutoCodec(Codec):
    """The fastest of some codecs for each bucket, or none where none is predicted to help."""

    name: ClassVar[str] = "auto"
    reduction: ClassVar[Literal["sum", "gather"]] = "sum"

    candidates: tuple[str, ...] = CANDIDATES
    """Codecs to try, each `NAME[:K=V]`, joined by `+`."""
    least_gain: float = 1.1
    """Predicted speed-up that an exchange needs; less is not worth the loss of precision."""
    check_after: int = 10
    """Steps after which the prediction is compared with the measured time; 0: never."""

    def __post_init__(self) -> None:
        if len(self.candidates) == 1 and "+" in self.candidates[0]:
            object.__setattr__(self, "candidates", tuple(self.candidates[0].split("+")))
        if not self.candidates or any(name.partition(":")[0] in ("dense", "auto") for name in self.candidates):
            raise ConfigError(
                "codec auto: candidates must name at least one codec, and neither auto nor dense, which is always "
                f"a candidate; got {'+'.join(self.candidates) or 'none'}"
            )
        if self.least_gain < 1:
            raise ConfigError(f"codec auto: least_gain must be at least 1, got {self.least_gain}")
        if self.check_after < 0:
            raise ConfigError(f"codec auto: check_after must be 0 or more, got {self.check_after}")

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        raise AssertionError("a codec is chosen before anything is packed")

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        raise AssertionError("a codec is chosen before anything is packed")
