"""The cursor: asynchronous workers lease slices of the global order from it, and each slice is used once.

A lease is open until its worker, coming for the next one, says that it was applied. When nothing is left, draws are
parked until every open lease is closed: were they answered at once, a worker that dies late would take its slice with
it and nobody would be left to train on it.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from podium.data.order import GlobalOrder, Slice


class Lease(NamedTuple):
    """A slice of the order, lent to one worker."""

    number: int
    piece: Slice


class Cursor:
    """Hands out the samples from `position` to `end` in slices of at most `count`."""

    def __init__(self, order: GlobalOrder, position: int, end: int, count: int) -> None:
        self.order, self.position, self.end, self.count = order, position, end, count
        self.open: dict[int, tuple[int, Lease]] = {}  # lease -> who has it
        self.returned: deque[Lease] = deque()
        self._made = 0

    def draw(self, worker: int) -> Lease | None:
        """The next slice, returned ones first; None when there is nothing left to lend."""
        if self.returned:
            lease = self.returned.popleft()
        elif self.position < self.end:
            piece = self.order.slice_at(self.position, min(self.count, self.end - self.position))
            self.position += piece.count
            lease = Lease(self._made, piece)
            self._made += 1
        else:
            return None
        self.open[lease.number] = (worker, lease)
        return lease

    def applied(self, number: int) -> None:
        """This lease's gradients are in the parameters."""
        self.open.pop(number, None)

    def lost(self, worker: int) -> None:
        """A worker is gone: what it had goes back."""
        for number in [n for n, (who, _) in self.open.items() if who == worker]:
            self.returned.append(self.open.pop(number)[1])

    def close(self) -> None:
        """Lend nothing more."""
        self.end = self.position
        self.returned.clear()

    @property
    def drained(self) -> bool:
        """Whether everything that was lent has been applied, and nothing is left."""
        return self.position >= self.end and not self.open and not self.returned
