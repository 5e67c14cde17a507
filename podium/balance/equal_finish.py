"""All workers finish together: the division that ends a step soonest, given the times of passes and exchanges.

Cost model: worker i finishes b samples after exchange_i + fixed_i + per_sample_i * b, or at once if it has none; the
step ends with the last worker. Water filling: at time T worker i has done (T - exchange_i - fixed_i) / per_sample_i
samples, at least 0 and at most its limit; the step ends at the T where these sum to all samples. A worker that would
need longer than T for its first sample gets none.
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
"""Least cost of a sample, in seconds: costs of zero have no proportions."""


@final
@dataclass(frozen=True, kw_only=True)
class EqualFinish(Learning):
    """The same finish time for every worker that has samples."""

    name: ClassVar[str] = "equal-finish"

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """The whole numbers whose last finish is soonest.

        Where the limits sum to less than `count`, every worker exceeds its limit by the same factor: a step is not made
        smaller, and no worker is closer to running out of memory than another. More micro-batches (`accumulate`) let
        more samples fit.
        """
        limits = limits_of(count, members)
        if sum(limits) < count:
            return divide(count, limits if sum(limits) else [1.0] * len(members))
        costs = [max(LEAST_S, member.speed.per_sample_s) for member in members]
        starts = [member.exchange_s + member.speed.fixed_s for member in members]
        level_s = _level(count, costs, starts, limits)
        # Start with one fewer than each has done by then, lest rounding gives too many; each remaining sample goes to
        # the worker that finishes it first. A worker's next sample always ends later than its last, so these are the
        # `count` samples that end soonest: no other division is better.
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
    """How many of `count` samples each member can take at most."""
    return [count if member.most is None else min(count, max(0, member.most)) for member in members]


def _level(count: int, costs: Sequence[float], starts: Sequence[float], limits: Sequence[int]) -> float:
    """The time at which `count` samples are done, fractions included; the limits must sum to at least `count`."""
    # The total rate grows where a worker begins and falls where it reaches its limit.
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
