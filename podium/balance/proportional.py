"""Parts in proportion to speed, as samples per second were last seen.

A worker that has more to do for each pass than for its samples gets faster as its part grows, so this comes to rest
where all finish together after a few changes rather than one.

Chen et al., 2020, Semi-Dynamic Load Balancing (LB-BSP), arXiv 1806.02508.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Learning, Member
from podium.data.order import divide


@final
@dataclass(frozen=True, kw_only=True)
class Proportional(Learning):
    """Samples in proportion to samples per second."""

    name: ClassVar[str] = "proportional"

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        part = count / len(members)
        return divide(count, [part / member.speed.seconds(part) for member in members])
