"""The beginning of a segment: workers send parameters, optimizer state and the segment's settings to the servers."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from torch import Tensor

from podium.errors import Lost
from podium.servers.wire.messages import Seed, SeedReply, Skip, decode, encode
from podium.servers.wire.moments import pack
from podium.servers.wire.parcels import MOST_TENSORS, START, Kept, Place, cut, parcel_bytes, place_of
from podium.servers.worker_side.served import UNIT_BYTES, Served

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message, Meta
    from podium.engine.worker import Worker
    from podium.servers.gate import Rules
    from podium.servers.ranges import Layout
    from podium.servers.worker_side.optimizer_states import States


def seed_for(worker: Worker, rules: Rules, unit_bytes: int = UNIT_BYTES) -> Seed:
    """A seed with the default settings of a segment; a strategy replaces fields."""
    comm, progress = worker.comm, worker.progress
    return Seed(
        workers=list(comm.workers),
        servers=list(comm.servers),
        addresses=[list(item) for item in comm.addresses.items()],
        rules=rules.to_dict(),
        samples=progress.samples,
        position=worker.position,
        end=progress.horizon,
        batch_size=progress.batch_size,
        unit_bytes=unit_bytes,
        parts=min(comm.size, progress.batch_size),
    )


def seeded_here(worker: Worker, colocated: bool, hosts: int = 0) -> list[int]:
    """Indices of the servers that this worker seeds: of colocated servers, those in its own process.

    All replicas are equal when a segment begins, so a switch of strategy moves no model over the network. Where a
    server's worker is gone, another one seeds it. Workers divide dedicated servers among them, so that no link carries
    the whole model. `hosts`: this many workers, the last ones, have servers beside them; 0: all.
    """
    comm = worker.comm
    if not colocated:
        return [m for m in range(len(comm.servers)) if m % comm.size == comm.index]
    first = min(comm.servers)  # the run began with this many workers, numbered before the servers
    hosts = min(hosts or first, first)
    seeders = []
    for m, server in enumerate(comm.servers):
        beside = first - hosts + (server - first) % hosts
        seeders.append(beside if beside in comm.workers else comm.workers[m % comm.size])
    return [m for m, rank in enumerate(seeders) if rank == comm.rank]


def seed_together(worker: Worker, served: Served, places: Collection[int], seed: Seed, states: States) -> None:
    """Seed the servers at these indices, and wait until all workers have seeded theirs. Collective."""
    comm = worker.comm
    try:
        named = seed._replace(segment=list(worker.progress.segment), codec=worker.sender.push[0])
        senders = [_SeedSender(worker, comm.servers[m], served.layouts[m], named, states) for m in places]
        while under_way := [sender for sender in senders if not sender.over]:
            answers = comm.wait(*[sender.call() for sender in under_way])
            for sender, answer in zip(under_way, answers, strict=True):
                assert answer is not None
                sender.heard(answer)
        comm.barrier()
    except Lost:
        # Other workers may be training already: they must not wait for this one.
        comm.wait(*(comm.call(server, "skip", encode(Skip())) for server in comm.servers))
        raise


class _SeedSender:
    """Sends one server its parameters and optimizer state, in one message or in several."""

    def __init__(self, worker: Worker, server: int, layout: Layout, seed: Seed, states: States) -> None:
        self._worker, self._server, self._layout, self._seed, self._states = worker, server, layout, seed, states
        self._dtypes = [p.dtype for p in worker.params]
        self._most = parcel_bytes(worker.comm)
        self._place: Place | None = START
        self._in_parts = False

    @property
    def over(self) -> bool:
        return self._place is None

    def call(self) -> Handle:
        """Send the next message."""
        whole = None if self._in_parts else self._whole()
        if whole is not None:
            state, body = whole
            return self._worker.comm.call(self._server, "seed", encode(self._seed._replace(**state)), body)
        assert self._place is not None
        self._in_parts = True
        parcel = cut(self._unit, len(self._layout.units), self._place, self._most)
        return self._worker.comm.call(self._server, "seed", encode(self._seed._replace(**parcel.meta)), parcel.body)

    def heard(self, answer: Message) -> None:
        """The server's answer says where to continue: from the start, if it was replaced meanwhile."""
        self._place = place_of(decode(SeedReply, answer).expects)

    def _whole(self) -> tuple[Meta, list[Tensor]] | None:
        """Header and body of the whole state, if it fits into one message; otherwise None."""
        ranges = self._layout.ranges
        params = [r.of(self._worker.params) for r in ranges]
        if sum(p.nbytes for p in params) > self._most:
            return None
        names, state = pack(ranges, self._states(ranges), self._dtypes)
        body = [*params, *state]
        fits = sum(t.nbytes for t in body) <= self._most and len(body) <= MOST_TENSORS
        return (names, body) if fits else None

    def _unit(self, unit: int) -> Kept:
        ranges = self._layout.units[unit].of(self._layout.ranges)
        kinds, state = pack(ranges, self._states(ranges), self._dtypes)
        return Kept([r.of(self._worker.params) for r in ranges], kinds, state)
