"""One segment of training on a server: from a seed until all workers have left."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from podium.servers.gate import Rules
from podium.servers.leases.lending import Lending
from podium.servers.pushes.base import PushPolicy, Waits
from podium.servers.pushes.gathered import GatheredPushes
from podium.servers.pushes.immediate import ImmediatePushes

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.comm.clocks import Clock
    from podium.servers.applied import Span
    from podium.servers.copies.replicas import Replicas
    from podium.servers.copies.snapshots import Snapshots
    from podium.servers.leases.paces import Paces
    from podium.servers.members import Members
    from podium.servers.outbox import Outbox
    from podium.servers.pushes.answers import Answers
    from podium.servers.server_records import ServerRecords
    from podium.servers.store import Store
    from podium.servers.wire.messages import Seed


class Parts(NamedTuple):
    """Objects that a server has for its whole life."""

    clock: Clock
    outbox: Outbox
    members: Members
    store: Store
    answers: Answers
    records: ServerRecords
    paces: Paces
    replicas: Replicas
    snapshots: Snapshots


class Segment:
    """A seed, its rules, and the leases and push policy that follow them."""

    def __init__(self, parts: Parts, seed: Seed, *, begun: bool = True) -> None:
        """`begun`: false for the placeholder before the first seed."""
        self.clock, self.outbox, self.members, self.store, self.answers, self.records, *_ = parts
        self.paces, self.replicas, self._snapshots = parts.paces, parts.replicas, parts.snapshots
        self.seed, self.begun = seed, begun
        self.rules = Rules.from_dict(seed.rules)
        self.lending = Lending(self) if begun and seed.leases and self.outbox.is_first else None
        self.policy: PushPolicy = ImmediatePushes(self) if self.rules.immediate else GatheredPushes(self)

    def apply(
        self,
        unit: int,
        grads: Sequence[Tensor],
        options: Sequence[Meta],
        unused: Sequence[int],
        spans: Sequence[Span],
        out: Sequence[Tensor] | None = None,
    ) -> None:
        """Move one unit, and update copies and snapshots; the arguments are those of `Store.apply`."""
        self.store.apply(unit, grads, options, unused, spans, out)
        self.replicas.moved(unit, grads, options, unused, spans)
        self._snapshots.moved(self, unit)

    def serve_draws(self) -> None:
        """After a change: give leases to workers that wait for one, where this server lends."""
        if self.lending is not None:
            self.lending.serve()

    def lose(self, worker: int, *, note: bool = True) -> None:
        """A worker is gone, or no longer takes part; `note`: write a record."""
        held = [] if self.lending is None else self.lending.cursor.held_by(worker)
        if note:
            self.records.lost(worker, held)
        if self.lending is not None:
            self.lending.forget(worker)
        self.store.mitigation.forget(worker)
        self.policy.lose(worker)
        if self.lending is not None and self.lending.inquiry is not None:
            self.lending.inquiry.lose(worker)
        self.serve_draws()

    def waits(self) -> Waits:
        """Workers that other workers wait for, as far as this server knows, and workers that wait for this server."""
        members, (awaited, waiting) = self.members, self.policy.waits()
        if members.left:
            awaited = awaited | (set(members.live) - members.through)
        if self.lending is not None:
            awaited, waiting = awaited | self.lending.awaited(), waiting | self.lending.waiting
        waiting = waiting | set(members.left)
        return Waits((awaited & set(members.live)) - waiting, waiting)
