"""The cursor: asynchronous workers lease slices of the global order from it, and each slice is used once.

A global step is cut into `parts` slices, as synchronous training would divide it among that many workers. A slice is
named by its position in the order, so it has the same name whenever it is lent again. Where workers take several steps
between two pushes, a lease is a run of slices, one per step, and ends with the epoch at the latest. A lease is open
until its worker reports that all servers have applied it. When nothing is left, draws wait until every open lease is
closed: otherwise the slice of a worker that dies late would be lost, with no worker left to train on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from typing import Any

from podium.data.order import GlobalOrder, Slice
from podium.servers.leases.lease import Lease
from podium.servers.leases.step_cuts import StepCuts, joined


class Cursor:
    """Lends the samples from `position` to `end`, every global step in `parts` slices."""

    def __init__(
        self, order: GlobalOrder, position: int, end: int, batch_size: int, parts: int = 1, empty: bool = False
    ) -> None:
        """`empty`: lend slices without samples too, where a step has fewer samples than parts."""
        self.order, self.position, self.end = order, position, end
        self._cuts = StepCuts(order, position, end, batch_size, parts, empty)
        self.open: dict[int, tuple[int, Lease]] = {}  # by number: its worker, and the lease
        self.returned: deque[Lease] = deque()
        self._cut: deque[Lease] = deque()  # the rest of the step that is being lent, …
        self._step: Slice | None = None  # … and that step
        self._ahead: dict[int, tuple[int, int]] = {}
        """After a restart: leases ahead of the cursor that a worker already has: the worker, and their samples, …"""
        self._done: dict[int, int] = {}
        """… or that are done."""
        self._unheard: set[int] = set()
        """After a restart: workers whose open leases may be out of date."""
        self._edges: set[int] = set()
        """After a restart: where earlier leases begin and end; no lease of several slices crosses such a position."""

    def draw(self, worker: int, slices: int = 1) -> Lease | None:
        """A lease of this many slices; a returned one is lent first, unchanged. None when there is nothing left."""
        lease = self._next(slices)
        if lease is not None:
            self.open[lease.number] = (worker, lease)
        return lease

    def _next(self, slices: int) -> Lease | None:
        while self.returned or self._cut or self.position < self.end:
            if self.returned:
                return self.returned.popleft()
            lease = self._advance()
            if lease is not None:
                return self._lengthened(lease, slices)
        return None

    def _lengthened(self, lease: Lease, slices: int) -> Lease:
        """This slice with the next ones, up to the end of the epoch or to a slice that a worker has."""
        run = [lease]
        while len(run) < slices and self._has_more():
            number = self._cut[0].number
            if number in self._ahead or number in self._done or number in self._edges:
                break
            run.append(self._take())
        return joined(run)

    def _has_more(self) -> bool:
        """Whether another slice of this epoch follows; cuts it."""
        if not self._cut and self.position < self.end and self.position % self.order.samples:
            self._cut_step()
        return bool(self._cut)

    def _take(self) -> Lease:
        lease = self._cut.popleft()
        self.position = lease.slice.position + lease.slice.count
        return lease

    def _advance(self) -> Lease | None:
        """The next slice of the order; None if a worker has it or has done it already."""
        if not self._cut:
            self._cut_step()
        lease = self._take()
        if lease.number in self._ahead:
            worker, samples = self._ahead.pop(lease.number)
            self.open[lease.number] = (worker, self._of(samples, lease))
            return None
        if lease.number in self._done:
            self._of(self._done.pop(lease.number), lease)
            return None
        return lease

    def _of(self, samples: int, first: Lease) -> Lease:
        """The lease of this many samples that begins with this slice."""
        run = [first]
        while sum(lease.slice.count for lease in run) < samples and self._has_more():
            run.append(self._take())
        return joined(run)

    def _cut_step(self) -> None:
        self._step = self._cuts.step_at(self.position, self.end)
        self._cut.extend(self._cuts.slices(self._step))

    def applied(self, number: int, worker: int | None = None) -> None:
        """A worker reports that all servers have applied this lease.

        Where the worker does not have the lease (any more), its report is about a server that was lost since: the lease
        stays open.
        """
        who, _ = self.open.get(number) or self._ahead.get(number) or (None, None)
        if who is None or worker not in (None, who):
            return
        if self.open.pop(number, None) is None:
            _, self._done[number] = self._ahead.pop(number)

    def not_yet(self, lease: Lease) -> None:
        """This lease was drawn and not sent: it is the next to be drawn."""
        del self.open[lease.number]
        self.returned.appendleft(lease)

    def give_back(self, number: int) -> None:
        """This lease's gradient was not used: lend it again."""
        lent = self.open.pop(number, None)
        if lent is not None:
            self.returned.append(lent[1])
        ahead = self._ahead.pop(number, None)
        if ahead is not None:  # unchanged: some servers may have applied it, so it must not be cut differently
            _, samples = ahead
            first, step = self._cuts.cuts_from(number)[0]
            self._done[number] = samples = max(first, samples)
            self.returned.append(self._cuts.lease(self.order.slice_at(number, samples), step, 0))

    def lost(self, worker: int) -> None:
        """A worker is gone: its leases are lent again."""
        for number in self.held_by(worker):
            self.give_back(number)

    def held_by(self, worker: int) -> list[int]:
        held = [n for n, (who, _) in self.open.items() if who == worker]
        return held + [n for n, (who, _) in self._ahead.items() if who == worker]

    @property
    def owners(self) -> set[int]:
        """Workers that have a lease."""
        return {who for who, _ in (*self.open.values(), *self._ahead.values())}

    def close(self, at_once: bool = True) -> None:
        """Lend nothing new; a returned lease is still lent again.

        Not `at_once`: lend the present global step to its end, so that the next phase begins with a whole step.
        """
        # Slices are lent in order, so after a restart all slices before one that a worker has were lent too.
        furthest = max([*self._ahead, *self._done], default=-1)
        while self.position <= furthest and (self._cut or self.position < self.end):
            lease = self._advance()
            if lease is not None:
                self.returned.append(lease)
        if at_once:
            self._cut.clear()
        last = self._cut[-1].slice if self._cut else None
        self.end = self.position if last is None else last.position + last.count

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing to lend at present."""
        return self.position >= self.end and not self._cut and not self.returned

    @property
    def drained(self) -> bool:
        """Whether all that was lent has been applied, and nothing is left."""
        return self.exhausted and not self.open

    # A restart from a copy that may be out of date.

    def state(self) -> dict[str, Any]:
        """The state that a copy must hold; plain values."""
        return {
            "position": self.position,
            "end": self.end,
            "open": [[who, *_plain(lease)] for who, lease in self.open.values()],
            "returned": [_plain(lease) for lease in self.returned],
            "cut": [list(self._step or ()), self._cut[0].share] if self._cut else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Load a state; its leases count as open until their workers report (`heard_of`)."""
        self.position, self.end = state["position"], state["end"]
        leases = [(who, self._cuts.lease(*plain)) for who, *plain in state["open"]]
        self.open = {lease.number: (who, lease) for who, lease in leases}
        self.returned = deque(self._cuts.lease(*plain) for plain in state["returned"])
        self._cut.clear()
        if state["cut"] is not None:
            step, first = state["cut"]
            self._step = Slice(*step)
            self._cut.extend(self._cuts.slices(self._step, first))
        self._unheard = {who for who, _ in self.open.values()}

    def cut_at(self, edges: Collection[int]) -> None:
        """From now on, no lease of several slices crosses one of these positions."""
        self._edges = {edge for edge in edges if edge > self.position}

    def heard_of(self, worker: int, holds: Collection[int], samples: int = 0) -> None:
        """After a restart, a worker reports its leases; others that the copy has in its name are lent again.

        `samples` of the lease, where it may be several slices.
        """
        for number in holds:
            self._entrust(number, worker, samples)
        if worker in self._unheard:
            self._unheard.discard(worker)
            for number in self.held_by(worker):
                if number not in holds:
                    self.give_back(number)

    def _entrust(self, number: int, worker: int, samples: int) -> None:
        """Mark a lease as this worker's, whatever the copy has."""
        came_back = next((lease for lease in self.returned if lease.number == number), None)
        if number in self.open:
            self.open[number] = (worker, self.open[number][1])
        elif came_back is not None:
            self.returned.remove(came_back)
            self.open[number] = (worker, came_back)
        elif number >= self.position and number not in self._done:
            self._ahead[number] = (worker, samples)


def _plain(lease: Lease) -> list[Any]:
    """Without its cuts: there may be thousands, and they follow from its position."""
    return [list(lease.slice), lease.step, lease.share]
