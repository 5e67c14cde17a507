"""Pushes applied as they come: each unit the moment it is there, and answered.

Gradients still go out while parameters already come back. Every server does so by itself: its order of updates is its
own.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, final

from podium.comm.base import Message
from podium.servers.applied import Span, span_of_lease
from podium.servers.gate import Clocks
from podium.servers.intake import Intake
from podium.servers.options import scaled

if TYPE_CHECKING:
    from podium.servers.server import Server


@final
class Streams(Intake):
    """Every unit is applied as it comes."""

    def __init__(self, server: Server) -> None:
        super().__init__(server)
        self.clocks = Clocks(server.rules, set(server.workers) - server.sitting)
        self._held: dict[int, list[tuple[Message, int]]] = defaultdict(list)  # with the copy each must wait for
        self._landed: set[tuple[int, int]] = set()  # (source, unit): parameters that are written already

    def push(self, message: Message) -> None:
        server, meta = self.server, message.meta
        unit, source = meta["unit"], message.source
        span = span_of_lease(meta["lease"], meta.get("size", 1))
        if not self.once[unit].has(span):
            self._apply(message, unit, span)
        else:
            server.note(message)
        self._held[source].append((message, server.copies.sent))
        if meta["last"]:
            self.clocks.tick(source, server.comm.clock.now_ns())
            if server.cursor is not None:
                server.cursor.applied(meta["done"] if meta["lend"] else meta["lease"], source)
                server.wishes(meta)
        self._release(source)
        if meta["last"]:
            self._release_all()
            server.serve_parked()

    def _apply(self, message: Message, unit: int, span: Span) -> None:
        server, meta = self.server, message.meta
        staleness = max(0, server.versions[unit] - meta["version"])
        options = scaled(meta["options"], server.mitigation.rate(staleness))
        grads = server.mitigation.mend(message.source, unit, message.body, server.shard.of(unit))
        at_once = server.rules.bound is None and not meta["early"] and not self._held[message.source]
        out = message.landing if at_once and server.by_lane(unit) else None
        self.once[unit].add(span)  # before: a snapshot that is taken now must know of it
        server.apply(unit, grads, options, meta["unused"], [span], out)
        if out is not None:
            self._landed.add((message.source, unit))
        more = {} if server.rules.bound is None else {"lead": self.clocks.lead(message.source)}
        if server.seed_meta.get("local_steps", 1) > 1:  # it may be cut otherwise when it is lent again
            more["samples"] = span[1] - span[0]
        server.record_update(message.source, unit, staleness, meta["lease"], **more)

    def _release(self, source: int) -> None:
        """Answer what may be answered: not before backward is over, the gate is open and the copies are there."""
        held = self._held[source]
        if not held:
            return
        through = held[-1][0].meta["last"]
        if not through and (held[0][0].meta["early"] or self.server.rules.bound is not None):
            return
        if through and not self.clocks.may_go(source):
            return
        server = self.server
        while held and held[0][1] <= server.copies.acknowledged:
            message, _ = held.pop(0)
            lease = {}
            if message.meta["last"] and message.meta["lend"] and server.cursor is not None:
                lease = server.lend(source)
            landed = (source, message.meta["unit"]) in self._landed
            self._landed.discard((source, message.meta["unit"]))
            server.give(message, lease, landed)

    def _release_all(self) -> None:
        for source in sorted(self._held):
            self._release(source)

    def rest(self, workers: set[int]) -> None:
        server = self.server
        if server.is_first and server.rules.bound is not None and not workers <= self.clocks.resting:
            for other in server.servers[1:]:  # the cursor is here, so the others cannot know
                server.tell(other, "decision", {"rest": sorted(workers)})
        self.clocks.resting |= workers
        self._release_all()

    def wake(self, worker: int) -> None:
        self.clocks.resting.discard(worker)

    def awaited(self) -> set[int]:
        clocks = self.clocks
        shut_out = [s for s, held in self._held.items() if held and held[-1][0].meta["last"] and not clocks.may_go(s)]
        return clocks.slowest() if shut_out else set()

    @property
    def waiting(self) -> set[int]:
        return {source for source, held in self._held.items() if held}

    def hear(self, message: Message) -> None:
        if message.kind == "hello" and self.server.is_first and self.clocks.resting:
            self.server.tell(message.source, "decision", {"rest": sorted(self.clocks.resting)})
        if "rest" in message.meta:
            self.rest(set(message.meta["rest"]))

    def lose(self, worker: int) -> None:
        self.clocks.workers.discard(worker)
        self._held.pop(worker, None)
        if self.server.cursor is not None:
            self.server.cursor.lost(worker)
        self._release_all()

    def acknowledged(self) -> None:
        self._release_all()
