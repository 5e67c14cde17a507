"""Pushes gathered into updates that all servers make together.

A push counts once all servers have all of it; the first server then says which pushes make the next update, which are
dropped, and who is answered, and all servers do so in the order it says. So an update happens on all ranges or on none,
also when a worker dies in the middle of a push.

    have      a server has the whole of a push
    decision  from the first server: what to do next
    norm      a server's part of the gradient's norm, where it is to be clipped
    hello     a server was restored: tell it again
    pending   from a worker: other servers have answered its push, so it was decided
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor

from podium.comm.base import Message, Meta
from podium.servers.applied import Span, span_of_lease
from podium.servers.gate import Gathering, Push
from podium.servers.intake import WISHES, Intake
from podium.servers.shard import wider

if TYPE_CHECKING:
    from podium.servers.server import Server

Key = tuple[int, int]
"""Names a push: who, over which slice."""
_RECENT = 4096
"""How many pushes a server can still tell the others of, when one of them comes back."""


class _Sum(NamedTuple):
    """Gradients added up so far, unit by unit, and the weight they have together."""

    grads: list[list[Tensor]]
    weight: float
    options: list[Sequence[Meta]]  # by unit
    unused: set[int]


@final
class Gathers(Intake):
    """Pushes wait until the first server has decided."""

    def __init__(self, server: Server, *, fed_by_steps: bool) -> None:
        super().__init__(server)
        self._by_steps = fed_by_steps
        self.gathering = Gathering(server.rules, server.training)
        self._parts: dict[Key, dict[int, Message]] = defaultdict(dict)
        self._have: dict[Key, set[int]] = defaultdict(set)
        self._decided: dict[Key, None] = {}  # in order, the recent ones
        self._told: dict[Key, None] = {}  # the same with those that were dropped, which may come again
        self._sum: _Sum | None = None
        self._scratch: list[list[Tensor]] = []
        self._added: dict[Key, Span] = {}  # what the sum is made of
        self._lost: int | None = None
        self._measuring: tuple[list[Key], dict[int, float]] | None = None  # what is about to be stepped; norms so far
        self._pending_answer: list[Key] = []
        self._backlog: list[Meta] = []
        self._facts: Meta = {}
        self._dropped: set[Key] = set()
        self._settled = server.is_first
        self._let_go = False
        self._answered: list[tuple[list[Message], Meta, int]] = []  # waiting for a copy

    # Taking in.

    def push(self, message: Message) -> None:
        server, key = self.server, (message.source, message.meta["lease"])
        if not self._by_steps:
            server.note(message)
        if self._lost is not None:
            return server.answer(message, {"lost": self._lost})
        parts = self._parts[key]
        parts[message.meta["unit"]] = message
        if len(parts) < len(server.shard.units):
            return
        if server.is_first:
            self._has(key, server.comm.rank)
        else:
            self._tell_have(key)

    def hear(self, message: Message) -> None:
        server, meta = self.server, message.meta
        if message.kind == "have":
            server.note(message)
            self._has((meta["source"], meta["lease"]), message.source)
        elif message.kind == "pending":
            self._is_pending((message.source, meta["lease"]), meta["dropped"])
        elif message.kind == "decision":
            self._execute(meta)
        elif message.kind == "norm":
            self._measured(message.source, meta["norm"])
        elif message.kind == "hello" and server.is_first:
            for have in self._have.values():
                have.discard(message.source)  # what it had it has no more, until the workers push it again
            if server.rules.wait:  # nobody was answered yet, so all of it will come
                self.gathering.waiting.clear()
            if self._let_go:
                server.tell(message.source, "decision", {"settled": True})
        elif message.kind == "hello" and message.source == server.servers[0]:
            # What it had not finished deciding it will decide anew.
            self._measuring, self._backlog, self._sum, self._added = None, [], None, {}
            whole = [k for k, parts in self._parts.items() if len(parts) == len(server.shard.units)]
            for key in [*self._told, *whole]:
                self._tell_have(key)

    def _tell_have(self, key: Key) -> None:
        source, lease = key
        self.server.tell(self.server.servers[0], "have", {"source": source, "lease": lease, "unit": source})

    def _is_pending(self, key: Key, dropped: bool) -> None:
        """A worker has the answers of other servers and waits for ours: its push was decided before we were restored.

        Whoever decided it may be lost too, and then nobody knows but the worker, who does not push it there again.
        """
        if self.server.copies.restored and self._measuring is None and self._is_complete(key):
            self._execute({"drop": [key] if dropped else [], "answer": [key]})

    def _has(self, key: Key, rank: int) -> None:
        """First server: one more server has the whole of this push."""
        server = self.server
        if self._lost is not None:  # a server that was restored since does not know
            return self._decide({"abort": self._lost}, only=rank)
        if key in self._decided:  # it comes again: its server was lost before it could answer
            return self._decide({"answer": [key]}, only=rank)
        have = self._have[key]
        have.add(rank)
        if self._measuring is not None and rank != server.comm.rank:
            self._tell_again(key, rank)
        if have >= set(server.servers) and self._is_complete(key):
            self._consider(key)

    def _tell_again(self, key: Key, rank: int) -> None:
        """While norms are gathered: a server that was restored has the pushes again, and is told once more."""
        assert self._measuring is not None
        step, norms = self._measuring
        if key in step and rank not in norms and all(rank in self._have[k] for k in step):
            self.server.tell(rank, "decision", {"add": step, "step": step, "answer": self._pending_answer})

    def _is_complete(self, key: Key) -> bool:
        return len(self._parts.get(key, ())) == len(self.server.shard.units)

    # Deciding, on the first server.

    def _consider(self, key: Key) -> None:
        if any((push.source, push.lease) == key for push in self.gathering.waiting):
            return  # a server that heard of it before the first one was restored says again that it has it
        server, meta = self.server, self._last_of(key).meta
        staleness = max(0, server.versions[meta["unit"]] - meta["version"])
        push = Push(*key, samples=meta["samples"], staleness=staleness)
        if server.cursor is not None:
            server.cursor.applied(meta["done"], key[0])
            server.wishes(meta)
        waits = not self._by_steps and any(other.lease == push.lease for other in self.gathering.waiting)
        if self.once[0].has(self._span(key)) or waits:  # by another worker, or by the server that this one replaces
            self._decide({"answer": [key]})
        elif not self.gathering.add(push):
            if server.cursor is not None:
                server.cursor.give_back(key[1])
            self._decide({"drop": [key], "answer": [key]})
            server.serve_parked()
        else:
            self._take(None if server.rules.wait else key)

    def _take(self, arrived: Key | None, last: bool = False) -> None:
        """See whether there is an update to make; `arrived` is a push whose worker does not wait for it."""
        taken = [(push.source, push.lease) for push in self.gathering.take(last)]
        if self.server.rules.wait:
            if taken:
                self._decide({"add": taken, "step": taken, "answer": sorted(taken)})
        elif taken or arrived is not None:
            now = [arrived] if arrived is not None else []
            self._decide({"add": now, "step": taken, "answer": now})

    def _decide(self, decision: Meta, only: int | None = None) -> None:
        """Say what is to be done, to all servers or to one."""
        server = self.server
        for other in server.servers[1:]:
            if only in (None, other):
                server.tell(other, "decision", decision)
        if only in (None, server.comm.rank):
            self._execute(decision)

    def rest(self, workers: set[int]) -> None:
        self.gathering.resting |= workers
        if self.server.is_first:
            cursor = self.server.cursor
            assert cursor is not None
            waiting = {push.lease for push in self.gathering.waiting}
            self._take(None, last=not self.server.rules.wait and cursor.exhausted and set(cursor.open) <= waiting)

    def wake(self, worker: int) -> None:
        self.gathering.resting.discard(worker)

    def awaited(self) -> set[int]:
        return self.gathering.missing() if self.server.is_first and self._lost is None else set()

    @property
    def waiting(self) -> set[int]:
        answered = {message.source for messages, _, _ in self._answered for message in messages}
        return answered | {source for source, _ in self._parts}

    def leave(self, worker: int) -> None:
        # At the end all leave after the same step. One that leaves earlier has missed a peer that the others may not
        # miss, and they must not wait for it.
        if self._by_steps and self.server.is_first and self._lost is None:
            self._decide({"abort": worker})

    def lose(self, worker: int) -> None:
        server = self.server
        self.gathering.forget(worker)
        if not server.is_first:
            return
        if self._by_steps:
            return self._decide({"abort": worker})
        assert server.cursor is not None
        for push in self.gathering.waiting:
            if push.source == worker:  # all servers have it, so it will count
                server.cursor.applied(push.lease)
        server.cursor.lost(worker)
        kept = [push.lease for push in self.gathering.waiting if push.source == worker]
        for key in [key for key in self._have if key[0] == worker and key[1] not in kept]:
            del self._have[key]
        self._decide({"forget": worker, "except": kept})
        self._take(None)

    # Doing what was decided, on every server alike.

    def _execute(self, decision: Meta) -> None:
        if self._measuring is not None and "norm" not in decision:
            self._backlog.append(decision)
            return
        if "norm" in decision:
            return self._finish(decision["norm"])
        if "abort" in decision:
            return self._abort(decision["abort"])
        if "settled" in decision:
            self._settled = True
            return self.server.let_go()
        if "forget" in decision:
            kept = decision["except"]
            for key in [key for key in self._parts if key[0] == decision["forget"] and key[1] not in kept]:
                del self._parts[key]
        for source, lease in decision.get("drop", ()):
            if self._is_complete((source, lease)):  # a server that was restored in between may lack it
                self._drop((source, lease))
                self._dropped.add((source, lease))
        self._add([(s, n) for s, n in decision.get("add", ())])
        step = [(s, n) for s, n in decision.get("step", ())]
        answer = [(s, n) for s, n in decision.get("answer", ())]
        if step and self.server.seed_meta["clip_norm"] is not None:
            self._measure(step, answer)
        else:
            if step:
                self._step(step, None)
            self._answer(answer)

    def _abort(self, worker: int) -> None:
        self._lost = worker
        for parts in self._parts.values():
            for message in parts.values():
                self.server.answer(message, {"lost": worker})
        self._parts.clear()

    def _drop(self, key: Key) -> None:
        server, message = self.server, self._last_of(key)
        server.recorder.write(
            "dropped",
            server.comm.clock.now_ns(),
            worker=key[0],
            lease=key[1],
            staleness=max(0, server.versions[message.meta["unit"]] - message.meta["version"]),
        )

    def _add(self, keys: Sequence[Key]) -> None:
        """Add these pushes' gradients up, in this order."""
        server = self.server
        for key in keys:
            parts = self._parts.get(key)
            if parts is None or len(parts) < len(server.shard.units):
                continue  # this server was restored in between: what it lacks counts as lost
            span = self._span(key)
            if self.once[0].has(span) or (not self._by_steps and any(lease == key[1] for _, lease in self._added)):
                continue  # the first server was restored in between, and this one has done it
            self._added[key] = span
            meta, grads = self._last_of(key).meta, self._mended(key)
            unused = {piece for message in parts.values() for piece in message.meta["unused"]}
            if self._sum is None:
                alone = len(keys) == 1 and server.rules.wait and server.seed_meta["clip_norm"] is None
                options = [message.meta["options"] for _, message in sorted(parts.items())]
                self._sum = _Sum(self._begin_sum(grads, alone), meta["weight"], options, unused)
            else:
                for number, theirs in enumerate(grads):
                    self._join(number, self._sum.grads, theirs)
                total = self._sum.weight + meta["weight"]
                self._sum = self._sum._replace(weight=total, unused=self._sum.unused & unused)

    def _join(self, unit: int, sums: list[list[Tensor]], grads: list[Tensor]) -> None:
        """Add one unit's gradients to the sum; rows are put behind the others, to be added up in the end."""
        if self.server.shard.by_rows(unit):
            sums[unit] = [torch.cat(pair) for pair in zip(sums[unit], grads, strict=True)]
        else:
            for mine, theirs in zip(sums[unit], grads, strict=True):
                mine += theirs

    def _mended(self, key: Key) -> list[list[Tensor]]:
        """A push's gradients, unit by unit, with what is done about their staleness."""
        server = self.server
        units: list[list[Tensor]] = []
        for unit, message in sorted(self._parts[key].items()):
            staleness = max(0, server.versions[unit] - message.meta["version"])
            rate = server.mitigation.rate(staleness)
            mended = list(server.mitigation.mend(key[0], unit, message.body, server.shard.of(unit)))
            first = 1 if server.shard.by_rows(unit) else 0  # row numbers stay as they are
            units.append([*mended[:first], *(g * rate for g in mended[first:])] if rate != 1.0 else mended)
        return units

    def _begin_sum(self, grads: list[list[Tensor]], alone: bool) -> list[list[Tensor]]:
        if alone:  # used where it lies, and not written to
            return grads
        self.server.lanes.settle()  # the last sum may still be read by them
        by_rows = [self.server.shard.by_rows(unit) for unit in range(len(grads))]
        if not self._scratch:
            self._scratch = [
                [] if rows else [torch.empty_like(g) for g in unit] for rows, unit in zip(by_rows, grads, strict=True)
            ]
        for unit, rows in enumerate(by_rows):
            if rows:
                self._scratch[unit] = [g.clone() for g in grads[unit]]
            else:
                for mine, first in zip(self._scratch[unit], grads[unit], strict=True):
                    mine.copy_(first)
        return list(self._scratch)

    def _measure(self, step: list[Key], answer: list[Key]) -> None:
        server, total = self.server, self._sum
        norm = 0.0
        if total is not None:  # nothing travels by rows where there is clipping
            norm = float(server.shard.norm([g for unit in total.grads for g in unit], total.unused))
        if len(server.servers) == 1:
            self._step(step, norm)
            return self._answer(answer)
        self._pending_answer = answer
        self._measuring = (step, {})
        if server.is_first:
            self._measured(server.comm.rank, norm)
        else:
            server.tell(server.servers[0], "norm", {"norm": norm})

    def _measured(self, rank: int, norm: float) -> None:
        """First server: another part of the whole gradient's norm."""
        assert self._measuring is not None
        _, norms = self._measuring
        norms[rank] = norm
        if len(norms) == len(self.server.servers):
            whole = sum(n * n for n in norms.values()) ** 0.5
            self._decide({"norm": whole})

    def _finish(self, norm: float) -> None:
        assert self._measuring is not None
        step, _ = self._measuring
        self._measuring = None
        self._step(step, norm)
        self._answer(self._pending_answer)
        backlog, self._backlog = self._backlog, []
        for decision in backlog:
            self._execute(decision)

    def _step(self, keys: list[Key], norm: float | None) -> None:
        server, total, added = self.server, self._sum, self._added
        self._sum, self._added = None, {}
        if total is None:
            return
        grads = self._scaled(total, norm)
        staleness = {key: self._staleness(key) for key in added}
        spans = sorted(set(added.values()))  # fed by steps, all pushes of one are over the same samples
        for number, unit in enumerate(grads):
            for span in spans:  # before: a snapshot that is taken now must know of them
                self.once[number].add(span)
            server.apply(number, unit, total.options[number], sorted(total.unused), spans)
        last = [self._last_of(key).meta for key in added if key in self._parts]
        self._facts = {
            "agreed": [any(wished) for wished in zip(*(m["wishes"] for m in last), strict=True)] or [False] * WISHES,
            "loss": sum(m["loss"] for m in last),
        }
        if not self._by_steps:
            for source, lease in added:
                for number in range(len(server.shard.units)):
                    server.record_update(source, number, staleness[source, lease], lease, pushes=len(added))

    def _scaled(self, total: _Sum, norm: float | None) -> list[list[Tensor]]:
        """The mean over what was gathered, clipped; rows that several pushes touched added up."""
        server = self.server
        factor = 1.0 if abs(total.weight - 1.0) <= 1e-3 or total.weight <= 0 else 1 / total.weight
        clip = None
        if norm is not None:
            limit = server.seed_meta["clip_norm"]
            clip = torch.clamp(
                limit / (torch.tensor(norm * factor, dtype=wider(g for unit in total.grads for g in unit)) + 1e-6),
                max=1.0,
            )
        units = []
        for number, grads in enumerate(total.grads):
            unit = _added_up(*grads) if server.shard.by_rows(number) else grads
            first = 1 if server.shard.by_rows(number) else 0
            if factor != 1.0:
                unit = [*unit[:first], *(g * factor for g in unit[first:])]
            if clip is not None:
                unit = [g.mul_(clip) for g in unit]
            units.append(unit)
        return units

    def _staleness(self, key: Key) -> int:
        if key not in self._parts:
            return 0
        meta = self._last_of(key).meta
        return max(0, self.server.versions[meta["unit"]] - int(meta["version"]))

    def _remember(self, key: Key) -> None:
        for recent in (self._told,) if key in self._dropped else (self._told, self._decided):
            recent[key] = None
            while len(recent) > _RECENT:
                del recent[next(iter(recent))]

    # Answering.

    def _answer(self, keys: Sequence[Key]) -> None:
        server = self.server
        for key in keys:
            self._remember(key)
            parts = self._parts.pop(key, None)
            self._have.pop(key, None)
            if parts is None:
                continue
            messages = [message for _, message in sorted(parts.items())]
            facts = self._facts if self._by_steps else {"dropped": key in self._dropped}
            self._dropped.discard(key)
            self._answered.append((messages, facts, server.copies.sent))
        self.acknowledged()

    def acknowledged(self) -> None:
        server = self.server
        while self._answered and self._answered[0][2] <= server.copies.acknowledged:
            messages, facts, _ = self._answered.pop(0)
            for message in messages:
                if message.source in server.gone:
                    continue
                lease = {}
                if message.meta["last"] and server.cursor is not None:
                    lease = server.lend(message.source)
                server.give(message, {**facts, **lease})
        server.serve_parked()

    def counts(self, lease: int, samples: int) -> bool:
        return super().counts(lease, samples) or any(push.lease == lease for push in self.gathering.waiting)

    @property
    def settled(self) -> bool:
        return self._settled

    def settle(self) -> None:
        server = self.server
        if server.is_first:
            self._let_go = True
            for other in server.servers[1:]:
                server.tell(other, "decision", {"settled": True})

    def _span(self, key: Key) -> Span:
        return span_of_lease(key[1], self._last_of(key).meta.get("size", 1))

    def _last_of(self, key: Key) -> Message:
        return next(m for m in self._parts[key].values() if m.meta["last"])


def _added_up(index: Tensor, values: Tensor) -> list[Tensor]:
    """Each row once, in order."""
    rows, place = torch.unique(index, return_inverse=True)
    return [rows, torch.zeros((len(rows), *values.shape[1:]), dtype=values.dtype).index_add_(0, place, values)]
