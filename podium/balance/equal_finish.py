"""Everyone finishes together: the division that ends a step soonest, given what passes and exchanges take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Learning, Member
from podium.data.order import divide


@final
@dataclass(frozen=True, kw_only=True)
class EqualFinish(Learning):
    """The same finish for everybody who has a part."""

    name: ClassVar[str] = "equal-finish"

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        return divide(count, [1 / member.speed.per_sample_s for member in members])
