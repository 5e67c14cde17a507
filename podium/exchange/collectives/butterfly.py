"""Butterfly: each member sums a share of the elements; the faster its link, the larger its share.

Member i owns the share f_i of n bytes. It sends (1 - f_i) n of its own bytes to the other members and (p-1) f_i n of
sums back, and receives as much. So its link of b_i bytes per second is busy for (1 + (p-2) f_i) n / b_i, and the whole
takes 2 alpha + max_i (1 + (p-2) f_i) n / b_i. The optimal shares keep all links that have a share busy equally long,
T n seconds: f_i = max(0, (T b_i - 1) / (p-2)). A link too slow to send its own bytes in that time has no share. Equal
links, segments of s bytes: 2 alpha + 2(p-1)/p n beta + (p-2) s beta + (p-1)/p n gamma. This is a ring's volume in two
rounds, but all members begin with the first owner's first segment, and the later owners wait for theirs.

The shares ignore the cost of adding and assume links as fast up as down. Diskin et al., 2021, arXiv:2106.10207 find
such shares by a linear programme; here they have a closed form.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, final

from podium.comm.moves import in_turn, require_positive, segments, star
from podium.comm.schedule import Chain, element_cuts
from podium.errors import ConfigError
from podium.exchange.collectives.base import Collective, Scheduled
from podium.exchange.collectives.links import measure

if TYPE_CHECKING:
    from podium.comm.base import Communicator


@final
@dataclass(frozen=True, kw_only=True)
class Butterfly(Scheduled):
    """Each member sums a share of the elements, sized by its bandwidth."""

    name: ClassVar[str] = "butterfly"

    bandwidth: tuple[float, ...] | None = None
    """Each member's bandwidth, in any unit; measured when not given."""
    segment_bytes: int = 256 << 10
    """The largest message."""

    def __post_init__(self) -> None:
        require_positive("butterfly", segment_bytes=self.segment_bytes)
        if self.bandwidth is not None and not all(0 < b < math.inf for b in self.bandwidth):
            raise ConfigError(f"butterfly: bandwidth must be above 0 and finite, got {list(self.bandwidth)}")

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        if comm.generation == 0 and self.bandwidth is not None and len(self.bandwidth) != comm.size:
            raise ConfigError(f"butterfly: bandwidth must have {comm.size} entries, got {len(self.bandwidth)}")
        given = self.bandwidth if self.bandwidth is not None and len(self.bandwidth) == comm.size else None
        if comm.size <= 2:  # both send the same whatever their shares
            return replace(self, bandwidth=None)
        return replace(self, bandwidth=given or measure(comm).bandwidth)

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if self.bandwidth is not None and len(self.bandwidth) != size:
            raise ConfigError(f"butterfly: bandwidth must have {size} entries, got {len(self.bandwidth)}")
        if size == 1:
            return []
        cuts = self._cuts(size, numel)
        cut = [
            [(owner, span) for span in segments(cuts[owner], cuts[owner + 1], itemsize, self.segment_bytes)]
            for owner in range(size)
        ]
        return [star(index, size, owner, span) for owner, span in in_turn(cut)]

    def _cuts(self, size: int, numel: int) -> list[int]:
        if self.bandwidth is None:
            return element_cuts(numel, size)
        before = accumulate(best_shares(self.bandwidth), initial=0.0)
        cuts = [min(numel, round(numel * part)) for part in before]
        # The shares sum to one but for rounding; the last member with a share takes the rest.
        return [numel if cut == cuts[-1] else cut for cut in cuts]


def best_shares(bandwidth: Sequence[float]) -> list[float]:
    """Shares that sum to one and minimise the time of the busiest link.

    With the k fastest links at work, T is (p - 2 + k) over the sum of their bandwidths; k is the largest number for
    which the slowest of them still has a share. Two members send the same whatever their shares: halves.
    """
    p = len(bandwidth)
    if p <= 2:
        return [1 / p] * p
    fastest = sorted(bandwidth, reverse=True)
    rates = [(p - 2 + k) / total for k, total in enumerate(accumulate(fastest), start=1)]
    rate = next(rate for rate, b in zip(reversed(rates), reversed(fastest), strict=True) if rate * b > 1)
    return [max(0.0, rate * b - 1) / (p - 2) for b in bandwidth]
