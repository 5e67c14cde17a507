"""A coordinator and its members, each with real sockets; the ranks are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from podium.engine.recovery import Regroup
from podium.engine.training import Report
from podium.launch.base import Event
from podium.launch.coordinator import Coordinator
from podium.launch.membership import Joined, Membership
from podium.launch.roster import Rules
from podium.records.recorder import Record, Recorder

SECRET = b"one of these tests"
SHORT_S = 0.3
LIMIT_S = 10.0


class Place:
    """A coordinator in a thread, and members that join it."""

    def __init__(
        self,
        folder: Path,
        processes: Sequence[tuple[int, ...]],
        rules: dict[str, Any],
        stop: threading.Event | None = None,
        **options: Any,
    ) -> None:
        """`processes` are the endpoints of each; `rules` the fields of Rules that are not about who is there."""
        self.folder, self.processes, self.rules = folder, processes, rules
        self.events: list[Event] = []
        self.killed: list[int] = []
        self.respawned: list[tuple[int, ...]] = []
        self.started: list[tuple[str, int]] = []
        self.recorder = Recorder(-1)
        given = {
            "kill": self.killed.append,
            "respawn": self.respawned.append,
            "start": lambda role, rank: self.started.append((role, rank)),
        }
        self.coordinator = Coordinator(
            Rules(ranks=tuple(endpoints[0] for endpoints in processes), **rules),
            listen=f"unix:{folder}/k",
            secret=SECRET,
            recorder=self.recorder,
            on_event=self.events.append,
            **{**given, **options},
        )
        self.pool = ThreadPoolExecutor(16)
        self.outcome = self.pool.submit(self.coordinator.run, stop)
        self.members: dict[int, Membership] = {}
        self._all: list[Membership] = []
        for endpoints in processes:
            self.member(endpoints[0])

    def member(self, rank: int) -> Membership:
        """One more process, or another one under the same number."""
        made = Membership(
            rank,
            self.coordinator.address,
            secret=SECRET,
            listen=f"unix:{self.folder}/m{len(self._all)}",
            **{name: self.rules[name] for name in ("heartbeat_s", "deadline_s", "start_deadline_s")},
        )
        self._all.append(made)
        self.members[rank] = made
        return made

    def join(self, *endpoints: int) -> Future[Joined]:
        """The process of these endpoints joins; its address says how many came before it."""
        member = self.members[endpoints[0]]
        number = self._all.index(member)
        return self.pool.submit(member.join, list(endpoints), {e: f"unix:/{e}-{number}" for e in endpoints}, LIMIT_S)

    def begin(self) -> list[Membership]:
        """All join, and the workers have done their first step."""
        joins = [self.join(*endpoints) for endpoints in self.processes]
        for endpoints, joined in zip(self.processes, joins, strict=True):
            joined.result(LIMIT_S)
            member = self.members[endpoints[0]]
            member.begun()
            if endpoints[0] < self.rules["workers"]:
                member.progress({"event": "progress", "step": 1, "position": 1})
        known = self.coordinator._roster.members
        wait_until(lambda: all(known[endpoints[0]].begun for endpoints in self.processes))
        return list(self.members.values())

    def arrive(self, *endpoints: int) -> Joined:
        """A process that was started later joins and begins."""
        self.member(endpoints[0])
        joined = self.join(*endpoints).result(LIMIT_S)
        self.members[endpoints[0]].begun()
        return joined

    def regroup(self, member: Membership | int, steps: int = 1, generation: int = 0) -> Future[Regroup]:
        found = self.members[member] if isinstance(member, int) else member
        return self.pool.submit(found.regroup, generation, steps)

    def leave(self, rank: int) -> None:
        """Without a word."""
        self.members[rank].close()

    def finish(self, *ranks: int) -> None:
        """These say that they are through; servers without a report."""
        for rank in ranks:
            servers = rank >= self.rules["workers"] and ("worker", rank) not in self.started
            report = None if servers else Report(rank, "", 1, 1, False, None, {})
            self.members[rank].done(report)
            self.members[rank].close()

    def lost(self) -> dict[int, str]:
        return {event["rank"]: event["cause"] for event in self.events if event["event"] == "lost"}

    def told(self, kind: str) -> list[Event]:
        return [event for event in self.events if event["event"] == kind]

    def records(self, kind: str) -> list[Record]:
        return [row for row in self.recorder.kept if row["kind"] == kind]

    def end(self) -> None:
        for member in self._all:  # before the coordinator, since members end with it
            member.close()
        self.coordinator.close()
        self.pool.shutdown()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)
