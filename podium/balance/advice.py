"""Advice for the user: which workers delay the run more than they help.

A step lasts until the last worker has finished its part, plus the exchange among the workers. Nothing is changed here;
the user, or a planner, decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from podium.balance.base import Member, finish_s
from podium.balance.equal_finish import EqualFinish, limits_of

LEAST = 0.02
"""Relative gains in samples per second below this are not reported."""
TRIED = 4
"""How many workers are tried as the next to leave: those with the smallest parts."""


class Advice(NamedTuple):
    """Something that would make steps faster."""

    reason: str
    """In words."""
    before_s: float
    after_s: float
    """Seconds of a step now, and with the advice."""
    counts: list[int]
    """Samples of each remaining member, in order."""
    without: tuple[int, ...] = ()
    """Ranks that should leave."""

    @property
    def gain(self) -> float:
        """Relative gain in samples per second."""
        return self.before_s / self.after_s - 1


def drop_advice(members: Sequence[Member], count: int, exchange_s: Callable[[int], float]) -> Advice | None:
    """Which workers should leave, so that the rest trains more samples per second; None where that gains little.

    `exchange_s(n)`: seconds of the exchange among n workers after the last one's passes. Workers are left out one by
    one, each time the worker without which the rest is fastest; the best of all these sets is advised. No worker is
    advised to leave whose part would not fit into the memory of the rest.
    """
    before_s, counts = _step(members, count, exchange_s)
    best, best_s, best_counts = list(members), before_s, counts
    left = list(members)
    while len(left) > 1 and sum(limits_of(count, left)) >= count:
        left, after_s, counts = _without_one(left, counts, count, exchange_s)
        if after_s < best_s and sum(limits_of(count, left)) >= count:
            best, best_s, best_counts = left, after_s, counts
    if best_s <= 0 or before_s / best_s - 1 < LEAST:
        return None
    stay = {member.rank for member in best}
    gone = tuple(sorted(member.rank for member in members if member.rank not in stay))
    reason = _why(members, gone, count, (before_s, best_s), (exchange_s(len(members)), exchange_s(len(best))))
    return Advice(reason, before_s, best_s, best_counts, gone)


def _step(members: Sequence[Member], count: int, exchange_s: Callable[[int], float]) -> tuple[float, list[int]]:
    counts = EqualFinish().divide(count, members)
    return finish_s(counts, members) + exchange_s(len(members)), counts


def _without_one(
    members: Sequence[Member], counts: Sequence[int], count: int, exchange_s: Callable[[int], float]
) -> tuple[list[Member], float, list[int]]:
    """Leave out the worker without which a step is shortest: returns the rest, the step's seconds, and their parts."""
    by_part = sorted(range(len(members)), key=lambda i: (counts[i], -members[i].finish_s(1), -i))
    found = []
    for i in by_part[:TRIED]:
        stay = [member for k, member in enumerate(members) if k != i]
        found.append((stay, *_step(stay, count, exchange_s)))
    return min(found, key=lambda each: each[1])


def _why(
    members: Sequence[Member],
    gone: Sequence[int],
    count: int,
    step_s: tuple[float, float],
    exchange_s: tuple[float, float],
) -> str:
    parts = EqualFinish().divide(count, members)
    done = sum(part for part, member in zip(parts, members, strict=True) if member.rank in gone)
    who = f"worker {gone[0]}" if len(gone) == 1 else f"workers {', '.join(map(str, gone))}"
    it, does = ("it", "does") if len(gone) == 1 else ("they", "do")
    text = (
        f"without {who} a step takes {_time(step_s[1])} instead of {_time(step_s[0])}: {it} {does} {done} of {count} "
        "samples"
    )
    if exchange_s[0] > exchange_s[1]:
        text += f", and the exchange takes {_time(exchange_s[0])} with {it if it == 'it' else 'them'} and "
        text += f"{_time(exchange_s[1])} without"
    return text


def _time(seconds: float) -> str:
    if seconds >= 1:
        return f"{seconds:.3g} s"
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.3g} µs"
