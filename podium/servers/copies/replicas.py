"""Copies of a server on its neighbours, which follow update by update.

Replication comes after aggregation: an update's gradients are sent on once, and the neighbour moves its copy the same
way, to the same bits (Li et al., OSDI 2014). A worker is answered once the copies have caught up, so no update that it
has seen can be lost with one server. Server m is copied to the `replicas - 1` servers after it, in a ring;
`replica_keeper.py` is the other side.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from podium.errors import Lost
from podium.servers.applied import Span, joined
from podium.servers.copies.server_state import as_tensor, counts_of, head_of, state_of
from podium.servers.wire.messages import Mirror, Mirrored, MirrorParcel, MirrorSeed
from podium.servers.wire.parcels import START, Place, cut, parcel_bytes

if TYPE_CHECKING:
    from podium.comm.base import Message, Meta
    from podium.servers.outbox import Outbox
    from podium.servers.segment import Segment


class _Later(NamedTuple):
    """An update of a unit that the copies already have, to be sent once they have all parcels."""

    mirror: Mirror
    grads: list[Tensor]


class Replicas:
    """Updates the copies of this server."""

    def __init__(self, outbox: Outbox, replicas: int) -> None:
        self._outbox, self._replicas = outbox, replicas
        self._segment: Segment | None = None
        self.sent = self.acknowledged = 0
        """Numbers of the last update that was sent to the copies, and of the last that all of them have."""
        self.life = int.from_bytes(os.urandom(6))
        """Distinguishes this server from the one it replaces, whose acknowledgements it must ignore."""
        self.acks: dict[int, int] = {}
        """By holder: the number up to which its copy has followed."""
        self._whole_at = 0  # the number of the last parcel
        self._place: Place | None = None  # where the next parcel to the copies begins; None: all were sent
        self._later: list[_Later] = []
        self._parcel_acks: set[int] = set()  # holders from which the last parcel's acknowledgement is missing
        self.place()

    def place(self) -> None:
        """Find the servers that hold copies of this one, in the present segment."""
        servers, rank = self._outbox.servers, self._outbox.rank
        self.holders: list[int] = []
        if self._replicas > 1 and rank in servers:
            at = servers.index(rank)
            self.holders = [servers[(at + n) % len(servers)] for n in range(1, min(self._replicas, len(servers)))]

    def attach(self, segment: Segment) -> None:
        """A segment begins; its parameters and optimizer state are not loaded yet."""
        self._segment = segment

    def begin(self, segment: Segment) -> None:
        """The segment's state is loaded: send it to the copies, in one message or in parcels, one at a time.

        If all parcels were sent at once, two servers that copy each other could fill each other's inbox and deadlock.
        """
        if not self.holders:
            return
        self._place, self._later, self._parcel_acks = None, [], set()
        if segment.store.shard.fits(parcel_bytes(self._outbox.comm)):
            self.sent += 1
            return self._send(MirrorSeed(self.life, self.sent), [as_tensor(state_of(segment))])
        self.sent += 1  # the number of the last parcel: an answer that waits for it waits for all parcels
        self._whole_at, self._place = self.sent, START
        self._send(MirrorSeed(self.life, parcels=True), [as_tensor(head_of(segment))])
        self._send_parcel()

    def _send_parcel(self) -> None:
        assert self._place is not None and self._segment is not None
        store = self._segment.store
        store.threads.settle()
        most = parcel_bytes(self._outbox.comm)
        parcel = cut(store.shard.dump_unit, len(store.shard.units), self._place, most)
        units = [unit for unit, *_ in parcel.meta["units"]]
        moved = [[u, store.versions[u], store.recorded[u], store.applied[u].plain()] for u in units]
        self._place, self._parcel_acks = parcel.next, set(self.holders)
        number = self._whole_at if parcel.next is None else 0
        facts = {**parcel.meta, **counts_of(self._segment)}
        self._send(MirrorParcel(moved=moved, life=self.life, number=number, **facts), parcel.body)
        if self._place is None:
            later, self._later = self._later, []
            for mirror, grads in later:
                self._send(mirror, grads)

    def moved(
        self, unit: int, grads: Sequence[Tensor], options: Sequence[Meta], unused: Sequence[int], spans: Sequence[Span]
    ) -> None:
        """A unit was moved by gradients over these samples: send the update to the copies."""
        if not self.holders:
            return
        assert self._segment is not None
        if self._place is not None and unit >= self._place[0]:  # the copies do not have it yet, …
            if unit == self._place[0] and self._place[1] > 0:  # … or only half of it, of the old version: send it again
                self._place = unit, 0
            return
        self.sent += 1
        store = self._segment.store
        mirror = Mirror(
            unit=unit,
            options=list(options),
            unused=list(unused),
            spans=joined(spans),
            version=store.versions[unit],
            recorded=store.recorded[unit],
            life=self.life,
            number=self.sent,
            **counts_of(self._segment),
        )
        if self._place is None:
            self._send(mirror, grads)
        else:  # the copies have this unit: send the update after the last parcel
            self._later.append(_Later(mirror, [g.clone() for g in grads]))

    def _send(self, word: Any, body: Sequence[Tensor]) -> None:
        for holder in self.holders:
            try:
                self._outbox.send(holder, word, body)
            except Lost:  # it is being replaced, and will be seeded again
                self.acks[holder] = self.sent
                self._parcel_acks.discard(holder)
        self._count()

    def _count(self) -> None:
        self.acknowledged = min((self.acks.get(h, 0) for h in self.holders), default=self.sent)

    # Acknowledgements.

    def mirrored(self, message: Message, word: Mirrored) -> None:
        holder = message.source
        if word.life != self.life:
            return  # it acknowledges what the lost server sent that this one replaces
        self._parcel_acks.discard(holder)
        self.acks[holder] = max(self.acks.get(holder, 0), word.number)
        self._proceed()

    def departed(self, server: int) -> None:
        """A neighbour is gone: no answer waits for its copy."""
        if server in self.holders:
            self.acks[server] = self.sent
            self._parcel_acks.discard(server)
            self._proceed()

    def renew(self, server: int) -> None:
        """A neighbour was restored: if it holds a copy of this server, send the copy again."""
        if server in self.holders and self._segment is not None:
            self.begin(self._segment)

    def _proceed(self) -> None:
        """An acknowledgement has arrived, or never will."""
        while self._place is not None and not self._parcel_acks:
            self._send_parcel()
        self._count()
        if self._segment is not None:
            self._segment.policy.acknowledged()
