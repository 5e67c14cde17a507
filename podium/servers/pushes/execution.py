"""Executes the first server's decisions, on every server in the same order.

Where gradients are clipped, an update waits for the whole gradient's norm: each server sends the first one its part,
and later decisions wait, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from podium.servers.pushes.gradient_sum import GradientSum, Update
from podium.servers.wire.messages import NO_VOTES, Decision, Key, PushReply

if TYPE_CHECKING:
    from podium.servers.pushes.answers import PushRequest
    from podium.servers.pushes.inbox import PushInbox
    from podium.servers.segment import Segment

_RECENT = 4096
"""Recent pushes that a server remembers, to report them to a restored server."""


class Measuring(NamedTuple):
    """An update that waits for the whole gradient's norm."""

    step: list[Key]
    answer: list[Key]


class _Answer(NamedTuple):
    """A push that is answered once the copies have followed up to number `copy`."""

    units: list[PushRequest]
    reply: PushReply
    copy: int


class Execution:
    """One server's part in updates that all servers make together."""

    def __init__(self, segment: Segment, inbox: PushInbox, tell_norm: Callable[[float], None]) -> None:
        """`tell_norm`: sends this server's part of a gradient's norm to the first server."""
        self._segment, self._store, self._inbox, self._tell_norm = segment, segment.store, inbox, tell_norm
        self._by_steps = not segment.seed.leases
        self.sum = GradientSum(segment.store, segment.seed.clip_norm)
        self.measuring: Measuring | None = None
        self._backlog: list[Decision] = []  # decisions that came while a norm is measured
        self.lost: int | None = None
        """The worker whose loss ended the steps of this segment."""
        self.settled = segment.outbox.is_first
        """Whether no more decisions will come."""
        self.decided: dict[Key, None] = {}
        """Recent pushes that were answered and counted, in order."""
        self.told: dict[Key, None] = {}
        """As `decided`, with pushes that were dropped, which may be pushed again."""
        self._dropped: set[Key] = set()
        self._reply = PushReply()  # the answer to the last step, where workers go through steps together
        self._answers: list[_Answer] = []

    def execute(self, decision: Decision) -> None:
        """Execute a decision, or queue it until the norm has arrived."""
        if self.measuring is not None and decision.norm is None:
            self._backlog.append(decision)
            return
        if decision.norm is not None:
            return self._finish(decision.norm)
        if decision.abort is not None:
            return self._abort(decision.abort)
        if decision.settled:
            self.settled = True
            return
        if decision.forget is not None:
            self._inbox.forget(decision.forget, decision.keep)
        for source, lease in decision.drop:
            if self._inbox.is_complete((source, lease)):  # a restored server may lack it
                self._drop((source, lease))
        self._add([(s, n) for s, n in decision.add])
        step = [(s, n) for s, n in decision.step]
        answer = [(s, n) for s, n in decision.answer]
        if step and self._segment.seed.clip_norm is not None:
            return self._measure(step, answer)
        if step:
            self._step(None)
        self._answer(answer)

    def restart(self) -> None:
        """The first server was restored: it will repeat decisions that it had not finished."""
        self.measuring, self._backlog = None, []
        self.sum.clear()

    def _abort(self, worker: int) -> None:
        self.lost = worker
        for request in self._inbox.take_all():
            self._segment.outbox.answer(request.message, PushReply(lost=worker))

    def _drop(self, key: Key) -> None:
        self._segment.records.dropped(*key, self._staleness(key))
        self._dropped.add(key)

    def _staleness(self, key: Key) -> int:
        last = self._inbox.last(key)
        return self._store.staleness(last.unit, last.version)

    # Updates.

    def _add(self, keys: Sequence[Key]) -> None:
        """Sum these pushes' gradients, in this order."""
        rules, clip_norm = self._segment.rules, self._segment.seed.clip_norm
        for key in keys:
            if not self._inbox.is_complete(key):
                continue  # this server was restored meanwhile: pushes that it lacks count as lost
            span = self._inbox.span(key)
            added = not self._by_steps and any(lease == key[1] for _, lease in self.sum.spans)
            if added or self._store.applied[0].has(span):
                continue  # the first server was restored meanwhile, and this one has already done it
            alone = len(keys) == 1 and rules.wait and clip_norm is None
            self.sum.add(key, span, self._inbox.units(key), self._inbox.last(key).weight, alone=alone)

    def _measure(self, step: list[Key], answer: list[Key]) -> None:
        norm = self.sum.norm()
        if len(self._segment.outbox.servers) == 1:
            self._step(norm)
            return self._answer(answer)
        self.measuring = Measuring(step, answer)
        self._tell_norm(norm)

    def _finish(self, norm: float) -> None:
        assert self.measuring is not None
        answer, self.measuring = self.measuring.answer, None
        self._step(norm)
        self._answer(answer)
        backlog, self._backlog = self._backlog, []
        for decision in backlog:
            self.execute(decision)

    def _step(self, norm: float | None) -> None:
        update = self.sum.take(norm)
        if update is None:
            return
        here = [key for key in update.spans if key in self._inbox]
        staleness = {key: self._staleness(key) for key in here}
        spans = sorted(set(update.spans.values()))  # without leases, all pushes of a step are over the same samples
        for unit, grads in enumerate(update.grads):
            self._segment.apply(unit, grads, update.options[unit], update.unused, spans)
        if self._by_steps:
            self._reply = self._said_of(here)
        else:
            self._record(update, staleness)

    def _said_of(self, keys: Sequence[Key]) -> PushReply:
        """The answer to all workers on a step that they made together."""
        last = [self._inbox.last(key) for key in keys]
        agreed = [any(votes) for votes in zip(*(push.votes for push in last), strict=True)]
        return PushReply(agreed=agreed or NO_VOTES, loss=sum(push.loss for push in last))

    def _record(self, update: Update, staleness: dict[Key, int]) -> None:
        store, pushes = self._store, len(update.spans)
        for key in update.spans:
            worker, lease = key
            for unit, version in enumerate(store.versions):
                self._segment.records.update(version, worker, unit, staleness.get(key, 0), lease, pushes=pushes)

    # Answers.

    def _answer(self, keys: Sequence[Key]) -> None:
        for key in keys:
            self._remember(key)
            units = self._inbox.take(key)
            if not units:
                continue
            reply = self._reply if self._by_steps else PushReply(dropped=key in self._dropped)
            self._dropped.discard(key)
            self._answers.append(_Answer(units, reply, self._segment.replicas.sent))
        self.acknowledged()

    def _remember(self, key: Key) -> None:
        for recent in (self.told,) if key in self._dropped else (self.told, self.decided):
            recent[key] = None
            while len(recent) > _RECENT:
                del recent[next(iter(recent))]

    def acknowledged(self) -> None:
        """Send answers whose copies have caught up."""
        segment = self._segment
        while self._answers and self._answers[0].copy <= segment.replicas.acknowledged:
            units, reply, _ = self._answers.pop(0)
            for request in units:
                source = request.message.source
                if source in segment.members.gone:
                    continue
                lends = request.push.last and segment.lending is not None
                lease = segment.lending.lend(source) if lends and segment.lending is not None else None
                segment.answers.give(request, lease, reply)
        segment.serve_draws()

    @property
    def waiting(self) -> set[int]:
        """Workers whose answer waits for a copy."""
        return {request.message.source for answer in self._answers for request in answer.units}
