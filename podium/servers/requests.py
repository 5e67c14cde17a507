"""A server's handlers of workers' messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.servers.pushes.answers import PushRequest
from podium.servers.shard import unit_of
from podium.servers.wire.messages import (
    Bye,
    Done,
    Draw,
    Home,
    Leave,
    Probe,
    Pull,
    Push,
    Skip,
    State,
)

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.servers.segment import Segment
    from podium.servers.segments import Segments
    from podium.servers.transfer import StateTransfer


class WorkerRequests:
    """Handles workers' messages with the objects of the present segment."""

    def __init__(self, segments: Segments, transfer: StateTransfer) -> None:
        self._segments, self._transfer = segments, transfer
        self._members, self._outbox = segments.parts.members, segments.parts.outbox
        self._generation = 0  # of the workers, from the last `bye`

    @property
    def _segment(self) -> Segment:
        return self._segments.present

    def draw(self, message: Message, draw: Draw) -> None:
        segment = self._asked()
        segment.records.arrival(message)
        self._segments.need_seed()
        assert segment.lending is not None
        segment.lending.heard(message.source, ())
        segment.lending.draw(message, draw)

    def push(self, message: Message, push: Push) -> None:
        self._segments.need_seed()
        segment = self._asked()
        store = segment.store
        unit = unit_of(store.shard.units, push.unit)
        if not store.shard.by_rows(unit):
            message = store.codec.unpack(message, push.context, store.shard.units[unit].of(store.shard.ranges))
        segment.paces.hear(message.source, push)
        if store.restored:
            self._after_restore(message.source, push)
        segment.policy.push(PushRequest(message, push))
        if push.last and segment.lending is not None:
            segment.lending.pushed()

    def _after_restore(self, worker: int, push: Push) -> None:
        """Learn from a push which lease the worker has, and how many of the lost server's updates are missing."""
        segment = self._segment
        if segment.lending is not None:
            segment.lending.heard(worker, (push.lease,), push.size)
        lost = segment.store.newly_lost(push.unit, push.version)
        if lost:
            segment.records.lost_updates(push.unit, lost)

    def pull(self, message: Message, pull: Pull) -> None:
        segment = self._asked()
        segment.records.arrival(message)
        unit_of(segment.store.shard.units, pull.unit)
        self._heard(message.source, (pull.lease,), pull.size)
        unit, lease, size, version, last = pull
        segment.answers.give(PushRequest(message, Push(unit, lease, size, version, (), (), last=last)))

    def leave(self, message: Message, _: Leave) -> None:
        self._segments.is_asked()
        if message.source not in self._members.workers:  # it has joined since, and has nothing to collect
            return self._outbox.answer(message, State(empty=True))
        self._members.leave(message)
        self._heard(message.source, ())
        self._segments.questions.answer()
        self._segment.policy.leave(message.source)
        self._segment.serve_draws()
        self._transfer.let_go()

    def home(self, message: Message, home: Home) -> None:
        """A worker has the whole state, perhaps from the server that this one replaces: then all had left that one."""
        if list(home.segment) == self._outbox.segment:  # otherwise the next segment has begun here
            self._members.is_through(message.source)
        self._outbox.answer(message, Done())
        self._transfer.let_go()

    def skip(self, message: Message, skip: Skip) -> None:
        worker = message.source
        self._members.skip(worker, broke=skip.broke)
        self._heard(worker, ())  # first: leases that a restored server's copy still holds are lent again
        if skip.broke and self._segment.lending is not None:
            self._segment.lending.applied(skip.done, worker)
        self._transfer.has_taken(worker)
        self._segments.questions.answer()
        self._segment.lose(worker, note=not skip.broke)
        self._outbox.answer(message, Done())
        self._transfer.let_go()

    def bye(self, message: Message, bye: Bye) -> None:
        """A worker ends. Where no segment is under way, its list of workers is newer than this server's.

        A run may end before it has seeded its servers: a finished run that was resumed, a phase that was not reached.
        """
        if self._segments.is_idle and bye.generation >= self._generation:
            self._generation = bye.generation
            self._members.replace(bye.workers)

    def probe(self, message: Message, probe: Probe) -> None:
        self._outbox.answer(message, Done(), message.body if probe.back else ())

    def departed(self, rank: int) -> None:
        """A worker or another server is gone."""
        if rank in self._outbox.servers:
            return self._segments.parts.replicas.departed(rank)
        if rank in self._members.gone:
            return
        self._members.depart(rank)
        self._transfer.has_taken(rank)
        self._segments.questions.answer()
        if self._members.forget(rank):
            self._segment.lose(rank)
        self._transfer.let_go()

    def _asked(self) -> Segment:
        self._segments.is_asked()
        return self._segment

    def _heard(self, worker: int, holds: Sequence[int], size: int = 0) -> None:
        if self._segment.lending is not None:
            self._segment.lending.heard(worker, holds, size)
