"""Random-k: all workers keep the same random elements, so that their wires can be summed.

The span is cut into as many equal strata as elements are kept, and each stratum keeps one at random: no element is
drawn twice, and the cost of drawing grows with the kept elements only. Indices follow from the seed, the step and the
span, so they are not sent.

Stich et al., Sparsified SGD with memory, 2018, arXiv:1809.07599; with the factor: Wangni et al., 2018,
arXiv:1710.09854.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.blocks import below
from podium.exchange.codecs.sparse import room_for


@final
@dataclass(frozen=True, kw_only=True)
class RandomK(Codec):
    """Random elements of a span, which all workers draw alike."""

    name: ClassVar[str] = "random-k"
    reduction: ClassVar[Literal["sum", "gather"]] = "sum"

    ratio: float = 0.01
    """Share of the elements that is kept; at least one element is."""
    unbias: bool = False
    """Multiply each kept element by the size of its stratum, so that the mean over all draws is right.

    Error feedback is then off: it would feed back the enlarged elements too, and grow without bound.
    """

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ConfigError(f"random-k: ratio must be above 0 and at most 1, got {self.ratio}")

    @property
    def wants_feedback(self) -> bool:
        return not self.unbias

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        places, sizes = self._draw(span, context)
        wire = tensor.index_select(0, torch.from_numpy(places).to(tensor.device))
        if self.unbias:
            wire *= torch.from_numpy(sizes).to(tensor.device, tensor.dtype)
        return wire

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        places, _ = self._draw(span, context)
        out.index_add_(0, torch.from_numpy(places).to(out.device), wire, alpha=alpha)

    def _draw(self, span: Span, context: StepContext) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The index kept in each stratum, and the size of each stratum."""
        k = room_for(span.numel, self.ratio)
        edges = np.arange(k + 1, dtype=np.int64) * span.numel // max(k, 1)
        sizes = np.diff(edges)
        return edges[:-1] + below(sizes, context.seed, context.step, span.buffer, span.start), sizes
