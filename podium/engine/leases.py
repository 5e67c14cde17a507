"""Samples that a server lends to one worker, where workers do not go through global steps together."""

from __future__ import annotations

from podium.servers.leases.lease import NO_LEASE, Lease, NoLease


class Leases:
    """What one worker was lent, and what it has to give back as done."""

    def __init__(self) -> None:
        self.next: Lease | NoLease | None = None
        """What to train on next, where a server has said so already."""
        self._applied = NO_LEASE

    @property
    def end(self) -> int:
        """The position behind the last sample that this worker was lent and has not begun; 0 where there is none."""
        return self.next.end if isinstance(self.next, Lease) else 0

    def put(self, lease: Lease | NoLease | None) -> None:
        """A server's answer named what to train on next, or nothing."""
        self.next = lease

    def take(self) -> Lease | NoLease | None:
        lease, self.next = self.next, None
        return lease

    def applied(self, number: int) -> None:
        """All servers have applied this lease; the next message says so to the server that lent it."""
        self._applied = number

    def take_applied(self) -> int:
        """The lease to give back as done, once; -1 where there is none."""
        number, self._applied = self._applied, NO_LEASE
        return number

    @property
    def last_applied(self) -> int:
        """The lease to give back as done, as often as a message says so."""
        return self._applied

    def clear(self) -> None:
        """Nothing is lent, and nothing is to be given back."""
        self.next, self._applied = None, NO_LEASE
