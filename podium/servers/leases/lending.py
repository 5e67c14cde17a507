"""Leases on the first server: which worker gets which samples next, and which must wait.

The answer to a push or to a draw carries a lease. Where nothing is left to lend, draws wait until every open lease has
been applied; then all workers are answered that the segment is over. Serve-only workers draw too: they are answered
with `again` at intervals, so that they need not know how long a segment lasts. Where all other workers are lost, they
train.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from podium.data.order import GlobalOrder
from podium.servers.applied import span_of_lease
from podium.servers.copies.restart_inquiry import Inquiry
from podium.servers.leases.cursor import Cursor
from podium.servers.leases.lease import Lease
from podium.servers.wire.messages import NO_VOTES, Draw, DrawReply, plain_lease

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.servers.segment import Segment

_MOST_CUTS = 1024
"""A lease of more slices than this is only sent in answer to a draw."""


class Lending:
    """The cursor of a segment, and the draws that wait for it."""

    def __init__(self, segment: Segment) -> None:
        seed = segment.seed
        self._segment, self._members, self._outbox = segment, segment.members, segment.outbox
        order = GlobalOrder(seed.samples, seed=0)  # lends positions only: its permutation does not matter
        empty = segment.rules.all_workers
        self.cursor = Cursor(order, seed.position, seed.end, seed.batch_size, seed.parts, empty=empty)
        self._draws: dict[int, Message] = {}  # by worker: its draw, not answered yet
        self._countdown: dict[int, int] = {}  # by serve-only worker: pushes until its draw is answered
        self._agreed = list(NO_VOTES)
        self.inquiry: Inquiry | None = None
        """After a restart: what must be known before leases are lent."""

    # Draws.

    def draw(self, message: Message, draw: Draw) -> None:
        worker = message.source
        self.cursor.applied(draw.done, worker)
        if self._segment.store.restored:
            self._take_back(worker)
        self.vote(draw.votes)
        self._draws[worker] = message
        self._countdown[worker] = min(draw.patience, max(1, len(self._members.training)))
        self.serve()

    def _take_back(self, worker: int) -> None:
        """A worker that draws has no lease. After a restart some may be in its name, which it never received."""
        cursor, applied = self.cursor, self._segment.store.applied[0]
        for number in cursor.held_by(worker):
            lent = cursor.open.get(number)
            counts = lent is not None and (
                applied.has(span_of_lease(number, lent[1].slice.count)) or self._segment.policy.will_apply(number)
            )
            cursor.applied(number) if counts else cursor.give_back(number)

    def serve(self) -> None:
        """Answer workers that wait for a lease: with a lease, or that the segment is over."""
        cursor, members = self.cursor, self._members
        if self.inquiry is not None or (self._segment.rules.wait and not self._may_lend()):
            return
        if members.serve_only and not members.training:
            members.train_all()
        for worker in sorted(set(self._draws) - members.serve_only):
            lease = self._next(worker)
            if lease is not None:
                self._hand_over(self._draws.pop(worker), lease)
        if cursor.exhausted and (resting := set(self._draws) - members.serve_only):
            self._segment.policy.rest(resting)
        if cursor.drained and set(self._draws) | set(members.left) >= set(members.live):
            for message in self._draws.values():
                self._outbox.answer(message, DrawReply(position=cursor.position, agreed=self._agreed))
            self._draws.clear()

    def _may_lend(self) -> bool:
        """Where workers wait for each update, the first leases are lent in order of rank, once all have drawn."""
        begun = any(self._segment.store.versions) or bool(self.cursor.open)
        return begun or set(self._draws) >= set(self._members.training)

    def _hand_over(self, draw: Message, lease: Lease) -> None:
        """Answer a draw; a long list of slices goes in the body, as a header has no room for it."""
        reply = DrawReply(*plain_lease(lease))
        if len(lease.cuts) <= _MOST_CUTS:
            return self._outbox.answer(draw, reply)
        self._outbox.answer(draw, reply._replace(cuts=()), [torch.tensor(lease.cuts, dtype=torch.int64)])

    def pushed(self) -> None:
        """Answer serve-only workers with `again`, one round of pushes after their draw, so that none waits too long."""
        for worker in sorted(self._members.serve_only.intersection(self._draws)):
            self._countdown[worker] -= 1
            if self._countdown[worker] <= 0:
                self._outbox.answer(self._draws.pop(worker), DrawReply(again=max(1, len(self._members.training))))

    # Leases.

    def lend(self, worker: int) -> Lease | None:
        """A new lease for the answer to a push; None where there is nothing to lend.

        Also None where the lease is too long for the answer: the worker then draws it.
        """
        return self._next(worker, most_cuts=_MOST_CUTS)

    def _next(self, worker: int, most_cuts: int | None = None) -> Lease | None:
        if self.inquiry is not None:
            return None
        lease = self.cursor.draw(worker, self._slices_for(worker))
        if lease is not None and most_cuts is not None and len(lease.cuts) > most_cuts:
            self.cursor.not_yet(lease)
            return None
        if lease is not None:
            self._segment.policy.wake(worker)
        return lease

    def _slices_for(self, worker: int) -> int:
        """Local steps of a lease: the seed's number or, by speed, as many as fit in the fastest worker's time."""
        seed = self._segment.seed
        if not seed.by_speed:
            return seed.local_steps
        return self._segment.paces.steps(worker, self._members.training, seed.local_steps)

    def applied(self, lease: int, worker: int) -> None:
        """A worker reports that all servers have applied this lease."""
        self.cursor.applied(lease, worker)

    def give_back_all(self, worker: int) -> None:
        """A worker is gone: its leases are lent again."""
        self.cursor.lost(worker)

    def forget(self, worker: int) -> None:
        """Drop the draw of a worker that is gone."""
        self._draws.pop(worker, None)

    def vote(self, votes: Sequence[bool]) -> None:
        """Count a worker's votes: to stop, to pause so that workers can join or leave, to switch to the next phase."""
        self._agreed = [before or vote for before, vote in zip(self._agreed, votes, strict=True)]
        if any(self._agreed):
            stop, pause, _ = self._agreed
            self.cursor.close(at_once=stop or pause)

    # Waiting.

    @property
    def waiting(self) -> set[int]:
        """Workers that wait for a lease."""
        return set(self._draws)

    def awaited(self) -> set[int]:
        """Workers that keep other workers waiting for a lease."""
        members = self._members
        if not set(self._draws) - members.serve_only:
            return set()
        if self.inquiry is not None:
            return set(self.inquiry.unheard)
        if self._segment.rules.wait and not self._may_lend():
            return set(members.training)
        if self.cursor.drained:
            return set(members.live)
        return self.cursor.owners if self.cursor.exhausted else set()

    # After a restart.

    def restored(self) -> None:
        """This server was restored: where leases have unequal lengths, find out what is applied before any is lent."""
        if self._segment.seed.by_speed:
            self.inquiry = Inquiry(self._members.live, self._outbox, self._lend_again)
            self.inquiry.proceed()

    def _lend_again(self, edges: set[int]) -> None:
        self.cursor.cut_at(edges | self._segment.store.edges())
        self.inquiry = None
        self.serve()

    def heard(self, worker: int, holds: Sequence[int], size: int = 0) -> None:
        """Tell a restored server which leases a worker really has; `size`: samples of the lease."""
        if self._segment.store.restored:
            self.cursor.heard_of(worker, holds, size)
            if self.inquiry is not None:
                self.inquiry.heard(worker)
