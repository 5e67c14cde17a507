"""Decisions of the first server: which pushes make the next update, which are dropped, which workers are answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from podium.servers.gate import Gathering, Push
from podium.servers.wire.messages import Decision, Key

if TYPE_CHECKING:
    from podium.servers.pushes.execution import Execution
    from podium.servers.pushes.inbox import PushInbox
    from podium.servers.segment import Segment


class Decider:
    """Decides what all servers do with pushes; one per segment, on the first server."""

    def __init__(self, segment: Segment, inbox: PushInbox, execution: Execution) -> None:
        self._segment, self._inbox, self._execution = segment, inbox, execution
        self._outbox, self._by_steps = segment.outbox, not segment.seed.leases
        self._gathering = Gathering(segment.rules, segment.members.training)
        self._norms: dict[int, float] = {}  # by server: its part of the norm that is being measured
        self._over = False  # whether all servers were told that no more decisions follow

    def has(self, key: Key, server: int) -> None:
        """One more server has all units of this push."""
        execution = self._execution
        if execution.lost is not None:  # a server that was restored since does not know it
            return self.decide(Decision(abort=execution.lost), only=server)
        if key in execution.decided:  # pushed again: its server was lost before it could answer
            return self.decide(Decision(answer=[key]), only=server)
        have = self._inbox.has(key, server)
        if execution.measuring is not None and server != self._outbox.rank:
            self._tell_again(key, server)
        if have >= set(self._outbox.servers) and self._inbox.is_complete(key):
            self._consider(key)

    def _tell_again(self, key: Key, server: int) -> None:
        """While norms are gathered: once a restored server has the pushes again, repeat the decision to it."""
        assert self._execution.measuring is not None
        step, answer = self._execution.measuring
        if key in step and server not in self._norms and self._inbox.all_on(server, step):
            self._outbox.tell(server, Decision(add=step, step=step, answer=answer))

    def _consider(self, key: Key) -> None:
        waiting, lending = self._gathering.waiting, self._segment.lending
        if any((push.source, push.lease) == key for push in waiting):
            return  # reported again by a server that had it before the first server was restored
        store, last = self._segment.store, self._inbox.last(key)
        push = Push(*key, samples=last.samples, staleness=store.staleness(last.unit, last.version))
        if lending is not None:
            lending.applied(last.done, key[0])
            lending.vote(last.votes)
        comes_again = not self._by_steps and any(other.lease == push.lease for other in self._gathering.waiting)
        if comes_again or store.applied[0].has(self._inbox.span(key)):
            self.decide(Decision(answer=[key]))  # applied from another worker, or by the server that this one replaces
        elif not self._gathering.add(push):
            if lending is not None:
                lending.cursor.give_back(key[1])
            self.decide(Decision(drop=[key], answer=[key]))
            self._segment.serve_draws()
        else:
            self._take(None if self._segment.rules.wait else key)

    def _take(self, arrived: Key | None, last: bool = False) -> None:
        """Decide on an update if there are enough pushes; `arrived` is a push whose worker does not wait for it."""
        taken = [(push.source, push.lease) for push in self._gathering.take(last)]
        if self._segment.rules.wait:
            if taken:
                self.decide(Decision(add=taken, step=taken, answer=sorted(taken)))
        elif taken or arrived is not None:
            now = [arrived] if arrived is not None else []
            self.decide(Decision(add=now, step=taken, answer=now))

    def decide(self, decision: Decision, only: int | None = None) -> None:
        """Send a decision to all servers or to one, and execute it here where it applies."""
        for other in self._outbox.servers[1:]:
            if only in (None, other):
                self._outbox.tell(other, decision)
        if only in (None, self._outbox.rank):
            self._execution.execute(decision)

    def measured(self, server: int, norm: float) -> None:
        """One server's part of the whole gradient's norm."""
        assert self._execution.measuring is not None
        self._norms[server] = norm
        if len(self._norms) == len(self._outbox.servers):
            whole, self._norms = sum(n * n for n in self._norms.values()) ** 0.5, {}
            self.decide(Decision(norm=whole))

    # Workers come and go.

    def rest(self, workers: set[int]) -> None:
        self._gathering.rest(workers)
        lending, rules = self._segment.lending, self._segment.rules
        assert lending is not None
        waiting = {push.lease for push in self._gathering.waiting}
        self._take(None, last=not rules.wait and lending.cursor.exhausted and set(lending.cursor.open) <= waiting)

    def wake(self, worker: int) -> None:
        self._gathering.wake(worker)

    def leave(self, worker: int) -> None:
        # At the end all leave after the same step. A worker that leaves earlier has lost a peer that the other workers
        # may not have noticed, and they must not wait for it.
        if self._by_steps and self._execution.lost is None:
            self.decide(Decision(abort=worker))

    def lose(self, worker: int) -> None:
        self._gathering.forget(worker)
        if self._by_steps:
            return self.decide(Decision(abort=worker))
        lending = self._segment.lending
        assert lending is not None
        kept = [push.lease for push in self._gathering.waiting if push.source == worker]
        for lease in kept:  # all servers have it, so it will count
            lending.cursor.applied(lease)
        lending.give_back_all(worker)
        self._inbox.forget_servers(worker, kept)
        self.decide(Decision(forget=worker, keep=kept))
        self._take(None)

    def hello(self, server: int) -> None:
        """Another server was restored."""
        self._inbox.lost_server(server)
        if self._segment.rules.wait:  # no worker was answered yet, so all pushes will be sent again
            self._gathering.clear()
        if self._over:
            self._outbox.tell(server, Decision(settled=True))

    def settle(self) -> None:
        """All workers have left: tell the other servers that no more decisions follow."""
        self._over = True
        for other in self._outbox.servers[1:]:
            self._outbox.tell(other, Decision(settled=True))

    @property
    def missing(self) -> set[int]:
        """Workers whose pushes other workers wait for."""
        return self._gathering.missing() if self._execution.lost is None else set()

    def waits_for(self, lease: int) -> bool:
        """Whether a push over this lease waits to become part of an update."""
        return any(push.lease == lease for push in self._gathering.waiting)
