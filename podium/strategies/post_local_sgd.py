"""Post-local SGD: all-reduce until the learning rate first decays, then local SGD.

Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, https://arxiv.org/abs/1808.07217
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.strategies.phases import Phased


@final
@dataclass(frozen=True, kw_only=True)
class PostLocalSGD(Phased):
    """All-reduce while the learning rate is high, local SGD afterwards."""

    name: ClassVar[str] = "post-local-sgd"

    period: int = 16
    """Steps between two averages of local SGD."""
    to: float = 0.5
    """Switch when the learning rate has fallen to this part of its highest."""
    latest: float = 0.5
    """Share of the budget at which it switches in any case."""
    keep_moments: bool = True

    def written(self) -> str:
        return f"all-reduce until rate-decay:to={self.to};latest={self.latest} | local-sgd:period={self.period}"
