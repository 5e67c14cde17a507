"""Equal parts: the usual division, and the right one where machines are alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Balancer, Member
from podium.data.order import divide


@final
@dataclass(frozen=True, kw_only=True)
class Equal(Balancer):
    """The same number of samples for every worker."""

    name: ClassVar[str] = "equal"

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        return divide(count, [1.0] * len(members))
