"""Holds copies of other servers, from which a lost one is restored. `replicas.py` is the other side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from podium.engine.files import bytes_to_tree
from podium.servers.applied import Applied
from podium.servers.copies.server_state import as_tensor, dump, load
from podium.servers.wire.messages import (
    Mirror,
    Mirrored,
    MirrorParcel,
    MirrorSeed,
    Name,
    Replica,
    ReplicaState,
    Seed,
    seed_of_copy,
)
from podium.servers.wire.parcels import Assembly, cut, parcel_bytes, place_of

if TYPE_CHECKING:
    from podium.comm.base import Message, Meta
    from podium.servers.outbox import Outbox
    from podium.servers.shard import Shard
    from podium.servers.store import Store


class Copy:
    """Another server's shard, kept in step with it."""

    def __init__(self, shard: Shard, seed: Seed, facts: Meta, *, in_parcels: bool) -> None:
        self.shard, self.seed, self.facts = shard, seed, facts
        self._assembly = Assembly() if in_parcels else None  # parcels so far: usable as a copy once all have arrived

    @property
    def is_whole(self) -> bool:
        return self._assembly is None

    def take(self, parcel: MirrorParcel, message: Message) -> None:
        """A part of the state has arrived."""
        if self._assembly is None:
            return
        for unit, kept in self._assembly.take(parcel, message.body):
            self.shard.load_unit(unit, kept)
        for unit, version, recorded, once in parcel.moved:
            self._count(unit, version, recorded)
            self.facts["once"][unit] = Applied.of(once)
        self.facts.update(updates=parcel.updates, cursor=parcel.cursor)
        if self._assembly.expects is None:
            self._assembly = None

    def follow(self, mirror: Mirror, message: Message) -> None:
        """Move a unit as its server did."""
        self.shard.step(mirror.unit, message.body, mirror.options, mirror.unused, mirror.version)
        self._count(mirror.unit, mirror.version, mirror.recorded)
        self.facts.update(updates=mirror.updates, cursor=mirror.cursor)
        for start, stop in mirror.spans:
            self.facts["once"][mirror.unit].add((start, stop))

    def _count(self, unit: int, version: int, recorded: int) -> None:
        self.facts["versions"][unit], self.facts["recorded"][unit] = version, recorded


class ReplicaKeeper:
    """The copies that one server holds."""

    def __init__(self, outbox: Outbox, store: Store) -> None:
        self._outbox, self._store = outbox, store
        self.copies: dict[int, Copy] = {}
        """By server."""

    def seed(self, message: Message, word: MirrorSeed) -> None:
        state = bytes_to_tree(message.body[0].numpy().tobytes(), f"state of server {message.source}")
        seed = Seed(**state["seed"])
        facts = {**state["facts"], "once": [Applied.of(plain) for plain in state["facts"]["once"]]}
        shard = self._store.make_shard(message.source, seed)
        self.copies[message.source] = Copy(shard, seed, facts, in_parcels=word.parcels)
        if not word.parcels:
            load(shard, state)
            self._acknowledge(message.source, word)

    def parcel(self, message: Message, word: MirrorParcel) -> None:
        copy = self._of(message.source, word.segment)
        if copy is not None:
            copy.take(word, message)
        self._acknowledge(message.source, word)

    def follow(self, message: Message, word: Mirror) -> None:
        copy = self._of(message.source, word.segment)
        if copy is not None:
            copy.follow(word, message)
        self._acknowledge(message.source, word)

    def _of(self, server: int, segment: Name | None) -> Copy | None:
        """The copy of a server; None where it is of another segment."""
        copy = self.copies.get(server)
        return copy if copy is not None and _same(copy.seed.segment, segment) else None

    def _acknowledge(self, server: int, word: MirrorSeed | MirrorParcel | Mirror) -> None:
        self._outbox.tell(server, Mirrored(word.number, word.life))

    def give(self, message: Message, asked: Replica) -> None:
        """A neighbour is being restored and requests its copy."""
        copy, outbox = self.copies.get(message.source), self._outbox
        if copy is None or not copy.is_whole:
            return outbox.answer(message, ReplicaState())
        most, at = parcel_bytes(outbox.comm), place_of(asked.at)
        if at is not None:
            parcel = cut(copy.shard.dump_unit, len(copy.shard.units), at, most)
            return outbox.answer(message, ReplicaState(**parcel.meta), parcel.body)
        facts = {**copy.facts, "once": [once.plain() for once in copy.facts["once"]]}
        state = {"seed": seed_of_copy(copy.seed), "facts": facts}
        if copy.shard.fits(most):
            return outbox.answer(message, ReplicaState(), [as_tensor({**state, **dump(copy.shard)})])
        outbox.answer(message, ReplicaState(parcels=True), [as_tensor(state)])


def _same(some: Sequence[int] | None, other: Sequence[int] | None) -> bool:
    return (None if some is None else list(some)) == (None if other is None else list(other))
