"""Error feedback: the loss of one step's packing is added to the next step's tensor.

    q = g + e;  send C(q);  e = q - C(q)

so that the tensors sent plus the residual e always equal the sum of the gradients g (Seide et al., 2014; Karimireddy et
al., 2019, arXiv:1901.09847). The sender calls `with_residual` before packing, and `keep_residual` or
`keep_own_residual` afterwards. q is computed in the memory of the next residual, so that afterwards only C(q) has to be
subtracted from it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from podium.exchange.codecs.base import Codec, Memory, Rounds, Span, StepContext

RESIDUAL = "residual"
"""The residual's name in the memory."""
UNSENT = "unsent"
"""Its name where the codec stores it itself."""


def with_residual(codec: Codec, tensor: Tensor, span: Span, memory: Memory) -> Tensor:
    """The tensor plus the residual: what to pack.

    The result may be the tensor itself, or memory that `keep_residual` overwrites; the caller must not change it.
    """
    residual = None if codec.keeps_residual else memory.get(RESIDUAL, span)
    if residual is None:
        return tensor
    return torch.add(tensor, residual, out=memory.put(RESIDUAL, span))


def keep_residual(codec: Codec, q: Tensor, wire: Tensor, span: Span, context: StepContext, memory: Memory) -> None:
    """Store the next residual: `q`, the result of `with_residual`, minus this worker's decoded wire."""
    if not codec.keeps_residual:
        codec.remainder(wire, q, memory.put(RESIDUAL, span), span, context)


def keep_own_residual(rounds: Rounds, q: Tensor, span: Span, memory: Memory) -> None:
    """The same for a codec with several sums, after the last one."""
    residual = memory.put(RESIDUAL, span)
    if residual.data_ptr() != q.data_ptr():
        residual.copy_(q)
    rounds.subtract_own(residual)
