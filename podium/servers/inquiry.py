"""What the first server must know after a restart before it lends again, where leases are of unequal length.

Its copy may be older than the last leases that its predecessor lent. Where a global step is always cut alike, a lease
that is lent once more has the name and the samples that it had before, and each server sees that it has applied it.
With `steps=speed` the same samples may come in leases of another length, and a server that has applied half of one can
neither apply it nor leave it out. So no new lease may reach over the edge of one that somebody has or has had:

    the workers     are heard of with their next push or draw, which names what they hold; a lost one says nothing more
    the servers     are asked then, for only then have they all that was pushed before; they say where the samples that
                    they have applied begin and end, once they know of the same losses

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
        self._to_be_asked = True
        self._edges: set[int] = set()

    @property
    def over(self) -> bool:
        return not self._workers and not self._servers and not self._to_be_asked

    @property
    def is_due(self) -> bool:
        """Whether the servers are to be asked now."""
        return not self._workers and self._to_be_asked

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
        self._servers, self._to_be_asked = set(self._all_servers), False

    def heard(self, worker: int) -> None:
        self._workers.discard(worker)

    def lose(self, worker: int) -> None:
        """A worker is gone. It may have pushed to servers that were asked before: they have to be asked again."""
        self._workers.discard(worker)
        self.lost.add(worker)
        self._to_be_asked = True

    def answered(self, server: int, question: int, edges: Sequence[int]) -> None:
        """What a server has applied begins and ends here."""
        self._edges |= set(edges)
        if question == self.question:
            self._servers.discard(server)

    def edges(self) -> set[int]:
        return self._edges
