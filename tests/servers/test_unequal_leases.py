"""Leases of unequal length (`steps=speed`), lost workers, and a first server that is restored from an old snapshot.

Real servers, their messages delivered one by one in an order that hypothesis chooses. The model begins with zeros and
moves by plain SGD with a rate of 1; the gradient over slice k is 2**k. So each parameter tells which slices have moved
it: in the end it must be -(2**slices - 1) on every server.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD

from podium.comm.base import DEPARTED, Communicator, Message, Meta
from podium.comm.clocks import WallClock
from podium.engine.flat import Flat
from podium.errors import Lost
from podium.records.recorder import Recorder
from podium.servers.gate import Rules
from podium.servers.ranges import lay_out
from podium.servers.server import CopyOptions, Server, ServerOptions

SLICE, SLICES, WORKERS, SERVERS = 2, 40, 3, 2
FIRST, SECOND = WORKERS, WORKERS + 1
UNIT_BYTES = 40


class Wire(Communicator):
    """One server's end: what it sends waits until the test delivers it."""

    def __init__(self, rank: int, net: Net) -> None:
        super().__init__(rank, tuple(range(WORKERS)), (FIRST, SECOND), WallClock())
        self.net = net

    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        self.net.send(self.rank, to, Message(self.rank, kind, meta, tuple(t.clone() for t in body)))

    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        if to.source not in self.net.workers:
            raise Lost("it is gone")
        self.net.queue(self.rank, to.source).append(Message(self.rank, to.kind, meta, tuple(body), to.call))

    def _none(self, *_: Any, **__: Any) -> Any:
        raise AssertionError("a server has no use for it")

    all_reduce = broadcast = all_gather = exchange = _draw = call = recv = _poll = _wait = regroup = _none


