"""How a worker packs tensors: a codec, and whether its residual is fed back.

Error feedback: what a codec leaves out of one exchange, the residual, is added to the next. The residual is the
worker's state: a step changes it, and checkpoints save it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from podium.config import convert, parse_spec
from podium.errors import ConfigError
from podium.exchange.codecs import make_codec
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.feedback import keep_residual, with_residual


@dataclass(frozen=True)
class Packing:
    """A codec, and whether its residual is fed back."""

    codec: Codec
    feedback: bool

    @property
    def keeps_residual(self) -> bool:
        """Whether the residual is stored here, and not by the codec itself."""
        return self.feedback and not self.codec.keeps_residual

    def pack(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        """Encode this worker's tensor; the residual goes into `memory`."""
        if not self.keeps_residual:
            return self.codec.encode(tensor, span, context, memory)
        whole = with_residual(self.codec, tensor, span, memory)
        wire = self.codec.encode(whole, span, context, memory)
        keep_residual(self.codec, whole, wire, span, context, memory)
        return wire


def make_packing(spec: str) -> Packing:
    """From `name` or `name:key=value;key=value`; `feedback` is the packing's option, all others are the codec's."""
    name, options = parse_spec(spec, "codec")
    feedback = options.pop("feedback", None)
    codec = make_codec(name, options)
    if feedback is None:
        return Packing(codec, codec.wants_feedback)
    wanted = convert(feedback, bool, f"codec {name}: feedback")
    if wanted and not codec.feeds_back:
        raise ConfigError(f"codec {name}: feedback has no meaning with it, got feedback={feedback}")
    return Packing(codec, wanted)
