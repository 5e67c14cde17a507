"""A server receives its state with a seed, and returns it when all workers have left: in one message, or in parcels.

A seed waits while a worker still collects the last segment's state: otherwise that worker would collect the state that
a faster one has just seeded.
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
    """Loads seeds, and sends states."""

    def __init__(self, segments: Segments, begun: Callable[[], None]) -> None:
        """`begun`: called once a segment has begun here."""
        self._segments, self._begun = segments, begun
        self._members, self._outbox, self._store = segments.parts.members, segments.parts.outbox, segments.parts.store
        self._taking: set[int] = set()  # workers that collect this server's state, parcel by parcel
        self._waiting: list[tuple[Message, Seed]] = []  # seeds that wait for them
        self._assembly: Assembly | None = None  # of a seed that arrives in parcels

    # In.

    def seed(self, message: Message, seed: Seed) -> None:
        name, mine = seed.segment, self._outbox.segment
        if name is not None and mine is not None and name[0] != mine[0]:
            self._taking.clear()  # all regrouped meanwhile: no worker requests the rest
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
        """A part of a seed. Where it is not the next part, the worker is answered where to continue."""
        at = place_of(seed.at)
        if at == START:
            self._segments.begin(seed)
            self._assembly = Assembly()
        if self._assembly is None or self._assembly.expects != at:  # this server replaces one that was lost meanwhile
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
            self._segments.present.lose(worker)  # the seed lists it, but it had departed before
        self._begun()

    # Out.

    def let_go(self) -> None:
        """Once every worker has left, send them the state."""
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
        """Calls of the workers that have left. Each server starts with another one, so that no link is jammed."""
        left, servers, rank = self._members.left, self._outbox.servers, self._outbox.rank
        waiting = [left[worker] for worker in sorted(left)]
        first = (servers.index(rank) if rank in servers else 0) % len(waiting)
        return waiting[first:] + waiting[:first]

    def _parcel(self, place: Place) -> Parcel:
        shard = self._store.shard
        return cut(shard.dump_unit, len(shard.units), place, parcel_bytes(self._outbox.comm))

    def take(self, message: Message, asked: Take) -> None:
        """A worker requests another part of the state."""
        place = place_of(asked.at)
        assert place is not None
        parcel = self._parcel(place)
        self._outbox.answer(message, State(**parcel.meta), parcel.body)
        if parcel.next is None:
            self.has_taken(message.source)

    def has_taken(self, worker: int) -> None:
        """A worker has the whole state, or will never request it: the next segment need not wait for it."""
        self._taking.discard(worker)
        if not self._taking:
            waiting, self._waiting = self._waiting, []
            for message, seed in waiting:
                self.seed(message, seed)
