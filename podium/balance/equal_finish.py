"""All workers finish together: the division that ends a step soonest, given what passes and exchanges take.

Cost model: worker i finishes b samples after exchange_i + fixed_i + per_sample_i * b, or at once if it has none; the
step ends with the last worker. Let time rise like water: at time T worker i has done (T - exchange_i - fixed_i) /
per_sample_i samples, not below 0 and not above what fits; the step is done when these add up to all of them. A worker
that would need longer than that for its first sample gets none.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Learning, Member
from podium.data.order import divide

LEAST_S = 1e-12
"""No sample is taken to cost less: what costs nothing has no proportions."""


@final
@dataclass(frozen=True, kw_only=True)
class EqualFinish(Learning):
    """The same finish for everybody who has a part."""

    name: ClassVar[str] = "equal-finish"

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """The whole numbers whose last finish is soonest.

        Where all that fits is less than `count`, everybody gets as many times more than fits: a step is not made
        smaller, and nobody is nearer to its end than others. More micro-batches (`accumulate`) let more fit.
        """
        limits = limits_of(count, members)
        if sum(limits) < count:
            return divide(count, limits if sum(limits) else [1.0] * len(members))
        costs = [max(LEAST_S, member.speed.per_sample_s) for member in members]
        starts = [member.exchange_s + member.speed.fixed_s for member in members]
        level_s = _level(count, costs, starts, limits)
        # One fewer than is done by then, lest rounding gives too many; what is left goes to the worker that then
        # finishes first. As every next sample of a worker ends later, these are the `count` samples that end soonest:
        # no other division can do better.
        counts = [
            max(0, min(limit, math.floor((level_s - start) / cost)) - 1)
            for cost, start, limit in zip(costs, starts, limits, strict=True)
        ]
        ends = [
            (start + cost * (have + 1), i)
            for i, (cost, start, have, limit) in enumerate(zip(costs, starts, counts, limits, strict=True))
            if have < limit
        ]
        heapq.heapify(ends)
        for _ in range(count - sum(counts)):
            i = ends[0][1]
            counts[i] += 1
            if counts[i] < limits[i]:
                heapq.heapreplace(ends, (starts[i] + costs[i] * (counts[i] + 1), i))
            else:
                heapq.heappop(ends)
        return counts


def limits_of(count: int, members: Sequence[Member]) -> list[int]:
    """How many of `count` samples each can take at most."""
    return [count if member.most is None else min(count, max(0, member.most)) for member in members]


def _level(count: int, costs: Sequence[float], starts: Sequence[float], limits: Sequence[int]) -> float:
    """When `count` samples are done, in parts of samples; all together can do that many."""
    # Where a worker begins the water spreads by its rate, where it is full by that much less.
    events = []
    for start, cost, limit in zip(starts, costs, limits, strict=True):
        if limit:
            events += [(start, 1 / cost), (start + cost * limit, -1 / cost)]
    events.sort()
    done, rate, now = 0.0, 0.0, 0.0
    for at, change in events:
        if rate > 0 and done + rate * (at - now) >= count:
            break
        done, now, rate = done + max(0.0, rate) * (at - now), at, rate + change
    return now + max(0.0, count - done) / rate if rate > 0 else now
