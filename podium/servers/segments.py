"""The present segment of a server, and the change to the next one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.errors import Lost
from podium.servers.copies.restart_inquiry import Questions
from podium.servers.gate import Rules
from podium.servers.segment import Parts, Segment
from podium.servers.wire.messages import Seed

if TYPE_CHECKING:
    from podium.comm.base import Communicator


class Segments:
    """Makes a segment of every seed."""

    def __init__(self, comm: Communicator, parts: Parts, *, takes_gradients: bool) -> None:
        """`takes_gradients`: the task's optimizer will run here in some segment, so raise now if it cannot."""
        self._comm, self.parts = comm, parts
        self.questions = Questions(parts.members, parts.store, parts.outbox)
        self._is_new = False
        nothing = Seed(
            workers=comm.workers,
            servers=comm.servers,
            addresses=(),
            rules=Rules().to_dict(),
            samples=1,
            position=0,
            end=0,
            batch_size=1,
            unit_bytes=8 << 20,
            leases=False,
            outer=None if takes_gradients else {},
        )
        parts.store.begin(comm.rank, nothing, copied=False)
        self.present = Segment(parts, nothing, begun=False)

    def begin(self, seed: Seed) -> Segment:
        """Begin the seed's segment; parameters and optimizer state are loaded separately."""
        comm, parts, rank = self._comm, self.parts, self._comm.rank
        parts.store.threads.settle()
        self._is_new = False
        parts.outbox.begin(seed)
        parts.replicas.place()
        parts.store.begin(rank, seed, copied=bool(parts.replicas.holders))
        parts.members.begin(seed.workers, seed.serving or ())
        parts.records.begin(seed.workers, len(parts.store.shard.units))
        self.questions.clear()
        self.present = Segment(parts, seed._replace(state=None, at=None, units=(), next=None))
        parts.replicas.attach(self.present)
        # A seed from a worker or a copy may have the old address of a server that was replaced: that server itself
        # announces its new address.
        known, servers = comm.addresses, parts.outbox.servers
        comm.introduce({rank: where for rank, where in seed.addresses if rank not in servers or rank not in known})
        comm.watch(parts.members.present)  # also workers that may depart before they send a message
        return self.present

    def restored(self) -> None:
        """This server replaces a lost one: until a worker sends a request, its segment may be over."""
        self._is_new = True

    def is_asked(self) -> None:
        """A worker sent a request that is only sent during a segment."""
        self._is_new = False

    @property
    def is_idle(self) -> bool:
        """Whether no segment of training is under way here."""
        return not self.present.begun or self._is_new or self.parts.members.all_through

    def need_seed(self) -> None:
        if not self.present.begun:
            raise Lost(f"server {self._comm.rank} was lost before there was a copy of it")
