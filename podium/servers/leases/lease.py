"""A lease: samples of the global order, lent to one worker until all servers have applied its gradients.

The cursor makes leases (`cursor.py`), they travel with the answers to draws and pushes (`messages.py`), and the
worker's feed trains on them. Nothing here knows of servers, sockets or tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from podium.comm.base import BUSY_DEADLINES
from podium.data.order import Slice

PATIENCE = BUSY_DEADLINES
"""Deadlines that a worker waits for a lease or a gate, and a server for any message: a worker may be validating."""

NO_LEASE = -1
"""Instead of a lease's number: none."""


class Lease(NamedTuple):
    """Samples lent to one worker, to be trained on in one step, or in one step for each cut."""

    number: int
    """The lease's name: the position of its first sample. One without samples has a name below -1 (`number_of`)."""
    slice: Slice
    step: int
    """Samples of the global step that its first slice is cut from."""
    cuts: tuple[tuple[int, int], ...] = ()
    """Where the lease lasts several steps: each step's samples, and those of its global step."""
    share: int = 0
    """The index of its first slice in its global step; not sent."""

    @property
    def end(self) -> int:
        """The position behind its last sample."""
        return self.slice.position + self.slice.count

    def first_cut(self) -> tuple[Lease, Lease | None]:
        """The lease's first step, and the rest of it."""
        if not self.cuts:
            return self, None
        (count, step), *cuts = self.cuts
        first = Lease(self.number, self.slice._replace(count=count), step)
        position, whole, epoch, offset = self.slice
        rest = Slice(position + count, whole - count, epoch, offset + count)
        return first, Lease(self.number, rest, step, tuple(cuts)) if cuts else None


class NoLease(NamedTuple):
    """All samples of the segment are used: the position that was reached, and what the workers agreed on."""

    position: int
    agreed: Sequence[bool]


def number_of(samples: Slice, share: int) -> int:
    """A lease's name. One without samples begins where the next lease does, so its index in the step is part of it."""
    return samples.position if samples.count else -2 - (samples.position << 16) - share


def position_of(number: int) -> int:
    """The position of a lease without samples; the inverse of `number_of`."""
    return (-2 - number) >> 16
