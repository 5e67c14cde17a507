"""The coordinator: in the launcher, it knows every rank, notices who is lost, and lets the survivors agree.

Ranks talk to it over a channel of their own: they join, send heartbeats, report what happened. It never touches a
tensor. Its rules:

- Nobody begins before all have joined, and joining has a deadline.
- A rank that leaves without a word, or is silent for longer than the heartbeat allows, is lost. A silent one is killed
  first: a stop becomes a death, and no ghost comes back.
- After a loss, a strategy that survives it goes on: once every live worker has reported how far it is, all are told
  the next generation, its members, and whose state to take (the one with most steps).
- A rank that raised would raise again: the run ends, and its own error is what the user sees.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from podium.cluster.base import Event
from podium.comm.base import DEPARTED, Message
from podium.comm.channel import Address, Channel
from podium.comm.memory import WallClock
from podium.errors import DeadlineExceeded, Lost, PodiumError, RankFailed
from podium.measure.records import Recorder
from podium.training import Report

COORDINATOR = 0xFFFF
"""The coordinator's own number among the endpoints."""

_POLL_S = 0.05
_FRUITLESS = 3
"""Regroups in a row without a step in between before the run is given up."""


@dataclass
class _Member:
    """What the coordinator knows of one process."""

    rank: int
    endpoints: list[int]
    address: dict[str, Address]
    seen: float = field(default_factory=time.monotonic)
    training: bool = False  # heartbeats count from the first step on; before it, the start deadline does
    step: int = 0
    finished: bool = False


