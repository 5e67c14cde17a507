"""Samples that a server leases to one worker of an asynchronous strategy."""

from __future__ import annotations

from podium.servers.leases.lease import NO_LEASE, Lease, NoLease


class Leases:
    """The next lease of one worker, and the last one to report as applied."""

    def __init__(self) -> None:
        self.next: Lease | NoLease | None = None
        """What to train on next, once a server has sent it."""
        self._applied = NO_LEASE

    @property
    def end(self) -> int:
        """The position behind the last sample that this worker has leased and not begun; 0 where there is none."""
        return self.next.end if isinstance(self.next, Lease) else 0

    def put(self, lease: Lease | NoLease | None) -> None:
        """Store the lease of a server's answer, if it had one."""
        self.next = lease

    def take(self) -> Lease | NoLease | None:
        lease, self.next = self.next, None
        return lease

    def applied(self, number: int) -> None:
        """All servers have applied this lease; the next message to the first server reports it."""
        self._applied = number

    def take_applied(self) -> int:
        """The lease to report as applied, once; -1 where there is none."""
        number, self._applied = self._applied, NO_LEASE
        return number

    @property
    def last_applied(self) -> int:
        """The lease to report as applied; unlike `take_applied`, it stays."""
        return self._applied

    def clear(self) -> None:
        self.next, self._applied = None, NO_LEASE
