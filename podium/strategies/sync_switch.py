"""Sync-Switch: synchronous for a fixed share of the budget, then asynchronous.

Li, Mangoubi, Xu, Guo, Sync-Switch: Hybrid Parameter Synchronization for Distributed Deep Learning, ICDCS 2021,
https://arxiv.org/abs/2104.08364
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from podium.strategies.base import Strategy
from podium.strategies.phases import Phased


@final
@dataclass(frozen=True, kw_only=True)
class SyncSwitch(Phased):
    """Parameter servers throughout: synchronous first, asynchronous later."""

    name: ClassVar[str] = "sync-switch"

    share: float = 0.125
    """Share of the budget that is synchronous."""
    servers: int | None = None
    """Number of servers; one beside each worker when not given."""
    placement: Literal["colocated", "dedicated"] = "colocated"
    keep_moments: bool = True

    def for_workers(self, workers: int) -> Strategy[None]:
        return dataclasses.replace(self, servers=self.servers or workers)

    def written(self) -> str:
        server = f"parameter-server:servers={self.servers or 1};placement={self.placement}"
        return f"{server} until share:at={self.share} | {server};mode=async"
