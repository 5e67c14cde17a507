"""The coordinator: in the launcher, it knows every rank, notices who is lost, and lets the survivors agree.

Ranks talk to it over a channel of their own: they join, send heartbeats, report what happened. It never touches a
tensor. Its rules:

- Nobody begins before all have joined; joining, and making model and data after it, have a deadline.
- A rank that leaves without a word is lost. So is one that falls silent: after a heartbeat if its process is stopped
  or gone, after the deadline if it runs, since code that holds the interpreter keeps it from beating. It is killed
  first: a stop becomes a death, and no ghost comes back.
- After a loss, a strategy that survives it goes on: once every live worker has reported how far it is, all are told
  the next generation, its members, and whose state to take (the one with most steps). One that says it is busy is
  waited for as long as it beats, up to a dozen deadlines.
- A rank that raised would raise again: the run ends, and its own error is what the user sees. If all it says is that
  another rank did not answer, that other one gets a moment to be found out first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from podium.cluster.base import Event
from podium.comm.base import DEPARTED, Message, Meta
from podium.comm.channel import Channel
from podium.comm.memory import WallClock
from podium.comm.sockets import Address
from podium.errors import CommError, DeadlineExceeded, Lost, PodiumError, RankFailed, RecordError
from podium.measure.records import Recorder
from podium.training import Report

COORDINATOR = 0xFFFF
"""The coordinator's own number among the endpoints."""

BUSY_DEADLINES = 12
"""How many deadlines the others wait for a worker that says it is busy (with validation, say) and goes on beating."""
_POLL_S = 0.05
_AT_ONCE = 1000
"""Messages taken up before the clock is looked at again."""
_GRACE_S = 2.0
"""How long, beyond a heartbeat, a rank that blames another has to wait for the other to be found out."""
_EXIT_S = 2.0
"""How long a process that hung up may take to end."""
_BLIND = 5
"""Heartbeats of silence allowed where nobody can say how the silent process is."""
_FRUITLESS = 3
"""Regroups of the same members without a step in between before the run is given up."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Who takes part, how long each may take, and what a loss means."""

    workers: int
    ranks: tuple[int, ...]
    """The number of each process: its worker's, or its server's where it has none."""
    survives_loss: bool
    heartbeat_s: float
    deadline_s: float
    start_deadline_s: float


@dataclass
class _Member:
    """What the coordinator knows of one process."""

    rank: int
    endpoints: list[int]
    address: dict[str, Address]
    seen: float = field(default_factory=time.monotonic)
    busy: float = 0.0
    """When it last said that it had something to do which takes as long as it takes."""
    begun: bool = False
    step: int = 0
    finished: bool = False
    failed: bool = False

    @property
    def active(self) -> bool:
        return not self.finished and not self.failed


