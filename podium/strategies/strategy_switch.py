"""Strategy-Switch: all-reduce until the loss has settled, then an asynchronous parameter server.

Provatas, Chalas, Konstantinou, Koziris, Strategy-Switch, IEEE Access 13, 2025,
https://doi.org/10.1109/ACCESS.2025.3528248
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from podium.strategies.base import Strategy
from podium.strategies.phases import Phased


@final
@dataclass(frozen=True, kw_only=True)
class StrategySwitch(Phased):
    """All-reduce first; once the loss has settled, an asynchronous parameter server."""

    name: ClassVar[str] = "strategy-switch"

    window: int = 0
    """The rule looks at this many epochs' losses (0: 6, fewer in runs of less than 18 epochs, at least 3) …"""
    threshold: float = 0.05
    """… and fires once their mean change is at most this, …"""
    against: Literal["first", "last"] = "first"
    """… relative to the first loss or, as published, to the one before."""
    on: Literal["training", "validation"] = "training"
    """Which loss."""
    smoothing: float = 0.0
    """Weight of the previous smoothed loss in the new one."""
    floor: float = 0.05
    """A loss below this counts as this much."""
    fallen: float = 0.8
    """The rule does not fire before the loss is this part of the first."""
    latest: float = 0.35
    """Share of the budget at which the phase ends if the rule has not fired."""
    then: str = "mode=async"
    """Options of the parameter server that follows, `K=V;…`."""
    pull: str = "dense"
    """The codec that packs the servers' answers."""
    servers: int | None = None
    """Number of servers; one beside each worker when not given."""
    placement: Literal["colocated", "dedicated"] = "colocated"
    keep_moments: bool = True
    bucket_bytes: int = Strategy.bucket_bytes
    """Gradients travel in buckets of about this size."""

    def for_workers(self, workers: int) -> Strategy[None]:
        return dataclasses.replace(self, servers=self.servers or workers)

    def written(self) -> str:
        rule = ";".join(f"{k}={getattr(self, k)}" for k in _RULE)
        first = "all-reduce"
        if self.bucket_bytes != Strategy.bucket_bytes:
            first += f":bucket_bytes={self.bucket_bytes}"
        server = f"servers={self.servers or 1};placement={self.placement};pull={self.pull};{self.then}"
        return f"{first} until plateau:{rule} | parameter-server:{server}"


_RULE = ("window", "threshold", "against", "on", "smoothing", "floor", "fallen", "latest")
