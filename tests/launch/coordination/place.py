"""A coordinator and its members, each with real sockets; the ranks are threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from podium.comm.clocks import WallClock
from podium.comm.real.channel import Channel
from podium.engine.recovery import Regroup
from podium.engine.report import Report
from podium.launch.coordination.coordinator import Coordinator
from podium.launch.coordination.owner import Owner, ProcessOwner
from podium.launch.coordination.rules import COORDINATOR, Role, Rules
from podium.launch.event import Event
from podium.launch.membership import Membership, Peers
from podium.records.recorder import Record, Recorder
from tests.manual_clock import ManualClock

SECRET = b"one of these tests"
SHORT_S = 0.3
LIMIT_S = 10.0
HEARTBEAT_S = 0.06
"""Of the members: they beat six times as often."""


class Agent(Owner):
    """Notes what the coordinator asks for; it neither sees nor starts processes."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.killed: list[int] = []
        self.respawned: list[tuple[int, ...]] = []
        self.started: list[tuple[str, int]] = []

    def hear(self, event: Event) -> None:
        self.events.append(event)

    def kill(self, rank: int) -> None:
        self.killed.append(rank)

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        return None


@final
class Launcher(Agent, ProcessOwner):
    """Notes what it is to start, too; no process exists."""

    def __init__(
        self,
        runs: Callable[[int], bool] = lambda _rank: True,
        ended: Callable[[int, float], str | None] | None = None,
        start: Callable[[str, int], None] | None = None,
    ) -> None:
        super().__init__()
        self._runs, self._ended, self._start = runs, ended, start

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        return self._ended(rank, wait_s) if self._ended is not None else None

    def is_running(self, rank: int) -> bool:
        return self._runs(rank)

    def restart_servers(self, endpoints: tuple[int, ...]) -> None:
        self.respawned.append(endpoints)

    def start(self, role: Role, rank: int) -> None:
        if self._start is not None:
            self._start(role, rank)
        self.started.append((role, rank))


class Place:
    """A coordinator in a thread, and members that join it."""

    def __init__(
        self,
        folder: Path,
        processes: Sequence[tuple[int, ...]],
        rules: dict[str, Any],
        stop: threading.Event | None = None,
        still: bool = False,
        owns_processes: bool = True,
        records: Path | None = None,
        **launcher: Any,
    ) -> None:
        """`processes` are the endpoints of each; `rules` the fields of Rules that are not about who is there.

        Where time is `still`, the coordinator's clock moves by `pass_time` alone; members beat in wall time.
        """
        self.folder, self.processes, self.rules = folder, processes, rules
        self.launcher = Launcher(**launcher) if owns_processes else Agent()
        self.events, self.killed = self.launcher.events, self.launcher.killed
        self.respawned, self.started = self.launcher.respawned, self.launcher.started
        self.recorder = Recorder(-1, None if records is None else records / "launcher.jsonl")
        self.clock = ManualClock() if still else WallClock()
        self.coordinator = Coordinator(
            Rules(ranks=tuple(endpoints[0] for endpoints in processes), **rules),
            self.launcher,
            Channel(COORDINATOR, secret=SECRET, listen=f"unix:{folder}/k"),
            self.recorder,
            self.clock,
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
            heartbeat_s=HEARTBEAT_S,
            deadline_s=LIMIT_S,
            start_deadline_s=self.rules["start_deadline_s"],
        )
        self._all.append(made)
        self.members[rank] = made
        return made

    def pass_time(self, seconds: float) -> None:
        """In steps that members which beat survive, and after which the coordinator does not think it was suspended."""
        assert isinstance(self.clock, ManualClock)
        step = min(self.rules[name] for name in ("heartbeat_s", "deadline_s", "start_deadline_s")) / 3
        while seconds > 0 and not self.outcome.done():
            self.clock.advance(min(step, seconds))
            self.hear_all()
            seconds -= step

    def hear_all(self) -> None:
        """Until the coordinator has heard all members that beat, and has checked all deadlines after that."""
        known, now = self.coordinator._roster.members, self.clock.now_s()
        beating = [rank for rank, m in self.members.items() if m.joined and not m._closing.is_set()]

        def is_heard(rank: int) -> bool:
            member = known.get(rank)
            return member is None or not member.active or member.heard_at >= now

        wait_until(lambda: self.outcome.done() or all(map(is_heard, beating)))
        for _ in range(2):  # the first look may be followed by checks that began before
            if isinstance(self.clock, ManualClock):
                self.clock.advance(1e-6)
            now = self.clock.now_s()
            wait_until(lambda now=now: self.outcome.done() or self.coordinator._heartbeats._looked_at >= now)

    def join(self, *endpoints: int) -> Future[Peers]:
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

    def arrive(self, *endpoints: int) -> Peers:
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
        self.recorder.close()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.002)
