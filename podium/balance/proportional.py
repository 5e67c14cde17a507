"""Parts in proportion to the last measured samples per second.

A worker with a fixed cost per pass has more samples per second as its part grows. So this balancer reaches the division
at which all finish together after several changes rather than one: each change leaves a part of the remaining error
that is equal to the fixed part of a pass. It ignores exchanges.

Chen et al., 2020, Semi-Dynamic Load Balancing (LB-BSP), arXiv 1806.02508.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Learning, Member
from podium.balance.equal_finish import limits_of
from podium.data.order import divide


@final
@dataclass(frozen=True, kw_only=True)
class Proportional(Learning):
    """Samples in proportion to samples per second."""

    name: ClassVar[str] = "proportional"

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """In proportion, up to each worker's limit; the rest goes to the other workers in the same way.

        Where the limits sum to less than `count`, every worker exceeds its limit by the same factor.
        """
        limits = limits_of(count, members)
        if sum(limits) < count:
            return divide(count, limits if sum(limits) else [1.0] * len(members))
        rates = [_rate(member, count / len(members)) for member in members]
        open_, counts = list(range(len(members))), list(limits)
        while open_:
            left = count - sum(limits[i] for i in range(len(members)) if i not in set(open_))
            parts = divide(left, [rates[i] for i in open_])
            full = {i for i, part in zip(open_, parts, strict=True) if part > limits[i]}
            if not full:
                for i, part in zip(open_, parts, strict=True):
                    counts[i] = part
                break
            open_ = [i for i in open_ if i not in full]
        return counts


def _rate(member: Member, part: float) -> float:
    """Samples per second at the last size of a pass, or at an equal part where no pass was seen."""
    samples = member.speed.samples or max(1.0, part)
    return samples / max(1e-12, member.speed.seconds(samples))
