"""The end of a segment: workers leave, wait for each other, and collect parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from podium.engine.votes import Vote
from podium.servers.leases.lease import PATIENCE
from podium.servers.ranges import Layout, Range
from podium.servers.wire.messages import Home, Leave, Skip, State, Take, decode, encode
from podium.servers.wire.moments import unpack
from podium.servers.wire.parcels import Assembly, Kept, Place

if TYPE_CHECKING:
    from podium.comm.base import Handle, Message
    from podium.engine.worker import Worker
    from podium.servers.worker_side.served import Served

Keep = Callable[[Sequence[Range], list[dict[str, Any]]], None]
"""Stores some ranges' optimizer state, one mapping per part."""


def break_out(worker: Worker) -> None:
    """This worker stops training in this segment: its leases are lent to other workers, and none waits for it."""
    comm = worker.comm
    done = worker.leases.take_applied()
    comm.wait(*(comm.call(server, "skip", encode(Skip(broke=True, done=done))) for server in comm.servers))


def leave(worker: Worker, served: Served, keep: Keep) -> set[int] | None:
    """Wait until all workers have left, then collect the parameters; None where the servers were never seeded.

    The optimizer's state is passed to `keep`, some ranges at a time. Returns the workers that stayed to the end: where
    one is missing, all workers agree here to pause, and will regroup.
    """
    live = _take_home(worker, served, keep)
    _say_home(worker)
    return live


def _take_home(worker: Worker, served: Served, keep: Keep) -> set[int] | None:
    comm = worker.comm
    calls = [comm.call(server, "leave", encode(Leave())) for server in comm.servers]
    answers = [a for a in comm.wait(*calls, deadline_s=PATIENCE * comm.deadline_s) if a is not None]
    states = [decode(State, answer) for answer in answers]
    if any(state.empty for state in states):
        return None
    live = set(states[0].workers)
    homes = [_Home(worker, server, layout, keep) for server, layout in zip(comm.servers, served.layouts, strict=True)]
    for home, answer in zip(homes, answers, strict=True):
        home.heard(answer)
    while under_way := [home for home in homes if home.next is not None]:
        more = comm.wait(*[home.call() for home in under_way])
        for home, part in zip(under_way, more, strict=True):
            assert part is not None
            home.heard(part)
    if live != set(comm.workers):
        worker.votes.agree(Vote(pause=True))
    return live


def _say_home(worker: Worker) -> None:
    """Tell the servers that this worker has the state.

    A server that is lost after it has answered some workers' `leave` is restored without knowing that they left, and
    the other workers would wait for them. In simulated time no server is lost.
    """
    comm = worker.comm
    if not comm.clock.is_simulated:
        home = encode(Home(list(worker.progress.segment)))
        comm.wait(*[comm.call(server, "home", home) for server in comm.servers])


class _Home:
    """Receives one server's parameters and optimizer state, in one message or in several."""

    def __init__(self, worker: Worker, server: int, layout: Layout, keep: Keep) -> None:
        self._worker, self._server, self._layout, self._keep = worker, server, layout, keep
        self._assembly = Assembly()
        self.next: Place | None = None
        """Where the next message must begin; None: all has arrived."""

    def call(self) -> Handle:
        assert self.next is not None
        return self._worker.comm.call(self._server, "take", encode(Take(self.next)))

    def heard(self, answer: Message) -> None:
        ranges, units, state = self._layout.ranges, self._layout.units, decode(State, answer)
        if state.at is None:  # all at once
            count = len(ranges)
            return self._take(ranges, Kept(answer.body[:count], {"state": state.state}, answer.body[count:]))
        for unit, kept in self._assembly.take(state, answer.body):
            self._take(units[unit].of(ranges), kept)
        self.next = self._assembly.expects

    def _take(self, ranges: Sequence[Range], kept: Kept) -> None:
        for r, tensor in zip(ranges, kept.params, strict=True):
            r.of(self._worker.params).copy_(tensor)
        self._keep(ranges, unpack(ranges, kept.kinds, kept.state))