class Trainer:
    """A worker: draws, computes at a pace of its own, pushes to all servers, waits for all answers."""

    def __init__(self, rank: int, net: Net, pace: int) -> None:
        self.rank, self.net, self.pace = rank, net, pace
        self.lease: Meta | None = None
        self.done, self.over, self.ended = -1, False, False
        self.calls: dict[int, tuple[int, Message]] = {}  # without an answer yet
        self.asked: dict[int, tuple[int, Message]] = {}  # the same with those that have one, until all have

    def act(self) -> None:
        self.asked.clear()
        if self.lease is None:
            return self._call(FIRST, "draw", {"done": self.done, "votes": [False] * 3})
        number, size = self.lease["lease"], self.lease["slice"][1]
        value = float(sum(2**k for k in range(number // SLICE, (number + size) // SLICE)))
        for m, layout in enumerate(self.net.layouts):
            for u, unit in enumerate(layout.units):
                last = u == len(layout.units) - 1
                meta = {"unit": u, "lease": number, "size": size, "version": 0, "options": [{"lr": 1.0}]}
                facts = {"done": self.done, "votes": [False] * 3, "lend": True, "pace": self.pace} if last else {}
                body = [torch.full((r.stop - r.start,), value, dtype=torch.float64) for r in unit.of(layout.ranges)]
                self._call(FIRST + m, "push", {**meta, "unused": [], "early": False, "last": last, **facts}, body)
        self.done, self.lease = number, None

    def break_out(self) -> None:
        """It trains no more, gives back what it was lent, and waits until all are through."""
        self.asked.clear()
        self.over = True
        for server in (FIRST, SECOND):
            self._call(server, "skip", {"broke": True, "done": self.done})

    def _call(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        self.net.calls += 1
        message = Message(self.rank, kind, meta, tuple(body), self.net.calls)
        self.calls[self.net.calls] = self.asked[self.net.calls] = to, message
        self.net.send(self.rank, to, message)

    def hear(self, answer: Message) -> None:
        asked = self.calls.pop(answer.call, None)
        if asked is not None and answer.kind == "skip" and not self.calls:
            self.asked.clear()
            for server in (FIRST, SECOND):
                self._call(server, "leave", {})
        if asked is None or asked[1].meta.get("last") is False or answer.source != FIRST:
            return
        if "lease" in answer.meta:
            self.lease = answer.meta
        elif answer.kind == "draw":
            self.over = self.ended = True


class Net:
    """Everybody, and what is on its way between any two of them."""

    def __init__(self, folder: Path, paces: Sequence[int]) -> None:
        self.folder, self.calls = folder, 0
        self._queues: dict[tuple[int, int], deque[Message]] = {}
        self.flat = make_flat()[0]
        self.layouts = lay_out(self.flat, SERVERS, UNIT_BYTES)
        self.servers = {rank: self.server(rank) for rank in (FIRST, SECOND)}
        self.workers = {rank: Trainer(rank, self, pace) for rank, pace in enumerate(paces)}
        for m, server in enumerate(self.servers.values()):
            body = tuple(r.of(self.flat.params) for r in self.layouts[m].ranges)
            server.take_up(Message(0, "seed", work(), body, 0))
        self._queues.clear()

    def server(self, rank: int) -> Server:
        flat, optimizer = make_flat()
        copies = CopyOptions(snapshot=self.folder / f"{rank}", every=10**9)
        return Server(Wire(rank, self), flat, optimizer, recorder=Recorder(rank), options=ServerOptions(copies=copies))

    def queue(self, source: int, to: int) -> deque[Message]:
        return self._queues.setdefault((source, to), deque())

    def send(self, source: int, to: int, message: Message) -> None:
        self.queue(source, to).append(message)

    def ways(self) -> list[tuple[int, int]]:
        return sorted(way for way, queue in self._queues.items() if queue)

    def deliver(self, source: int, to: int) -> None:
        message = self.queue(source, to).popleft()
        if to in self.servers:
            self.servers[to].take_up(message)
        elif to in self.workers:
            self.workers[to].hear(message)

    def kill_worker(self, rank: int) -> None:
        """What it has sent arrives; what was sent to it does not."""
        del self.workers[rank]
        for server in self.servers:
            self.queue(server, rank).clear()
            self.send(rank, server, Message(rank, DEPARTED, {}))

    def snapshot(self) -> None:
        first = self.servers[FIRST]
        first.parts.snapshots.save(first.segment)
        first.parts.snapshots.wait()

    def replace_first(self) -> None:
        """The first server is killed and restored from its snapshot; its callers call again, as a channel does."""
        self.send(FIRST, SECOND, Message(FIRST, DEPARTED, {}))
        for rank in (*range(WORKERS), SECOND):
            self.queue(rank, FIRST).clear()
            if rank != SECOND:
                self.queue(FIRST, rank).clear()
        gone = [rank for rank in range(WORKERS) if rank not in self.workers]
        self.servers[FIRST] = self.server(FIRST)
        self.servers[FIRST].restore()
        for rank in gone:  # as `watch` finds out
            self.send(rank, FIRST, Message(rank, DEPARTED, {}))
        for worker in self.workers.values():
            if any(to == FIRST for to, _ in worker.calls.values()):  # all of a push, also what was answered
                again = {call: asked for call, asked in worker.asked.items() if asked[0] == FIRST}
                worker.calls |= again
                for _, message in again.values():
                    self.send(worker.rank, FIRST, message)


def make_flat() -> tuple[Flat, SGD]:
    model = nn.Linear(5, 4).double()
    for p in model.parameters():
        nn.init.zeros_(p)
    optimizer = SGD(model.parameters(), lr=1.0)
    return Flat(model, optimizer, bucket_bytes=1 << 20), optimizer


def work() -> Meta:
    return {
        "workers": list(range(WORKERS)),
        "servers": [FIRST, SECOND],
        "addresses": [],
        "rules": Rules().to_dict(),
        "mitigation": "none",
        "strength": None,
        "clip_norm": None,
        "leases": True,
        "samples": 10 * SLICE,
        "position": 0,
        "end": SLICES * SLICE,
        "batch_size": 2 * SLICE,
        "unit_bytes": UNIT_BYTES,
        "parts": 2,
        "local_steps": 5,
        "by_speed": True,
        "state": {},
    }


@pytest.mark.slow
@settings(deadline=None, max_examples=60, phases=[Phase.explicit, Phase.generate])  # a smaller seed is no simpler
@given(seed=st.integers(0, 2**32))
def test_every_sample_is_applied_once_by_every_server_whoever_is_lost(
    tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    net = Net(tmp_path_factory.mktemp("net"), [chance.randint(1, 6) for _ in range(WORKERS)])
    faults, snapshots = 4, 4
    for _ in range(4000):
        ready = [worker for worker in net.workers.values() if not worker.calls and not worker.over]
        deeds: list[tuple[Any, ...]] = [(net.deliver, *way) for way in net.ways()]
        deeds += [(worker.act,) for worker in ready]
        if not deeds:
            break
        rare = chance.random()
        if rare < 0.02 and snapshots:
            snapshots -= 1
            net.snapshot()
        elif rare < 0.04 and faults and not all(worker.over for worker in net.workers.values()):
            faults -= 1
            train = [rank for rank, worker in net.workers.items() if not worker.over]
            if len(train) > 1 and chance.random() < 0.4:
                net.kill_worker(chance.choice(sorted(net.workers)))
            elif len(train) > 1 and ready and chance.random() < 0.4:
                chance.choice(ready).break_out()
            elif not any(worker.ended for worker in net.workers.values()):
                net.replace_first()
        else:
            deed, *args = chance.choice(deeds)
            deed(*args)
        for worker in net.workers.values():
            worker.pace = chance.randint(1, 6)
    assert all(worker.over for worker in net.workers.values()), "somebody waits for ever"
    want = {-float(2**SLICES - 1)}
    for rank, server in net.servers.items():
        for unit in range(len(server.store.shard.units)):
            got = {x for p in server.store.shard.of(unit) for x in p.tolist()}
            assert got == want, f"server {rank}, unit {unit}: {got} and not {want}"


@settings(deadline=None, max_examples=24, phases=[Phase.explicit, Phase.generate])  # a smaller seed is no simpler
@given(seed=st.integers(0, 2**32), breaks_out=st.booleans())
def test_servers_are_asked_once_they_have_all_that_was_pushed_before(
    tmp_path_factory: pytest.TempPathFactory, seed: int, breaks_out: bool
) -> None:
    """Pushes to the second server are late, and between them lies the lease of a worker that was lost: only when they
    are there can that server say where the lost lease ends."""
    chance = random.Random(seed)
    net = Net(tmp_path_factory.mktemp("net"), [1] * WORKERS)

    def act(*ranks: int) -> None:
        for rank in ranks:
            net.workers[rank].pace = chance.randint(1, 6)
            net.workers[rank].act()

    def deliver(late: bool = False) -> None:
        while ways := [(source, to) for source, to in net.ways() if not (late and source < WORKERS and to == SECOND)]:
            net.deliver(*chance.choice(ways))

    for place in range(3):  # they draw, push, and push again
        act(0, 1, 2)
        deliver()
        if place == 1:
            net.snapshot()
    act(1, 2)
    deliver(late=True)
    if breaks_out:
        net.workers[0].break_out()
    else:
        net.kill_worker(0)
    net.replace_first()
    deliver(late=True)
    deliver()
    while ready := [rank for rank, worker in net.workers.items() if not worker.calls and not worker.over]:
        act(*ready)
        deliver()
    assert all(worker.over for worker in net.workers.values()), "somebody waits for ever"
    for server in net.servers.values():
        assert {x for p in server.store.shard.params for x in p.tolist()} == {-float(2**SLICES - 1)}
