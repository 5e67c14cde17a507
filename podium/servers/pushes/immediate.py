"""Immediate pushes: every unit is applied as soon as it arrives, and answered.

So parameters come back while other gradients are still being sent. Each server has its own order of updates.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any, final

from podium.servers.applied import Span, span_of_lease
from podium.servers.gate import Clocks
from podium.servers.pushes.base import PushPolicy, Waits
from podium.servers.wire.messages import Decision, Hello
from podium.servers.wire.optimizer_settings import scaled

if TYPE_CHECKING:
    from podium.servers.pushes.answers import PushRequest
    from podium.servers.segment import Segment


@final
class ImmediatePushes(PushPolicy):
    """Every push is an update."""

    def __init__(self, segment: Segment) -> None:
        self._segment, self._store, self._replicas = segment, segment.store, segment.replicas
        self._bound = segment.rules.bound
        self._tells_samples = segment.seed.local_steps > 1  # a lease that is lent again may be cut differently
        self.clocks = Clocks(segment.rules, set(segment.members.workers) - segment.members.serve_only)
        self._held: dict[int, list[tuple[PushRequest, int]]] = defaultdict(list)  # with the copy each must wait for
        self._landed: set[tuple[int, int]] = set()  # (source, unit): parameters already written to the worker's memory

    def push(self, request: PushRequest) -> None:
        (message, push), segment = request, self._segment
        source, lending = message.source, segment.lending
        span = span_of_lease(push.lease, push.size)
        if not self._store.applied[push.unit].has(span):
            self._apply(request, span)
        else:
            segment.records.arrival(message)
        self._held[source].append((request, self._replicas.sent))
        if push.last:
            self.clocks.tick(source, segment.clock.now_ns())
            if lending is not None:
                lending.applied(push.done if push.lend else push.lease, source)
                lending.vote(push.votes)
        self._release(source)
        if push.last:
            self._release_all()
            if lending is not None:
                lending.serve()

    def _apply(self, request: PushRequest, span: Span) -> None:
        (message, push), store = request, self._store
        source, unit = message.source, push.unit
        staleness = store.staleness(unit, push.version)
        options = scaled(push.options, store.mitigation.rate(staleness))
        grads = store.mitigation.mend(source, unit, message.body, store.shard.of(unit))
        at_once = self._bound is None and not push.early and not self._held[source]
        out = message.landing if at_once and store.by_thread(unit) else None
        self._segment.apply(unit, grads, options, push.unused, [span], out)
        if out is not None:
            self._landed.add((source, unit))
        more = {} if self._bound is None else {"lead": self.clocks.lead(source)}
        if self._tells_samples:
            more["samples"] = span[1] - span[0]
        self._segment.records.update(store.versions[unit], source, unit, staleness, push.lease, **more)

    def _release(self, source: int) -> None:
        """Send answers that may be sent: once backward is over, the gate is open and the copies have caught up."""
        held = self._held[source]
        if not held:
            return
        whole = held[-1][0].push.last
        if not whole and (held[0][0].push.early or self._bound is not None):
            return
        if whole and not self.clocks.may_go(source):
            return
        while held and held[0][1] <= self._replicas.acknowledged:
            request, _ = held.pop(0)
            push, lending, lease = request.push, self._segment.lending, None
            if push.last and push.lend and lending is not None:
                lease = lending.lend(source)
            landed = (source, push.unit) in self._landed
            if landed:
                self._landed.discard((source, push.unit))
            self._segment.answers.give(request, lease, landed=landed)

    def _release_all(self) -> None:
        for source in sorted(self._held):
            self._release(source)

    def rest(self, workers: set[int]) -> None:
        outbox = self._segment.outbox
        if outbox.is_first and self._bound is not None and not workers <= self.clocks.resting:
            for other in outbox.others:  # only this server has the cursor
                outbox.tell(other, Decision(rest=sorted(workers)))
        self.clocks.rest(workers)
        self._release_all()

    def wake(self, worker: int) -> None:
        self.clocks.wake(worker)

    def waits(self) -> Waits:
        held = {source: held for source, held in self._held.items() if held}
        shut_out = [s for s, mine in held.items() if mine[-1][0].push.last and not self.clocks.may_go(s)]
        return Waits(self.clocks.slowest() if shut_out else set(), set(held))

    def hear(self, source: int, word: Any) -> None:
        outbox = self._segment.outbox
        if isinstance(word, Hello) and outbox.is_first and self.clocks.resting:
            outbox.tell(source, Decision(rest=sorted(self.clocks.resting)))
        if isinstance(word, Decision) and word.rest is not None:
            self.rest(set(word.rest))

    def lose(self, worker: int) -> None:
        self.clocks.lose(worker)
        self._held.pop(worker, None)
        if self._segment.lending is not None:
            self._segment.lending.give_back_all(worker)
        self._release_all()

    def acknowledged(self) -> None:
        self._release_all()
