"""Random-k: the same random elements on all workers, so that what they keep can be added up.

The span is cut into as many equal strata as elements are kept, and each keeps one at random: nothing is drawn twice,
and drawing costs no more than what is kept. Places follow from the seed, the step and the span, so they do not travel.

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
    """A random part of a span, agreed on without a word."""

    name: ClassVar[str] = "random-k"
    reduction: ClassVar[Literal["sum", "gather"]] = "sum"

    ratio: float = 0.01
    """Elements kept over elements; at least one is."""
    unbias: bool = False
    """Make each kept element stand for its whole stratum, so that the mean over all draws is right.

    Error feedback is then off: it would feed back the blown-up elements too, and grow without end.
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
        """The place kept in each stratum, and how many elements each stratum has."""
        k = room_for(span.numel, self.ratio)
        edges = np.arange(k + 1, dtype=np.int64) * span.numel // max(k, 1)
        sizes = np.diff(edges)
        return edges[:-1] + below(sizes, context.seed, context.step, span.buffer, span.start), sizes
