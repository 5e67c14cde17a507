"""What the first server must know after a restart before it lends again, where leases are of unequal length.

Its copy may be older than the last leases that its predecessor lent. Where a global step is always cut alike, a lease
that is lent once more has the name and the samples that it had before, and each server sees that it has applied it.
With `steps=speed` the same samples may come in leases of another length, and a server that has applied half of one can
neither apply it nor leave it out. So no new lease may reach over the edge of one that somebody has or has had:

    the workers     are heard of with their next push or draw, which names what they hold; a lost one says nothing more
    the servers     say where the samples that they have applied begin and end, once they know of the same losses

Until all have been heard of, nothing is lent. That takes as long as the lease of the slowest worker.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final


@final
class Inquiry:
    """Who has to be heard of."""

    def __init__(self, workers: Iterable[int], servers: Iterable[int]) -> None:
        self.question = 0
        """How often the servers were asked; only answers to the last time count."""
        self.lost: set[int] = set()
        """Workers that were lost since the restart: what they have pushed, other servers may know."""
        self._workers, self._all_servers = set(workers), frozenset(servers)
        self._servers: set[int] = set()
        self._edges: set[int] = set()

    @property
    def over(self) -> bool:
        return not self._workers and not self._servers and self.question > 0

    @property
    def unheard(self) -> frozenset[int]:
        """Workers that are waited for."""
        return frozenset(self._workers)

    @property
    def servers(self) -> list[int]:
        return sorted(self._all_servers)

    def ask(self) -> None:
        """The servers are asked, again."""
        self.question += 1
        self._servers = set(self._all_servers)

    def heard(self, worker: int) -> None:
        self._workers.discard(worker)

    def lose(self, worker: int) -> bool:
        """A worker is gone; whether the servers have to be asked again, as it may have pushed to them in between."""
        unknown = worker in self._workers
        self._workers.discard(worker)
        self.lost.add(worker)
        return unknown

    def answered(self, server: int, question: int, edges: Sequence[int]) -> None:
        """What a server has applied begins and ends here."""
        self._edges |= set(edges)
        if question == self.question:
            self._servers.discard(server)

    def edges(self) -> set[int]:
        return self._edges
