"""Which samples have moved a unit: intervals of the global order, in bounded memory.

Leases are lent in order and applied nearly in order. All samples below the low-water mark are applied; above it, only
intervals that were applied out of order are stored. There are at most as many intervals as open leases, however many
pushes there were: one number per push took 85 bytes each, and 3.4 s of every snapshot after 500,000 pushes.

Intervals and not lease numbers, because a lease may be cut differently when it is lent again: after a restart of the
first server with `steps=speed`, the same samples are in leases of another length.

A lease without samples has no interval; its number encodes its position (`lease.py`). Below the mark it counts as
applied: it moves nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from podium.errors import CommError
from podium.servers.leases.lease import position_of

Span = tuple[int, int]
"""Samples from the first position to before the second; of a lease without samples, its number twice."""


def span_of_lease(number: int, size: int) -> Span:
    """The samples of a lease that a push names."""
    return (number, number + max(1, size)) if number >= 0 else (number, number)


class Applied:
    """The samples that have moved one unit since its segment began."""

    def __init__(self, start: int = 0) -> None:
        """`start`: the position at which the segment begins."""
        self.mark = start
        """All samples from the start up to here are applied."""
        self._starts: list[int] = []
        self._stops: list[int] = []
        self._empty: set[int] = set()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Applied) and self.plain() == other.plain()

    __hash__ = None  # type: ignore[assignment]  # it changes

    def __len__(self) -> int:
        """Number of stored intervals and numbers, not of samples."""
        return 1 + len(self._starts) + len(self._empty)

    def has(self, span: Span) -> bool:
        """Whether these samples are applied; raises where only some are: such a push cannot be applied."""
        start, stop = span
        if start < 0:
            return start in self._empty or position_of(start) < self.mark
        if stop <= self.mark:
            return True
        at = bisect_right(self._starts, start) - 1
        if at >= 0 and stop <= self._stops[at]:
            return True
        inside = (at >= 0 and start < self._stops[at]) or start < self.mark
        if inside or (at + 1 < len(self._starts) and self._starts[at + 1] < stop):
            raise CommError(
                f"a push must bring samples of which all or none are applied, got {start} to {stop}, of which those "
                f"below {self.mark} and {list(zip(self._starts, self._stops, strict=True))[:8]} are"
            )
        return False

    def add(self, span: Span) -> None:
        """Mark these samples as applied."""
        start, stop = span
        if start < 0:
            if position_of(start) >= self.mark:
                self._empty.add(start)
            return
        if start > self.mark:
            return self._insert(start, stop)
        self.mark = max(self.mark, stop)
        while self._starts and self._starts[0] <= self.mark:
            self.mark = max(self.mark, self._stops.pop(0))
            del self._starts[0]
        if self._empty:
            self._empty = {number for number in self._empty if position_of(number) >= self.mark}

    def _insert(self, start: int, stop: int) -> None:
        at = bisect_right(self._starts, start)
        if at and self._stops[at - 1] >= start:  # it begins where the previous interval ends
            at -= 1
            start, stop = self._starts[at], max(stop, self._stops[at])
        end = at
        while end < len(self._starts) and self._starts[end] <= stop:
            stop = max(stop, self._stops[end])
            end += 1
        self._starts[at:end], self._stops[at:end] = [start], [stop]

    def edges(self) -> list[int]:
        """Positions where applied and missing samples meet."""
        return [self.mark, *self._starts, *self._stops]

    # As plain values, for copies.

    def plain(self) -> list[list[int]]:
        """The mark first, then intervals and numbers above it."""
        spans = [list(span) for span in zip(self._starts, self._stops, strict=True)]
        return [[self.mark, self.mark], *spans, *([number, number] for number in sorted(self._empty))]

    @classmethod
    def of(cls, plain: Sequence[Sequence[int]]) -> Applied:
        """The inverse of `plain`."""
        (mark, _), *rest = plain
        made = cls(mark)
        for start, stop in rest:
            made.add((start, stop))
        return made


def joined(spans: Iterable[Span]) -> list[list[int]]:
    """The same samples in as few intervals as possible: for a message."""
    found: list[list[int]] = []
    for start, stop in sorted(spans):
        if found and start >= 0 and start <= found[-1][1]:
            found[-1][1] = max(found[-1][1], stop)
        else:
            found.append([start, stop])
    return found
