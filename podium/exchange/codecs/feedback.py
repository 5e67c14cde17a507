"""Error feedback: what a codec loses in one step is added to what it gets in the next.

    q = g + e;  send C(q);  e = q - C(q)

so that what was sent and what is kept always add up to what came in (Seide et al., 2014; Karimireddy et al., 2019,
arXiv:1901.09847). Whoever exchanges calls `with_residual` before packing, and `keep_residual` or `keep_own_residual`
afterwards. The sum q is made where the next residual will lie, so that afterwards only what was sent has to be taken
out of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from podium.exchange.codecs.base import Codec, Memory, Rounds, Span, StepContext

RESIDUAL = "residual"
"""Its name in the memory."""
UNSENT = "unsent"
"""The name of what a codec keeps that remembers by itself what it has not sent."""


def with_residual(codec: Codec, tensor: Tensor, span: Span, memory: Memory) -> Tensor:
    """What to pack: the tensor plus what was left before this step.

    It may be the tensor itself, or memory that `keep_residual` overwrites; not to be changed by the caller.
    """
    residual = None if codec.keeps_residual else memory.get(RESIDUAL, span)
    if residual is None:
        return tensor
    return torch.add(tensor, residual, out=memory.put(RESIDUAL, span))


def keep_residual(codec: Codec, q: Tensor, wire: Tensor, span: Span, context: StepContext, memory: Memory) -> None:
    """Remember what this worker's own wire does not say of `q`, which comes from `with_residual`."""
    if not codec.keeps_residual:
        codec.remainder(wire, q, memory.put(RESIDUAL, span), span, context)


def keep_own_residual(rounds: Rounds, q: Tensor, span: Span, memory: Memory) -> None:
    """The same after several sums, once the last one has come."""
    residual = memory.put(RESIDUAL, span)
    if residual.data_ptr() != q.data_ptr():
        residual.copy_(q)
    rounds.subtract_own(residual)
