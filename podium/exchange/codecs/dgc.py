"""Deep gradient compression: top-k of a residual that already includes momentum.

    u = m u + g        momentum correction: each worker applies its own momentum, before choosing
    v = v + u          not sent yet
    send the largest of v; there, u = 0 (momentum factor masking) and v loses what was sent

The optimizer must not apply momentum again. The float16 rounding error of the wire stays in v. The ratio warms up: a
quarter of the elements in the first epoch, a quarter of that in the next, and so on.

Lin et al., 2018, arXiv:1712.01887.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.blocks import blocks, scratch
from podium.exchange.codecs.feedback import UNSENT
from podium.exchange.codecs.sparse import Select, choose, pack, room_for, unpack_add, wire_bytes


@final
@dataclass(frozen=True, kw_only=True)
class DGC(Codec):
    """The largest elements of accumulated momentum."""

    name: ClassVar[str] = "dgc"
    reduction: ClassVar[Literal["sum", "gather"]] = "gather"
    takes_momentum: ClassVar[bool] = True
    keeps_residual: ClassVar[bool] = True
    remembers: ClassVar[tuple[str, ...]] = (UNSENT, "velocity")

    ratio: float = 0.001
    """Share of the elements that is kept after the warm-up; at least one element is."""
    warmup_epochs: int = 4
    """Epochs that keep more: 1/4, 1/16, 1/64, 1/256 … of the elements, but never less than `ratio`."""
    momentum: float | None = None
    """The optimizer's own when not given."""
    nesterov: bool | None = None
    """Nesterov momentum; the optimizer's own setting when not given."""
    clip: float | None = None
    """Largest norm of the sum over all workers: each worker clips its gradient of a span to this divided by the square
    root of their number. None: no limit."""
    select: Select = "sampled"
    """Find the largest by a threshold estimated from a sample (fast), or exactly."""

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"dgc: ratio must be above 0 and at most 1, got {self.ratio}")
        if self.warmup_epochs < 0:
            raise ConfigError(f"dgc: warmup_epochs must be 0 or more, got {self.warmup_epochs}")
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise ConfigError(f"dgc: momentum must be at least 0 and below 1, got {self.momentum}")
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(f"dgc: clip must be above 0, got {self.clip}")

    def check(self, optimizer: Mapping[str, object]) -> None:
        if not {"momentum", "nesterov"} <= optimizer.keys():
            raise ConfigError(
                "dgc applies the optimizer's momentum itself, so it needs an optimizer whose momentum it can take "
                f"over, such as torch.optim.SGD; got one with {', '.join(sorted(optimizer)) or 'no settings'}"
            )
        if optimizer.get("dampening"):
            raise ConfigError(f"dgc applies momentum without dampening, got dampening={optimizer['dampening']}")

    def ratio_at(self, epoch: float) -> float:
        """Share of the elements that is kept in this epoch."""
        if epoch >= self.warmup_epochs:
            return self.ratio
        return max(self.ratio, 0.25 ** (math.floor(epoch) + 1))

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        velocity, unsent = memory.put("velocity", span), memory.put(UNSENT, span)
        self._accumulate(tensor, span, context, memory, velocity, unsent)
        k = room_for(span.numel, self.ratio_at(context.epoch))
        chosen = choose(unsent, k, self.select)
        wire = pack(unsent, chosen, k)
        velocity.index_fill_(0, chosen, 0.0)
        unpack_add(wire, unsent, k, -1.0)
        return wire

    def wire_like(self, span: Span, context: StepContext, dtype: torch.dtype) -> tuple[int, torch.dtype]:
        return wire_bytes(span.numel, room_for(span.numel, self.ratio_at(context.epoch))), torch.uint8

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        unpack_add(wire, out, room_for(span.numel, self.ratio_at(context.epoch)), alpha)

    def _accumulate(
        self, tensor: Tensor, span: Span, context: StepContext, memory: Memory, velocity: Tensor, unsent: Tensor
    ) -> None:
        """Write the new velocity u, and v before the largest elements leave it."""
        old_velocity, old_unsent = memory.get("velocity", span), memory.get(UNSENT, span)
        factor = self._clipping(tensor, context)
        for start, stop in blocks(tensor.numel(), tensor.device):
            here = slice(start, stop)
            grad, u, v = tensor[here], velocity[here], unsent[here]
            if factor is not None:
                grad = torch.mul(grad, factor, out=scratch(stop - start, grad.dtype, grad.device))
            if old_velocity is None:
                u.copy_(grad)
            else:
                torch.add(grad, old_velocity[here], alpha=self.momentum or 0.0, out=u)
            step = u
            if self.nesterov:
                step = torch.add(
                    grad, u, alpha=self.momentum or 0.0, out=scratch(stop - start, u.dtype, u.device, slot=1)
                )
            if old_unsent is None:
                v.copy_(step)
            else:
                torch.add(old_unsent[here], step, out=v)

    def _clipping(self, tensor: Tensor, context: StepContext) -> Tensor | None:
        """The factor that clips the gradient, at most 1."""
        if self.clip is None:
            return None
        norm: Tensor = torch.linalg.vector_norm(tensor)
        return norm.reciprocal().mul(self.clip / math.sqrt(context.workers)).clamp(max=1.0)
