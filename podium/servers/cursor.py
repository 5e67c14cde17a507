"""The cursor: asynchronous workers lease slices of the global order from it, and each slice is used once.

A global step is cut into `parts` slices, as synchronous training would divide it among that many workers; a slice is
named by its position in the order, so it has the same name whenever it is lent again. Where workers take several steps
between two pushes, a lease is a run of such slices, as long as its worker is to go on alone, and never longer than the
epoch. A lease is open until its worker says that all servers have applied it. When nothing is left, draws wait until
every open lease is closed: were they answered at once, a worker that dies late would take its slice with it and nobody
would be left to train on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from podium.data.order import GlobalOrder, Slice, divide, part_of


class Lease(NamedTuple):
    """A slice of the order, lent to one worker."""

    piece: Slice
    step: int  # samples of the global step that it is cut from
    share: int = 0  # its place among that step's slices
    cuts: tuple[tuple[int, int], ...] = ()  # where it is several slices: each one's samples, and those of its step

    @property
    def number(self) -> int:
        """Its name: where it begins. One without samples begins where the next does, and has a name below -1."""
        return self.piece.position if self.piece.count else -2 - (self.piece.position << 16) - self.share


class Cursor:
    """Hands out the samples from `position` to `end`, every global step in `parts` slices."""

    def __init__(
        self, order: GlobalOrder, position: int, end: int, batch_size: int, parts: int = 1, empty: bool = False
    ) -> None:
        """`empty`: lend slices without samples too, where a step has fewer samples than parts."""
        self.order, self.position, self.end = order, position, end
        self._first, self._last = position, end  # of the stretch: what is cut does not depend on where it is closed
        self.batch_size, self.parts, self._empty = batch_size, parts, empty
        self.open: dict[int, tuple[int, Lease]] = {}  # lease -> who has it
        self.returned: deque[Lease] = deque()
        self._cut: deque[Lease] = deque()  # the rest of the step that is being lent, …
        self._step: Slice | None = None  # … and that step
        self._ahead: dict[int, tuple[int, int]] = {}
        """After a restart: leases that this cursor has yet to come to, who has each already, and its samples, …"""
        self._done: dict[int, int] = {}
        """… or that have been done."""
        self._strangers: set[int] = set()
        """After a restart: workers whose open leases may be out of date."""
        self._edges: set[int] = set()
        """After a restart: where leases of before begin and end; no lease of several slices reaches across."""

    def draw(self, worker: int, slices: int = 1) -> Lease | None:
        """The next so many slices; what came back comes first, as it was. None when there is nothing left to lend."""
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
        """This slice with those behind it, up to the end of the epoch or to one that somebody has."""
        run = [lease]
        while len(run) < slices and self._goes_on():
            number = self._cut[0].number
            if number in self._ahead or number in self._done or number in self._edges:
                break
            run.append(self._take())
        return _joined(run)

    def _goes_on(self) -> bool:
        """Whether another slice of this epoch follows; cuts it."""
        if not self._cut and self.position < self.end and self.position % self.order.samples:
            self._cut_step()
        return bool(self._cut)

    def _take(self) -> Lease:
        lease = self._cut.popleft()
        self.position = lease.piece.position + lease.piece.count
        return lease

    def _advance(self) -> Lease | None:
        """The next slice of the order; None if somebody has it, or has done it, already."""
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
        """The lease of so many samples that begins with this slice."""
        run = [first]
        while sum(lease.piece.count for lease in run) < samples and self._goes_on():
            run.append(self._take())
        return _joined(run)

    def _cut_step(self) -> None:
        self._step = self.order.rest_of_step(self.position, self.batch_size, self.end)
        self._cut_from(0)

    def _cut_from(self, first: int) -> None:
        """The slices of the present step from this one on."""
        step = self._step
        assert step is not None
        counts = divide(step.count, [1.0] * self.parts)
        leases = [Lease(part_of(step, counts, i), step.count, i) for i in range(first, self.parts)]
        self._cut.extend(lease for lease in leases if lease.piece.count or self._empty)

    def applied(self, number: int, worker: int | None = None) -> None:
        """This lease's gradients are in the parameters, on all servers, as this worker says.

        One that does not have the lease (any more) speaks of a server that was lost since: the lease stays open.
        """
        who, _ = self.open.get(number) or self._ahead.get(number) or (None, None)
        if who is None or worker not in (None, who):
            return
        if self.open.pop(number, None) is None:
            _, self._done[number] = self._ahead.pop(number)

    def not_yet(self, lease: Lease) -> None:
        """This lease was drawn and not handed over: it is the next to be drawn."""
        del self.open[lease.number]
        self.returned.appendleft(lease)

    def give_back(self, number: int) -> None:
        """This lease's gradient was not used: lend it again."""
        lent = self.open.pop(number, None)
        if lent is not None:
            self.returned.append(lent[1])
        ahead = self._ahead.pop(number, None)
        if ahead is not None:  # as it was: some servers may have applied it, and it must not be cut otherwise
            _, samples = ahead
            first, step = self._cuts_of_step(number)[0]
            self._done[number] = samples = max(first, samples)
            self.returned.append(self._lease(list(self.order.slice_at(number, samples)), step, 0))

    def lost(self, worker: int) -> None:
        """A worker is gone: what it had goes back."""
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
        """Lend nothing that was not lent before; what comes back still has to be done.

        Not `at_once`: the global step that is being lent is lent to its end, so that others can go on from there.
        """
        # After a restart, slices are lent in order, so all before one that somebody has were lent too.
        furthest = max([*self._ahead, *self._done], default=-1)
        while self.position <= furthest and (self._cut or self.position < self.end):
            lease = self._advance()
            if lease is not None:
                self.returned.append(lease)
        if at_once:
            self._cut.clear()
        last = self._cut[-1].piece if self._cut else None
        self.end = self.position if last is None else last.position + last.count

    @property
    def exhausted(self) -> bool:
        """Whether there is nothing to lend just now."""
        return self.position >= self.end and not self._cut and not self.returned

    @property
    def drained(self) -> bool:
        """Whether everything that was lent has been applied, and nothing is left."""
        return self.exhausted and not self.open

    # A restart from a copy that may be out of date.

    def state(self) -> dict[str, Any]:
        """All that a copy must hold; plain values."""
        return {
            "position": self.position,
            "end": self.end,
            "open": [[who, *_plain(lease)] for who, lease in self.open.values()],
            "returned": [_plain(lease) for lease in self.returned],
            "cut": [list(self._step or ()), self._cut[0].share] if self._cut else None,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what `state` says; its leases count as open until their workers are heard of."""
        self.position, self.end = state["position"], state["end"]
        leases = [(who, self._lease(*plain)) for who, *plain in state["open"]]
        self.open = {lease.number: (who, lease) for who, lease in leases}
        self.returned = deque(self._lease(*plain) for plain in state["returned"])
        self._cut.clear()
        if state["cut"] is not None:
            piece, first = state["cut"]
            self._step = Slice(*piece)
            self._cut_from(first)
        self._strangers = {who for who, _ in self.open.values()}

    def cut_at(self, edges: Collection[int]) -> None:
        """No lease of several slices shall reach across one of these positions."""
        self._edges = {edge for edge in edges if edge > self.position}

    def _lease(self, piece: list[int], step: int, share: int) -> Lease:
        """The inverse of `_plain`: what it is cut into follows from where it lies."""
        whole, cuts = Slice(*piece), []
        place, stop = whole.position, whole.position + whole.count
        while place < stop:
            for count, of in self._cuts_of_step(place):
                if place < stop:
                    cuts.append((count, of))
                    place += count
        return Lease(whole, step, share, tuple(cuts) if len(cuts) > 1 else ())

    def _cuts_of_step(self, position: int) -> list[tuple[int, int]]:
        """The slices, from the one at this position on, of the global step that holds it, and that step's samples."""
        begun = position % self.order.samples % self.batch_size
        first = max(self._first, position - begun)
        step = self.order.rest_of_step(first, self.batch_size, self._last)
        counts = divide(step.count, [1.0] * self.parts)
        slices = [part_of(step, counts, i) for i in range(self.parts)]
        return [(piece.count, step.count) for piece in slices if piece.count and piece.position >= position]

    def heard_of(self, worker: int, holds: Collection[int], samples: int = 0) -> None:
        """After a restart, a worker says what it really has: this is its own, and what else the copy says goes back.

        `samples` of the lease, where it may be several slices.
        """
        for number in holds:
            self._entrust(number, worker, samples)
        if worker in self._strangers:
            self._strangers.discard(worker)
            for number in self.held_by(worker):
                if number not in holds:
                    self.give_back(number)

    def _entrust(self, number: int, worker: int, samples: int) -> None:
        """This worker has a slice, whatever the copy says of it."""
        came_back = next((lease for lease in self.returned if lease.number == number), None)
        if number in self.open:
            self.open[number] = (worker, self.open[number][1])
        elif came_back is not None:
            self.returned.remove(came_back)
            self.open[number] = (worker, came_back)
        elif number >= self.position and number not in self._done:
            self._ahead[number] = (worker, samples)


def _plain(lease: Lease) -> list[Any]:
    """What it is cut into is left out: there may be thousands of slices, and they follow from where it lies."""
    return [list(lease.piece), lease.step, lease.share]


def _joined(run: Sequence[Lease]) -> Lease:
    """Slices that follow on each other, as one lease."""
    first = run[0]
    if len(run) == 1:
        return first
    cuts = tuple((lease.piece.count, lease.step) for lease in run)
    return first._replace(piece=first.piece._replace(count=sum(count for count, _ in cuts)), cuts=cuts)
