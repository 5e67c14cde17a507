"""A server's state comes with a seed, and goes home when all workers have left: in one message, or in parcels.

A seed waits while some worker still takes the last segment's state home: otherwise that worker would take home what a
faster one has brought.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from podium.servers.wire.messages import Seed, SeedReply, State, Take
from podium.servers.wire.parcels import START, Assembly, Parcel, Place, cut, parcel_bytes, place_of

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.servers.segments import Segments


class StateTransfer:
    """Seeds in, states out."""

    def __init__(self, segments: Segments, begun: Callable[[], None]) -> None:
        """`begun`: called once a segment has begun here, before the worker that brought the seed is answered."""
        self._segments, self._begun = segments, begun
        self._members, self._outbox, self._store = segments.parts.members, segments.parts.outbox, segments.parts.store
        self._taking: set[int] = set()  # workers that are taking this server's state home, part by part
        self._waiting: list[tuple[Message, Seed]] = []  # seeds that wait for them
        self._assembly: Assembly | None = None  # of a seed that is coming in parts

    # In.

    def seed(self, message: Message, seed: Seed) -> None:
        name, mine = seed.segment, self._outbox.segment
        if name is not None and mine is not None and name[0] != mine[0]:
            self._taking.clear()  # all regrouped meanwhile: nobody takes the rest
        self._taking.discard(message.source)
        if self._taking:
            self._waiting.append((message, seed))
        elif seed.at is not None:
            self._seed_parcel(message, seed)
        else:
            self._assembly = None
            self._segments.begin(seed)
            if not seed.lends_only:
                ranges = len(self._store.shard.ranges)
                self._store.shard.load(message.body[:ranges], {"state": seed.state}, message.body[ranges:])
            self._has_begun(message)

    def _seed_parcel(self, message: Message, seed: Seed) -> None:
        """A part of a seed. Where it does not follow on what is here, the worker is told where to continue."""
        at = place_of(seed.at)
        if at == START:
            self._segments.begin(seed)
            self._assembly = Assembly()
        if self._assembly is None or self._assembly.expects != at:  # this server is new in its lost predecessor's place
            return self._outbox.answer(message, SeedReply(START))
        for unit, kept in self._assembly.take(seed, message.body):
            self._store.shard.load_unit(unit, kept)
        if self._assembly.expects is not None:
            return self._outbox.answer(message, SeedReply(self._assembly.expects))
        self._assembly = None
        self._has_begun(message)

    def _has_begun(self, message: Message) -> None:
        parts, segment = self._segments.parts, self._segments.present
        parts.replicas.begin(segment)
        parts.snapshots.begin(segment)
        self._outbox.answer(message, SeedReply())
        for worker in sorted(self._members.gone.intersection(self._members.workers)):
            self._segments.present.lose(worker)  # the seed counts on it, and it was gone before
        self._begun()

    # Home.

    def let_go(self) -> None:
        """Once every worker has left, let them take everything home."""
        if not self._members.all_left or not self._segments.present.policy.settle():
            return
        self._store.threads.settle()
        segment, body, reply = self._segments.present, [], State(empty=True)
        if segment.begun and not segment.seed.lends_only:
            if self._store.shard.fits(parcel_bytes(self._outbox.comm)):
                kinds, moments = self._store.shard.dump()
                reply, body = State(workers=self._members.present, **kinds), [*self._store.shard.params, *moments]
            else:
                parcel = self._parcel(START)
                reply, body = State(workers=self._members.present, **parcel.meta), parcel.body
                self._taking |= set(self._members.left) if parcel.next is not None else set()
        for waiting in self._in_turn():
            self._outbox.answer(waiting, reply, body)
        self._members.let_go()

    def _in_turn(self) -> list[Message]:
        """Who wants to go home, each server beginning with another: were all to serve one first, its link would jam."""
        left, servers, rank = self._members.left, self._outbox.servers, self._outbox.rank
        waiting = [left[worker] for worker in sorted(left)]
        first = (servers.index(rank) if rank in servers else 0) % len(waiting)
        return waiting[first:] + waiting[:first]

    def _parcel(self, place: Place) -> Parcel:
        shard = self._store.shard
        return cut(shard.dump_unit, len(shard.units), place, parcel_bytes(self._outbox.comm))

    def take(self, message: Message, asked: Take) -> None:
        """A worker takes another part of the state home."""
        place = place_of(asked.at)
        assert place is not None
        parcel = self._parcel(place)
        self._outbox.answer(message, State(**parcel.meta), parcel.body)
        if parcel.next is None:
            self.has_taken(message.source)

    def has_taken(self, worker: int) -> None:
        """A worker has everything, or will never ask for it: the next segment need not wait for it."""
        self._taking.discard(worker)
        if not self._taking:
            waiting, self._waiting = self._waiting, []
            for message, seed in waiting:
                self.seed(message, seed)
