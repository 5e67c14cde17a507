"""What the first server must find out after a restart before it lends again, where leases have unequal lengths.

Its copy may be older than the last leases that the lost server lent. Where a global step is always cut the same way, a
lease that is lent again has the same name and samples, and each server recognises whether it has applied it. With
`steps=speed` the same samples may be in leases of another length, and a server that has applied half of such a lease
can neither apply it nor skip it. So no new lease may cross the edge of one that a worker has or had:

    workers   name the lease that they hold with their next push or draw; a lost worker names none
    servers   are asked after the workers, because only then do they have all earlier pushes; each answers where the
              samples that it has applied begin and end, once it knows of the same losses

Until all have answered, nothing is lent. That takes as long as the lease of the slowest worker.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, final

from podium.servers.wire.messages import Edges, Which

if TYPE_CHECKING:
    from podium.servers.members import Members
    from podium.servers.outbox import Outbox
    from podium.servers.store import Store


@final
class Inquiry:
    """The restored first server's open questions."""

    def __init__(self, workers: Iterable[int], outbox: Outbox, over: Callable[[set[int]], None]) -> None:
        """`over` is called once all have answered, with the edges of the samples that other servers have applied."""
        self._outbox, self._over = outbox, over
        self._question = 0  # how often the servers were asked; only answers to the last question count
        self._lost: set[int] = set()  # workers that were lost since the restart: other servers may have their pushes
        self._workers, self._servers = set(workers), set(outbox.others)  # that have not answered yet
        self._to_be_asked = True
        self._edges: set[int] = set()

    @property
    def unheard(self) -> frozenset[int]:
        """Workers that the server waits for."""
        return frozenset(self._workers)

    def proceed(self) -> None:
        """Ask the servers once all workers have answered, and end once all servers have."""
        if not self._workers and self._to_be_asked:
            self._question += 1
            self._servers, self._to_be_asked = set(self._outbox.others), False
            for server in sorted(self._servers):
                self._ask(server)
        if not self._workers and not self._servers and not self._to_be_asked:
            self._over(self._edges)

    def _ask(self, server: int) -> None:
        self._outbox.tell(server, Which(self._question, sorted(self._lost)))

    def heard(self, worker: int) -> None:
        """A worker has named the lease that it holds."""
        self._workers.discard(worker)
        self.proceed()

    def lose(self, worker: int) -> None:
        """A worker is gone. It may have pushed to servers after they answered: ask them again."""
        self._workers.discard(worker)
        self._lost.add(worker)
        self._to_be_asked = True
        self.proceed()

    def answered(self, server: int, edges: Edges) -> None:
        """A server has answered where the samples that it has applied begin and end."""
        self._edges |= set(edges.edges)
        if edges.question == self._question:
            self._servers.discard(server)
        self.proceed()

    def restored(self, server: int) -> None:
        """Another server was restored, too: it has not received the question."""
        if self._question:
            self._ask(server)


@final
class Questions:
    """The other side: questions of a restored first server that this one has not answered yet."""

    def __init__(self, members: Members, store: Store, outbox: Outbox) -> None:
        self._members, self._store, self._outbox = members, store, outbox
        self._asked: list[tuple[int, Which]] = []

    def clear(self) -> None:
        """A segment begins: drop questions about the last one."""
        self._asked.clear()

    def ask(self, server: int, question: Which) -> None:
        self._asked.append((server, question))
        self.answer()

    def answer(self) -> None:
        """Answer, once this server knows the losses that the first one knows: then it has all their pushes.

        A worker that broke out counts as lost, but is alive: it reports that, or that it leaves, to each server itself.
        """
        waiting, self._asked = self._asked, []
        for server, question in waiting:
            if set(question.lost).intersection(self._members.workers) <= self._members.silent:
                self._outbox.tell(server, Edges(question.question, sorted(self._store.edges())))
            else:
                self._asked.append((server, question))
