"""Gathered pushes: updates of several pushes, which all servers make together.

A push counts once all servers have all of it (`Have`); the first server then decides which pushes make the next update,
which are dropped, and which workers are answered (`Decision`, `decider.py`), and all servers execute its decisions in
order (`execution.py`). So an update happens on all ranges or on none, also when a worker dies in the middle of a push.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, final

from podium.servers.pushes.base import PushPolicy, Waits
from podium.servers.pushes.decider import Decider
from podium.servers.pushes.execution import Execution
from podium.servers.pushes.inbox import PushInbox
from podium.servers.wire.messages import Decision, Have, Hello, Key, Norm, Pending, PushReply

if TYPE_CHECKING:
    from podium.servers.pushes.answers import PushRequest
    from podium.servers.segment import Segment


@final
class GatheredPushes(PushPolicy):
    """Pushes wait until the first server has decided."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._outbox, self._by_steps = segment, segment.outbox, not segment.seed.leases
        self._inbox = PushInbox(len(segment.store.shard.units))
        self.execution = Execution(segment, self._inbox, self._tell_norm)
        self._decider = Decider(segment, self._inbox, self.execution) if segment.outbox.is_first else None

    def push(self, request: PushRequest) -> None:
        message, push = request
        if not self._by_steps:
            self._segment.records.arrival(message)
        if self.execution.lost is not None:
            return self._outbox.answer(message, PushReply(lost=self.execution.lost))
        if self._inbox.add(request):
            self._has((message.source, push.lease))

    def _has(self, key: Key) -> None:
        """This server has all units of a push."""
        if self._decider is not None:
            self._decider.has(key, self._outbox.rank)
        else:
            self._outbox.tell(self._outbox.servers[0], Have(*key))

    def _tell_norm(self, norm: float) -> None:
        if self._decider is not None:
            self._decider.measured(self._outbox.rank, norm)
        else:
            self._outbox.tell(self._outbox.servers[0], Norm(norm))

    def hear(self, source: int, word: Any) -> None:
        decider = self._decider
        if isinstance(word, Decision):
            self.execution.execute(word)
        elif isinstance(word, Pending):
            self._is_pending((source, word.lease), word.dropped)
        elif isinstance(word, Have) and decider is not None:
            decider.has((word.source, word.lease), source)
        elif isinstance(word, Norm) and decider is not None:
            decider.measured(source, word.norm)
        elif isinstance(word, Hello) and decider is not None:
            decider.hello(source)
        elif isinstance(word, Hello) and source == self._outbox.servers[0]:
            self.execution.restart()
            for key in [*self.execution.told, *self._inbox.complete()]:
                self._has(key)

    def _is_pending(self, key: Key, dropped: bool) -> None:
        """A worker has other servers' answers and waits for ours: its push was decided before this server was restored.

        The server that decided it may be lost too; then only the worker knows, and it does not push there again.
        """
        if self._segment.store.restored and self.execution.measuring is None and self._inbox.is_complete(key):
            self.execution.execute(Decision(drop=[key] if dropped else [], answer=[key]))

    def rest(self, workers: set[int]) -> None:
        if self._decider is not None:
            self._decider.rest(workers)

    def wake(self, worker: int) -> None:
        if self._decider is not None:
            self._decider.wake(worker)

    def leave(self, worker: int) -> None:
        if self._decider is not None:
            self._decider.leave(worker)

    def lose(self, worker: int) -> None:
        if self._decider is not None:
            self._decider.lose(worker)

    def waits(self) -> Waits:
        awaited = set() if self._decider is None else self._decider.missing
        return Waits(awaited, self.execution.waiting | self._inbox.sources)

    def acknowledged(self) -> None:
        self.execution.acknowledged()

    def will_apply(self, lease: int) -> bool:
        return self._decider is not None and self._decider.waits_for(lease)

    def settle(self) -> bool:
        if self._decider is not None:
            self._decider.settle()
        return self.execution.settled
