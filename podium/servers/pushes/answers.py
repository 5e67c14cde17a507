"""Answers to pushes and pulls: a unit's parameters, whole, by rows or packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from podium.servers.wire.messages import Push, PushReply, plain_lease

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.servers.leases.lease import Lease
    from podium.servers.leases.paces import Paces
    from podium.servers.members import Members
    from podium.servers.outbox import Outbox
    from podium.servers.store import Store


class PushRequest(NamedTuple):
    """A push: its message, with the unpacked gradients as body, and its checked facts."""

    message: Message
    push: Push


class Answers:
    """Sends workers the parameters that they wait for."""

    def __init__(self, outbox: Outbox, store: Store, members: Members, paces: Paces) -> None:
        self._outbox, self._store, self._members, self._paces = outbox, store, members, paces
        self._acquainted: set[tuple[int, int]] = set()  # (worker, unit) that a restored server has answered

    def give(
        self, request: PushRequest, lease: Lease | None = None, said: PushReply | None = None, landed: bool = False
    ) -> None:
        """Answer a push with its unit's parameters and the next lease.

        `said`: other fields of the answer; `landed`: the parameters are already in the worker's memory.
        """
        (message, push), store = request, self._store
        unit, last = push.unit, push.last
        params, version = store.shard.of(unit), store.versions[unit]
        reply = PushReply(version, *plain_lease(lease)) if said is None else said.with_lease(version, lease)
        if last and self._paces.is_known and message.source == self._members.workers[0]:
            reply = reply._replace(busy=self._paces.busy(self._members.training))
        if push.bare:
            return self._outbox.answer(message, reply, more=not last)
        if store.by_thread(unit):
            body = message.landing if landed and message.landing is not None else params
            return store.in_thread(unit, lambda: self._outbox.answer(message, reply, body))
        if store.shard.by_rows(unit):
            params = store.shard.rows_since(unit, self._known(request))
        elif store.codec.packs_answers:
            return self._give_packed(request, reply, params)
        store.mitigation.gave(message.source, unit, params)
        self._outbox.answer(message, reply, params, more=not last)

    def _give_packed(self, request: PushRequest, reply: PushReply, params: Sequence[Tensor]) -> None:
        """Answer with the change since the last answer, packed."""
        (message, push), store = request, self._store
        ranges = store.shard.units[push.unit].of(store.shard.ranges)
        body, held = store.codec.pack(message.source, push.unit, ranges, params, store.versions[push.unit])
        store.mitigation.gave(message.source, push.unit, held)
        self._outbox.answer(message, reply._replace(packed=body is not params), body, more=not push.last)

    def _known(self, request: PushRequest) -> int:
        """The version of a unit's rows that a worker has; -1 where it got them from the server that was replaced."""
        asked = (request.message.source, request.push.unit)
        if self._store.restored and asked not in self._acquainted:
            self._acquainted.add(asked)
            return -1
        return request.push.version