class Coordinator:
    """Watches over the ranks of one run until all are through."""

    def __init__(
        self,
        rules: Rules,
        *,
        listen: Address,
        secret: bytes,
        recorder: Recorder,
        on_event: Callable[[Event], None] | None = None,
        kill: Callable[[int], None] | None = None,
        ended: Callable[[int, float], str | None] | None = None,
        runs: Callable[[int], bool] | None = None,
        clock: WallClock | None = None,
    ) -> None:
        """`kill(rank)` ends a rank's process for good; `ended(rank, seconds)` says how it ended, None if it has not.

        `runs(rank)` says whether its process is there and not stopped.
        """
        self.rules = rules
        self._recorder, self._on_event = recorder, on_event or (lambda _event: None)
        self._kill = kill or (lambda _rank: None)
        self._ended = ended or (lambda _rank, _seconds: None)
        self._runs = runs
        self._clock = clock or WallClock()
        self._channel = Channel(COORDINATOR, secret=secret, listen=listen)
        self._members: dict[int, _Member] = {}
        self._joined: dict[int, Message] = {}
        self._waiting: dict[int, Message] = {}  # live workers that reported a loss
        self._waiting_since = 0.0
        self._generation, self._fruitless, self._furthest = 0, 0, 0
        self._grouped: list[int] = []  # members of the present generation, once there was a loss
        self._blame: tuple[float, PodiumError] | None = None  # since when somebody blames an unknown other
        self._stop_sent = False
        self._began = self._looked = time.monotonic()
        self.reports: list[Report] = []
        self._do = {
            "beat": self._beat,
            "begun": self._begun,
            "event": self._event,
            "lost": self._lost,
            "done": self._done,
            "failed": self._failed,
            DEPARTED: self._departed,
        }

    @property
    def address(self) -> Address:
        return self._channel.address

    def run(self, stop: threading.Event | None = None) -> list[Report]:
        """Until every process is through; raises what made the run fail."""
        self._began = self._looked = time.monotonic()
        while not self._all_joined or any(not m.finished for m in self._members.values()):
            self._take_messages()
            self._watch_start()
            self._watch_silence()
            self._watch_stragglers()
            self._watch_blame()
            if stop is not None and stop.is_set() and self._all_joined and not self._stop_sent:
                self._tell_stop()
        return sorted(self.reports)

    def close(self) -> None:
        self._channel.close()

    @property
    def _all_joined(self) -> bool:
        return len(self._joined) == len(self.rules.ranks)

    # Messages.

    def _take_messages(self) -> None:
        """All that have come, so that nobody is called silent whose beat lies unread."""
        for n in range(_AT_ONCE):
            try:
                message = self._channel.recv(0.0 if n else _POLL_S)
            except DeadlineExceeded:
                break
            if message.kind == "join":
                self._join(message)
            elif message.source in self._members or self._is_from_a_stranger(message):
                self._do[message.kind](message)  # all others are the last words of one that was given up
        now = time.monotonic()
        if now - self._looked > self.rules.heartbeat_s / 2:
            # It was this process that stood still (suspended, starved): whoever was heard before is not to blame.
            for member in self._members.values():
                member.seen = now
        self._looked = now

    def _is_from_a_stranger(self, message: Message) -> bool:
        """Whether it tells of a failure before joining."""
        return message.kind == "failed" and message.source not in self._joined

    def _join(self, message: Message) -> None:
        meta = message.meta
        self._members[message.source] = _Member(message.source, meta["endpoints"], meta["addresses"])
        self._joined[message.source] = message
        if self._all_joined:
            book = {k: v for m in self._members.values() for k, v in m.address.items()}
            for waiting in self._joined.values():
                self._answer(waiting, {"addresses": book})

    def _beat(self, message: Message) -> None:
        member = self._members[message.source]
        member.seen = time.monotonic()
        if message.meta.get("busy"):
            member.busy = member.seen
        facts = message.meta.get("progress")
        if facts:
            member.step = facts["step"]
            if facts["step"] > self._furthest:
                self._furthest, self._fruitless = facts["step"], 0
            if message.source == self._first_worker():
                self._on_event(facts)

    def _begun(self, message: Message) -> None:
        self._members[message.source].begun = True

    def _event(self, message: Message) -> None:
        self._members[message.source].seen = time.monotonic()
        self._on_event(message.meta)

    def _lost(self, message: Message) -> None:
        self._members[message.source].seen = time.monotonic()
        if not self._waiting:
            self._waiting_since = time.monotonic()
        self._waiting[message.source] = message
        self._settle()

    def _done(self, message: Message) -> None:
        member = self._members[message.source]
        member.finished = True
        if message.meta.get("report"):
            self.reports.append(Report(**message.meta["report"]))
        self._answer(message, {})
        self._settle()

    def _failed(self, message: Message) -> None:
        meta = message.meta
        self._note("failed", failed=message.source, **meta)
        text, place = meta["message"], f"\n  at {meta['place']}" if meta.get("place") else ""
        who = f"rank {message.source}: "
        error = _as_error(meta["error"], f"{'' if text.startswith(who) else who}{text}{place}")
        member = self._members.get(message.source)
        if member is None or not isinstance(error, CommError):
            raise error
        member.failed = True
        if isinstance(error, DeadlineExceeded):
            error = DeadlineExceeded(f"{error}{_advice('deadline_s')}")
        self._blame = self._blame or (time.monotonic(), error)

    def _departed(self, message: Message) -> None:
        member = self._members[message.source]
        if member.active:
            cause = self._ended(message.source, _EXIT_S)
            self._kill(message.source)  # should its connection have broken while it lives
            self._lose(member, cause or "it left without a word")

    # What must not take too long.

    def _watch_start(self) -> None:
        limit = self.rules.start_deadline_s
        missing = [rank for rank in self.rules.ranks if rank not in self._joined]
        for rank in missing:  # a process that ends before it joined can send no word
            cause = self._ended(rank, 0.0)
            if cause is not None:
                self._take_messages()  # unless it could: its own words come first
                raise RankFailed(f"rank {rank} ended before it joined: {cause}")
        if time.monotonic() - self._began <= limit:
            return
        if missing:
            raise DeadlineExceeded(f"{_ranks(missing)} did not join within {limit:g} s (start_deadline_s)")
        late = [m.rank for m in self._members.values() if m.active and not m.begun]
        if late:
            raise DeadlineExceeded(
                f"{_ranks(late)} did not begin within {limit:g} s: still making the model or opening the data; "
                "if that needs longer, raise start_deadline_s"
            )

    def _watch_silence(self) -> None:
        now = time.monotonic()
        for member in list(self._members.values()):
            silent_s = now - member.seen
            if not member.active or silent_s <= min(self.rules.heartbeat_s, self.rules.start_deadline_s):
                continue
            limit, setting = self._allowed_silence(member.rank)
            if silent_s > limit:
                self._kill(member.rank)
                cause = f"silent for {silent_s:.1f} s, longer than {setting} allows, and killed"
                self._lose(member, cause, _advice(setting))

    def _allowed_silence(self, rank: int) -> tuple[float, str]:
        """How long this rank may be silent, and which setting says so."""
        rules = self.rules
        if not self._furthest:  # until the first step, all is part of starting
            return rules.start_deadline_s, "start_deadline_s"
        if self._runs is not None and self._runs(rank):
            return max((rules.deadline_s, "deadline_s"), (rules.heartbeat_s, "heartbeat_s"))
        return self._patience_s, "heartbeat_s"

    @property
    def _patience_s(self) -> float:
        """How soon a rank that died without a trace is found out."""
        return self.rules.heartbeat_s * (_BLIND if self._runs is None else 1)

    def _watch_stragglers(self) -> None:
        """Whoever lives but never reports the loss hangs in the user's code; the others must not hang with it."""
        limit, now = self.rules.deadline_s, time.monotonic()
        missing = [m for m in self._live_workers() if m.rank not in self._waiting] if self._waiting else []
        for member in missing:
            patience = min(member.busy, self._waiting_since + (BUSY_DEADLINES - 1) * limit)
            if now - max(self._waiting_since, patience) > limit:
                self._kill(member.rank)
                cause = f"hung for {limit:g} s while the others waited for it, and killed"
                self._lose(member, cause, _advice("deadline_s"))

    def _watch_blame(self) -> None:
        if self._blame is None:
            return
        since, error = self._blame
        nobody_else = not any(m.active for m in self._members.values())
        if nobody_else or time.monotonic() - since > self._patience_s + _GRACE_S:
            raise error

    # Losses.

    def _lose(self, member: _Member, cause: str, advice: str = "") -> None:
        rank = member.rank
        self._note("lost", lost=rank, cause=cause + advice, generation=self._generation, step=member.step)
        self._on_event({"event": "lost", "rank": rank, "cause": cause + advice, "step": member.step})
        del self._members[rank]
        self._waiting.pop(rank, None)
        left = [m for m in self._members.values() if m.rank < self.rules.workers and not m.failed]
        carries_server = any(e >= self.rules.workers for e in member.endpoints)
        if not self.rules.survives_loss or carries_server or not left or self._blame is not None:
            step = member.step or self._furthest  # a server counts no steps of its own
            raise Lost(f"{self._role(member)} was lost: {cause}; last heard of at step {step}{advice}")
        self._settle()

    def _role(self, member: _Member) -> str:
        beside = [e for e in member.endpoints if e >= self.rules.workers and e != member.rank]
        if member.rank >= self.rules.workers:
            return f"server {member.rank}"
        return f"worker {member.rank}" + (f" with {_ranks(beside, 'server')}" if beside else "")

    def _settle(self) -> None:
        """Once every live worker has reported the loss, tell them how to go on."""
        live = sorted(m.rank for m in self._live_workers())
        if not self._waiting or set(live) != set(self._waiting):
            return
        self._generation += 1
        self._fruitless = self._fruitless + 1 if live == self._grouped else 0
        self._grouped = live
        if self._fruitless >= _FRUITLESS:
            raise Lost(f"the workers could not form a group {_FRUITLESS} times in a row; is a link between them cut?")
        steps = {rank: self._waiting[rank].meta["steps_done"] for rank in live}
        source = max(live, key=lambda rank: (steps[rank], -rank))
        plan = {"generation": self._generation, "members": live, "source": source}
        for message in self._waiting.values():
            self._answer(message, plan)
        self._waiting.clear()
        took_s = time.monotonic() - self._waiting_since
        self._on_event({"event": "regroup", **plan, "step": steps[source], "took_s": took_s})

    def _live_workers(self) -> list[_Member]:
        return [m for m in self._members.values() if m.active and m.rank < self.rules.workers]

    # Words to the ranks, and for the record.

    def _tell_stop(self) -> None:
        self._stop_sent = True
        self._note("stop", step=self._furthest, reason="asked by the user")
        for member in self._members.values():
            if member.active:
                with contextlib.suppress(CommError):  # gone a moment ago: its departure is the next message
                    self._channel.send(member.rank, "stop", {})

    def _answer(self, message: Message, meta: Meta) -> None:
        with contextlib.suppress(CommError):  # gone a moment ago: its departure is the next message
            self._channel.reply(message, meta)

    def _note(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(RecordError):  # a full disk must not hide what went wrong
            self._recorder.write(kind, self._clock.now_ns(), **fields)

    def _first_worker(self) -> int:
        return min((m.rank for m in self._live_workers()), default=-1)


def _ranks(ranks: list[int], what: str = "rank") -> str:
    """`rank 2`, or `ranks 2, 3`."""
    return f"{what}{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _advice(setting: str) -> str:
    return f"; if it only needs longer, raise {setting}"


def _as_error(name: str, message: str) -> PodiumError:
    """A rank's error as the class it had, where it is one of ours, or the nearest that is made of a message alone."""
    import podium.errors

    cls = getattr(podium.errors, name, None)
    if not isinstance(cls, type) or not issubclass(cls, PodiumError):
        return RankFailed(message)
    simple = next(c for c in cls.__mro__ if issubclass(c, PodiumError) and c.__init__ is Exception.__init__)
    return simple(message)