class Coordinator:
    """Watches over the ranks of one run until all are through."""

    def __init__(
        self,
        *,
        workers: int,
        processes: int,
        listen: Address,
        secret: bytes,
        survives_loss: bool,
        heartbeat_s: float,
        start_deadline_s: float,
        recorder: Recorder,
        on_event: Callable[[Event], None] | None = None,
        kill: Callable[[int], None] | None = None,
        exit_cause: Callable[[int], str] | None = None,
        clock: WallClock | None = None,
    ) -> None:
        """`kill(rank)` ends a rank's process for good; `exit_cause(rank)` says how it ended."""
        self._workers, self._processes = workers, processes
        self._survives_loss, self._heartbeat_s = survives_loss, heartbeat_s
        self._start_deadline_s = start_deadline_s
        self._recorder, self._on_event = recorder, on_event or (lambda _event: None)
        self._kill, self._exit_cause = (
            kill or (lambda _rank: None),
            exit_cause or (lambda _rank: "it left without a word"),
        )
        self._clock = clock or WallClock()
        self._channel = Channel(COORDINATOR, secret=secret, listen=listen)
        self._members: dict[int, _Member] = {}
        self._joining: list[Message] = []
        self._waiting: dict[int, Message] = {}  # live workers that reported a loss
        self._generation = 0
        self._fruitless = 0
        self._furthest = 0
        self._stop_sent = False
        self._given_up: str | None = None
        self.reports: list[Report] = []

    @property
    def address(self) -> Address:
        return self._channel.address

    def run(self, stop: threading.Event | None = None) -> list[Report]:
        """Until every process is through; raises what made the run fail."""
        began = time.monotonic()
        do = {
            "join": self._join,
            "beat": self._beat,
            "event": self._event,
            "lost": self._lost,
            "done": self._done,
            "failed": self._failed,
            DEPARTED: self._departed,
        }
        while not self._members or any(not m.finished for m in self._members.values()) or self._joining:
            try:
                message = self._channel.recv(_POLL_S)
            except DeadlineExceeded:
                message = None
            if message is not None:
                do[message.kind](message)
            if self._given_up is not None:
                raise RankFailed(self._given_up)
            if self._joining and time.monotonic() - began > self._start_deadline_s:
                self._give_up_starting()
            if not self._members and time.monotonic() - began > self._start_deadline_s:
                raise DeadlineExceeded(f"no rank joined within {self._start_deadline_s:g} s")
            self._watch()
            if stop is not None and stop.is_set() and not self._stop_sent:
                self._tell_stop()
        return sorted(self.reports)

    def close(self) -> None:
        self._channel.close()

    def missing(self, rank: int) -> bool:
        """Whether this process has not joined yet."""
        return rank not in self._members

    # Messages.

    def _join(self, message: Message) -> None:
        meta = message.meta
        self._members[message.source] = _Member(message.source, meta["endpoints"], meta["addresses"])
        self._joining.append(message)
        if len(self._members) == self._processes:
            book = {k: v for m in self._members.values() for k, v in m.address.items()}
            for waiting in self._joining:
                self._channel.reply(waiting, {"addresses": book})
            self._joining.clear()

    def _beat(self, message: Message) -> None:
        member = self._members[message.source]
        member.seen = time.monotonic()
        facts = message.meta.get("progress")
        if facts:
            member.training, member.step = True, facts["step"]
            if facts["step"] > self._furthest:
                self._furthest, self._fruitless = facts["step"], 0
            if message.source == self._first_worker():
                self._on_event(facts)

    def _event(self, message: Message) -> None:
        self._members[message.source].seen = time.monotonic()
        self._on_event(message.meta)

    def _lost(self, message: Message) -> None:
        self._members[message.source].seen = time.monotonic()
        self._waiting[message.source] = message
        self._settle()

    def _done(self, message: Message) -> None:
        member = self._members[message.source]
        member.finished = True
        if message.meta.get("report"):
            self.reports.append(Report(**message.meta["report"]))
        self._channel.reply(message, {})
        self._settle()

    def _failed(self, message: Message) -> None:
        meta = message.meta
        self._recorder.write("failed", self._clock.now_ns(), failed=message.source, **meta)
        place = f"\n  at {meta['place']}" if meta.get("place") else ""
        raise _as_error(meta["error"], f"rank {message.source}: {meta['message']}{place}")

    def _departed(self, message: Message) -> None:
        member = self._members.get(message.source)
        if member is not None and not member.finished:
            self._lose(member, self._exit_cause(message.source))

    # Losses.

    def _watch(self) -> None:
        now = time.monotonic()
        for member in list(self._members.values()):
            limit = self._heartbeat_s if member.training else self._start_deadline_s
            if not member.finished and now - member.seen > limit:
                self._kill(member.rank)
                self._lose(member, f"silent for {now - member.seen:.1f} s, and killed")

    def give_up(self, why: str) -> None:
        """End the run with this error; called from outside the loop."""
        self._given_up = why

    def _lose(self, member: _Member, cause: str) -> None:
        rank = member.rank
        self._recorder.write(
            "lost", self._clock.now_ns(), lost=rank, cause=cause, generation=self._generation, step=member.step
        )
        self._on_event({"event": "lost", "rank": rank, "cause": cause, "step": member.step})
        del self._members[rank]
        self._waiting.pop(rank, None)
        left = [m for m in self._members.values() if m.rank < self._workers]
        carries_server = any(e >= self._workers for e in member.endpoints)
        if not self._survives_loss or carries_server or not left:
            role = "server" if rank >= self._workers else "worker"
            raise Lost(f"{role} {rank} was lost at step {member.step}: {cause}")
        self._settle()

    def _settle(self) -> None:
        """Once every live worker has reported the loss, tell them how to go on."""
        live = sorted(m.rank for m in self._members.values() if not m.finished and m.rank < self._workers)
        if not self._waiting or set(live) != set(self._waiting):
            return
        self._generation += 1
        self._fruitless += 1
        if self._fruitless > _FRUITLESS:
            raise Lost(f"the workers could not form a group {_FRUITLESS} times in a row; is a link between them cut?")
        steps = {rank: self._waiting[rank].meta["steps_done"] for rank in live}
        source = max(live, key=lambda rank: (steps[rank], -rank))
        plan = {"generation": self._generation, "members": live, "source": source}
        for message in self._waiting.values():
            self._channel.reply(message, plan)
        self._waiting.clear()
        self._on_event({"event": "regroup", **plan, "step": steps[source]})

    def _give_up_starting(self) -> None:
        have = sorted(self._members)
        raise DeadlineExceeded(
            f"only {len(have)} of {self._processes} processes joined within {self._start_deadline_s:g} s (have {have})"
        )

    def _tell_stop(self) -> None:
        self._stop_sent = True
        self._recorder.write("stop", self._clock.now_ns(), step=self._furthest, reason="asked by the user")
        for member in self._members.values():
            if not member.finished:
                self._channel.send(member.rank, "stop", {})

    def _first_worker(self) -> int:
        return min((m.rank for m in self._members.values() if not m.finished), default=-1)


def _as_error(name: str, message: str) -> PodiumError:
    """A rank's error as the class it had, where it is one of ours."""
    import podium.errors

    cls = getattr(podium.errors, name, None)
    simple = isinstance(cls, type) and issubclass(cls, PodiumError) and cls.__init__ is Exception.__init__
    return cls(message) if simple and cls is not None else RankFailed(message)
