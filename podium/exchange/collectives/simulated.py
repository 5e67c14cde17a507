"""Simulate how long a schedule takes on given links, event by event.

A member has one uplink, one downlink and one adder; each serves one request at a time, first come first served. A
message occupies the sender's uplink for size / up, and the receiver's downlink for size / down, from alpha later or
when the downlink is free; it has arrived when both are done.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from podium.comm.schedule import AT_HOST, Chain, Move
from podium.errors import CommError

Rate = float | Sequence[float]
"""Bytes per second, for all members or for each."""


def simulate(
    schedules: Sequence[Sequence[Chain]], itemsize: int, alpha: float, up: Rate, down: Rate, gamma: float = 0.0
) -> float:
    """Seconds until the last member is done. `alpha` is seconds of latency, `gamma` seconds to add a byte."""
    return _Exchange(schedules, itemsize, alpha, up, down, gamma).run()


class _Exchange:
    def __init__(
        self, schedules: Sequence[Sequence[Chain]], itemsize: int, alpha: float, up: Rate, down: Rate, gamma: float
    ) -> None:
        members = len(schedules)
        self._schedules, self._itemsize, self._alpha, self._gamma = schedules, itemsize, alpha, gamma
        self._up = [up] * members if isinstance(up, int | float) else list(up)
        self._down = [down] * members if isinstance(down, int | float) else list(down)
        self._now = 0.0
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0  # events at the same time run in the order in which they were added
        self._at = [[0] * len(chains) for chains in schedules]
        self._here: set[tuple[int, int, int, int]] = set()  # to, chain, round, from
        self._queue: list[deque[tuple[int, Move]]] = [deque() for _ in range(members)]
        self._sending = [False] * members
        self._down_free = [0.0] * members
        self._adder_free = [0.0] * members

    def run(self) -> float:
        for member, chains in enumerate(self._schedules):
            for c in range(len(chains)):
                self._go_on(member, c)
        while self._agenda:
            self._now, _, action = heapq.heappop(self._agenda)
            action()
        if any(at != [len(chain) for chain in chains] for at, chains in zip(self._at, self._schedules, strict=True)):
            raise CommError("the schedule does not end: a member waits for a message that no member sends")
        return self._now

    def _later(self, time: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._agenda, (time, self._number, action))
        self._number += 1

    def _go_on(self, member: int, c: int) -> None:
        """Run a chain until it has to wait."""
        chain = self._schedules[member][c]
        while self._at[member][c] < len(chain):
            move = chain[self._at[member][c]]
            if move.kind == "send":
                self._queue[member].append((c, move))
                if not self._sending[member]:
                    self._begin(member)
            elif move.kind in AT_HOST:
                if move.kind == "fold" and len(move.members) > 1 and self._gamma:
                    self._add(member, c, move, len(move.members) - 1)
                    return
            else:
                name = (member, c, move.round, move.peer)
                if name not in self._here:
                    return
                self._here.remove(name)
                if move.kind != "put" and self._gamma:
                    self._add(member, c, move)
                    return
            self._at[member][c] += 1

    def _begin(self, member: int) -> None:
        """Start to send the next message."""
        self._sending[member] = bool(self._queue[member])
        if not self._sending[member]:
            return
        c, move = self._queue[member].popleft()
        nbytes = (move.stop - move.start) * self._itemsize
        sent = self._now + nbytes / self._up[member]
        received = max(self._now + self._alpha, self._down_free[move.peer]) + nbytes / self._down[move.peer]
        self._down_free[move.peer] = arrives = max(received, sent + self._alpha)
        self._later(sent, partial(self._begin, member))
        self._later(arrives, partial(self._arrive, move.peer, c, move.round, member))

    def _arrive(self, to: int, c: int, round_: int, source: int) -> None:
        self._here.add((to, c, round_, source))
        self._go_on(to, c)

    def _add(self, member: int, c: int, move: Move, times: int = 1) -> None:
        seconds = (move.stop - move.start) * self._itemsize * self._gamma * times
        self._adder_free[member] = done = max(self._now, self._adder_free[member]) + seconds
        self._later(done, partial(self._added, member, c))

    def _added(self, member: int, c: int) -> None:
        self._at[member][c] += 1
        self._go_on(member, c)
