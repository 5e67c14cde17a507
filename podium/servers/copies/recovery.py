"""Restores a lost server in a new process, from the nearest copy."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from podium.engine.files import bytes_to_tree
from podium.errors import CommError, Lost
from podium.servers.copies.server_state import load
from podium.servers.wire.messages import Hello, Replica, ReplicaState, Seed, decode, encode
from podium.servers.wire.parcels import Assembly, Place

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Message
    from podium.servers.copies.replica_keeper import ReplicaKeeper
    from podium.servers.segments import Segments


class _Found(NamedTuple):
    """A copy of the lost server."""

    state: Any | None
    """None where the lost server had not been seeded yet."""
    where: str
    holder: int | None = None
    """The server that has the tensors, where they must still be fetched."""


class Recovery:
    """Restores one server."""

    def __init__(self, comm: Communicator, segments: Segments, keeper: ReplicaKeeper) -> None:
        self._comm, self._segments, self._parts, self._keeper = comm, segments, segments.parts, keeper
        self.early: deque[Message] = deque()
        """Messages that arrived meanwhile, to be processed once this server is restored."""

    def restore(self) -> str:
        """Restore the lost server; returns from which copy. Raises `Lost` where there is none."""
        parts, found = self._parts, self._find()
        if found.state is None:
            self._comm.watch(parts.members.workers)  # they only know the lost server's address, and may end silently
            return found.where
        segment = self._segments.begin(Seed(**found.state["seed"]))
        if found.holder is None:
            load(parts.store.shard, found.state)
        else:
            self._fetch(found.holder)
        facts = found.state["facts"]
        parts.store.restore(facts)
        parts.snapshots.restored(parts.store.updates)
        if segment.lending is not None and facts["cursor"] is not None:
            segment.lending.cursor.load(facts["cursor"])
        self._segments.restored()
        for other in parts.outbox.others:
            parts.outbox.tell(other, Hello())
        if segment.lending is not None:
            segment.lending.restored()
        parts.replicas.begin(segment)
        parts.snapshots.begin(segment)
        return found.where

    def _find(self) -> _Found:
        rank, holders, snapshots = self._comm.rank, self._parts.replicas.holders, self._parts.snapshots
        for holder in holders:
            try:
                answer = self._ask(holder)
            except CommError:  # it was lost too, and its replacement has no copy
                continue
            if answer is not None and answer.body:
                where = f"replica at {holder}"
                state = bytes_to_tree(answer.body[0].numpy().data, where)
                return _Found(state, where, holder if decode(ReplicaState, answer).parcels else None)
        state = snapshots.read()
        if state is not None:
            return _Found(state, "snapshot")
        if snapshots.every:  # a segment begins with a snapshot
            return _Found(None, "nothing: it was not in use yet")
        who = ", ".join(map(str, holders))
        why = f"server {who}, which kept a replica, was lost too" if who else "replicas is 1"
        raise Lost(f"server {rank} was lost and there is no copy of it: {why}, and snapshot_every is 0")

    def _fetch(self, holder: int) -> None:
        """Load a neighbour's copy of this server, parcel by parcel."""
        assembly = Assembly()
        while assembly.expects is not None:
            answer = self._ask(holder, assembly.expects)
            parcel = None if answer is None else decode(ReplicaState, answer)
            if answer is None or parcel is None or parcel.at is None:
                raise Lost(f"server {self._comm.rank}: its copy at server {holder} was lost before all of it arrived")
            for unit, kept in assembly.take(parcel, answer.body):
                self._parts.store.shard.load_unit(unit, kept)

    def _ask(self, holder: int, place: Place | None = None) -> Message | None:
        """Request this server's replica, or the parcel of it that begins at this place.

        Meanwhile, requests of other restored servers are answered: two that were lost together must not wait for each
        other. All other messages wait until this server is restored.
        """
        comm = self._comm
        call = comm.call(holder, "replica", encode(Replica(place)))
        until = time.monotonic() + comm.deadline_s
        while not call.done:
            message = comm.poll(call, deadline_s=max(0.0, until - time.monotonic()))
            if message is not None and message.kind == "replica":
                self._keeper.give(message, decode(Replica, message))
            elif message is not None:
                self.early.append(message)
        (answer,) = comm.wait(call)
        return answer
