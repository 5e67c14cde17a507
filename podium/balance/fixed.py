"""Fixed shares, given by the user."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Balancer, Member
from podium.data.order import divide


@final
@dataclass(frozen=True, kw_only=True)
class Fixed(Balancer):
    """Parts in proportion to numbers, one per worker that the run began with."""

    name: ClassVar[str] = "fixed"

    shares: tuple[float, ...]

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        return divide(count, [self.shares[member.rank] for member in members])
