"""How a segment's global steps are cut into the slices that workers lease: always the same way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from podium.data.order import GlobalOrder, Slice, divide, part_of
from podium.servers.leases.lease import Lease, number_of


class StepCuts(NamedTuple):
    """Cuts each global step into `parts` slices, as synchronous training would divide it among that many workers."""

    order: GlobalOrder
    first: int
    """The position at which the segment begins, …"""
    last: int
    """… and at which it was planned to end: cuts do not depend on where the cursor is closed."""
    batch_size: int
    parts: int
    empty: bool
    """Whether slices without samples are lent too, where a step has fewer samples than parts."""

    def step_at(self, position: int, end: int) -> Slice:
        """The global step that begins here, or the rest of it."""
        return self.order.rest_of_step(position, self.batch_size, end)

    def slices(self, step: Slice, first: int = 0) -> list[Lease]:
        """A step's slices, from this one on."""
        counts = divide(step.count, [1.0] * self.parts)
        found = [(i, part_of(step, counts, i)) for i in range(first, self.parts)]
        return [lease_over(mine, step.count, i) for i, mine in found if mine.count or self.empty]

    def cuts_from(self, position: int) -> list[tuple[int, int]]:
        """Of the step that holds this position: each slice's samples from there on, and the step's samples."""
        begun = position % self.order.samples % self.batch_size
        step = self.order.rest_of_step(max(self.first, position - begun), self.batch_size, self.last)
        counts = divide(step.count, [1.0] * self.parts)
        slices = [part_of(step, counts, i) for i in range(self.parts)]
        return [(mine.count, step.count) for mine in slices if mine.count and mine.position >= position]

    def lease(self, samples: Sequence[int], step: int, share: int) -> Lease:
        """The lease over these samples (the fields of a slice): its cuts follow from its position."""
        whole, cuts = Slice(*samples), []
        position, stop = whole.position, whole.position + whole.count
        while position < stop:
            for count, of in self.cuts_from(position):
                if position < stop:
                    cuts.append((count, of))
                    position += count
        return lease_over(whole, step, share, tuple(cuts) if len(cuts) > 1 else ())


def lease_over(samples: Slice, step: int, share: int, cuts: tuple[tuple[int, int], ...] = ()) -> Lease:
    return Lease(number_of(samples, share), samples, step, cuts, share)


def joined(run: Sequence[Lease]) -> Lease:
    """Consecutive slices as one lease."""
    first = run[0]
    if len(run) == 1:
        return first
    cuts = tuple((lease.slice.count, lease.step) for lease in run)
    return first._replace(slice=first.slice._replace(count=sum(count for count, _ in cuts)), cuts=cuts)
