"""The coordinator: in the launcher, it knows every rank, notices who is lost, and lets the others agree.

Ranks talk to it over a channel of their own: they join, send heartbeats, report what happened. It never touches a
tensor. Its rules:

- Nobody begins before all have joined; joining, and making model and data after it, have a deadline.
- A rank that leaves without a word is lost. So is one that falls silent: after a heartbeat if its process is stopped
  or gone, after the deadline if it runs, since code that holds the interpreter keeps it from beating. It is killed
  first: a stop becomes a death, and no ghost comes back.
- A worker that servers wait for is lost once it has made no step for a deadline; a busy one, as below.
- After a loss, a strategy that survives it goes on: once every live worker has reported how far it is, all are told
  the plan: the next generation, its members, and whose state to take (the one with most steps). One that says it is
  busy is waited for as long as it beats, up to a dozen deadlines.
- A lost server is started anew, where strategy and launcher can, and whoever misses it is told its new address.
- Workers and servers may be added or retired on request (`podium.launch.change`): the next plan carries it out. One
  that dies while starting is left out; the run does not depend on it yet.
- A rank that raised would raise again: the run ends, and its own error is what the user sees. If all it says is that
  another rank did not answer, that other one gets a moment to be found out first.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from podium.comm.base import DEPARTED, Message, Meta
from podium.comm.channel import Channel
from podium.comm.memory import WallClock
from podium.comm.sockets import Address
from podium.comm.tls import Tls
from podium.engine.training import Report
from podium.errors import CommError, ConfigError, DeadlineExceeded, Lost, PodiumError, RankFailed, RecordError
from podium.launch.base import Event
from podium.launch.change import Changes
from podium.launch.replacing import Replacements
from podium.launch.roster import FIRST_RESERVED, Member, Role, Roster, Rules, Start, name_ranks
from podium.records.recorder import Recorder

COORDINATOR = 0xFFFF
"""The coordinator's own number among the endpoints."""
OPERATOR = FIRST_RESERVED
"""The number of whoever asks for a change from outside."""

FIRST_ASKER = 0x10000
"""From here on are the numbers of ranks that ask for the run's settings before they join: this plus their rank."""

BUSY_DEADLINES = 12
"""How many deadlines the others wait for a worker that says it is busy (with validation, say) and goes on beating."""
_POLL_S = 0.05
_AT_ONCE = 1000
"""Messages taken up before the clock is looked at again."""
_GRACE_S = 2.0
"""How long, beyond a heartbeat, a rank that blames another has to wait for the other to be found out."""
_EXIT_S = 2.0
"""How long a process that hung up may take to end."""
_TOGETHER_S = 0.5
"""How long the end of a run waits for others that were lost at the same moment, so that the error names them all."""
_LEAVE_S = 10.0
"""How long a server that came later, whom perhaps no worker ever met, may stay after the last worker has ended."""
_BLIND = 5
"""Heartbeats of silence allowed where nobody can say how the silent process is."""
_FRUITLESS = 3
"""Regroups of the same members without a step in between before the run is given up."""


class _Awaits(NamedTuple):
    """For whom a server waits."""

    process: int
    late: dict[int, float]
    """Since when, by worker."""
    waiting: frozenset[int]
    """Workers that wait for this server."""


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
        respawn: Callable[[tuple[int, ...]], None] | None = None,
        start: Callable[[Role, int], None] | None = None,
        clock: WallClock | None = None,
        tls: Tls | None = None,
        settings: Meta | None = None,
    ) -> None:
        """`settings` are told to whoever asks; asking needs the secret, as all does.

        `kill(rank)` ends a rank's process for good; `ended(rank, seconds)` says how it ended, None if it has not.

        `runs(rank)` says whether its process is there and not stopped. `respawn(endpoints)` starts a process in which
        these servers live again; its number is the first of them. `start(role, rank)` starts one more rank.
        """
        self.rules, self._settings = rules, settings or {}
        self._recorder, self._on_event = recorder, on_event or (lambda _event: None)
        self._kill = kill or (lambda _rank: None)
        self._ended = ended or (lambda _rank, _seconds: None)
        self._runs, self._respawn = runs, respawn
        self._clock = clock or WallClock()
        self._channel = Channel(COORDINATOR, secret=secret, listen=listen, tls=tls)
        self._roster = Roster(rules)
        self._members = self._roster.members
        self._replacements = Replacements(rules, self._roster, self._answer)
        self._joining: list[Message] = []
        self._waiting: dict[int, Message] = {}  # workers that wait for a plan
        self._waiting_since: float | None = None  # when the first of the present generation reported
        self._generation, self._fruitless, self._furthest = 0, 0, 0
        self._grouped: list[int] = []  # members of the present generation, once there was a plan
        self._called_for = -1  # the generation whose workers were last called together
        self._awaited: dict[int, _Awaits] = {}  # by server
        self._changes = Changes(rules, self._roster, start=start, give_up=self._give_up, announce=self._announce)
        self._blame: tuple[float, PodiumError] | None = None  # since when somebody blames an unknown other
        self._fallen: list[tuple[float, Member, str]] = []  # when who was lost, and how
        self._fatal: tuple[float, Member, str, str] | None = None  # since when, by whose loss and cause; what to do
        self._asked_to_stop = False  # by a rank, where no launcher hears of signals
        self._stop_sent = False
        self._through: float | None = None  # when the last worker ended
        self._looked = time.monotonic()
        self.reports: list[Report] = []
        self._do = {
            "beat": self._beat,
            "begun": self._begun,
            "event": self._event,
            "lost": self._lost,
            "where": self._where,
            "awaits": self._awaits,
            "done": self._done,
            "failed": self._failed,
            DEPARTED: self._departed,
        }

    @property
    def address(self) -> Address:
        return self._channel.address

    def run(self, stop: threading.Event | None = None) -> list[Report]:
        """Until every process is through; raises what made the run fail."""
        self._looked = time.monotonic()
        for first in self._roster.starting.values():
            first.since = self._looked
        while self._roster.starting or any(not m.finished for m in self._members.values()):
            self._take_messages()
            self._watch_start()
            self._watch_silence()
            self._watch_stragglers()
            self._watch_awaited()
            self._watch_leavers()
            self._watch_fatal()
            self._watch_blame()
            asked = self._asked_to_stop or (stop is not None and stop.is_set())
            if asked and self._roster.all_joined and not self._stop_sent:
                self._tell_stop()
        self._watch_fatal()
        return sorted(self.reports)

    def announce_end(self, why: str, *, but: int) -> None:
        """Tell all ranks, except one that knows, that the run is over, so that each can say so before it ends."""
        for message in self._joining:
            if message.source != but:
                self._answer(message, {"ended": why})
        for member in self._members.values():
            if member.active and member.rank != but:
                self._send(member, "ended", {"why": why})

    def see_off(self, limit_s: float) -> None:
        """Wait until all ranks have hung up, as they do last of all; not longer than this."""
        until = time.monotonic() + limit_s
        while self._channel.peers and time.monotonic() < until:
            with contextlib.suppress(DeadlineExceeded):
                self._channel.recv(_POLL_S)

    def close(self) -> None:
        self._channel.close()

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
            elif message.kind == "scale" and message.source == OPERATOR:
                self._scale(message)
            elif message.kind == "settings" and message.source >= FIRST_ASKER:
                self._answer(message, self._settings)
            elif message.source in self._members or self._is_from_a_stranger(message):
                self._do[message.kind](message)  # all others are the last words of one that was given up
        now = time.monotonic()
        if now - self._looked > self.rules.heartbeat_s / 2:
            # It was this process that stood still (suspended, starved): whoever was heard before is not to blame.
            for member in self._members.values():
                member.seen = now
        self._looked = now

    def _is_from_a_stranger(self, message: Message) -> bool:
        """Whether it tells of a failure before joining. Words of a replacement cannot be told from the lost one's."""
        source = message.source
        return message.kind == "failed" and source in self._roster.starting and source not in self._roster.known

    def _join(self, message: Message) -> None:
        member = self._roster.admit(message)
        if member is None:
            return  # it was given up, and its process is killed
        self._joining.append(message)
        if self._roster.all_joined:
            for waiting in self._joining:
                self._answer(waiting, self._book(self._members.get(waiting.source)))
            self._joining.clear()
            self._replacements.tell()
        if self._stop_sent:
            self._send(member, "stop", {})

    def _book(self, reader: Member | None) -> Meta:
        """Who is where. A new server also counts itself and those that are to come with it."""
        servers = self._roster.servers
        if reader is not None and reader.standing == "newcomer" and reader.role == "server":
            servers = servers | self._roster.coming_servers()
        return {
            "addresses": {str(rank): address for rank, address in self._roster.addresses.items()},
            "workers": sorted(self._roster.workers),
            "servers": sorted(servers),
        }

    def _beat(self, message: Message) -> None:
        member = self._members[message.source]
        member.seen = time.monotonic()
        if message.meta.get("busy"):
            member.busy = member.seen
        if message.meta.get("stop"):
            self._asked_to_stop = True
        facts = message.meta.get("progress")
        if facts:
            if facts["step"] != member.step:
                member.step, member.moved = facts["step"], member.seen
            if facts["step"] > self._furthest:
                self._furthest, self._fruitless = facts["step"], 0
            if message.source == self._first_worker():
                self._on_event(facts)

    def _begun(self, message: Message) -> None:
        member = self._members[message.source]
        member.begun = True
        if member.start.kind == "replacement":
            for server, took_s in self._replacements.begun(member).items():
                self._note("replaced", server=server, took_ns=round(took_s * 1e9))
                self._on_event({"event": "replaced", "server": server, "took_s": took_s})
        self._changes.move_on()

    def _event(self, message: Message) -> None:
        self._members[message.source].seen = time.monotonic()
        self._on_event(message.meta)

    def _lost(self, message: Message) -> None:
        """A worker misses a peer, or waits for a change: it wants a plan."""
        member = self._members[message.source]
        member.seen, member.waits = time.monotonic(), True
        if self._waiting_since is None and message.source in self._roster.workers:
            self._waiting_since = member.seen
        self._waiting[message.source] = message
        self._changes.move_on()
        self._settle()
        waits_still = message.source in self._waiting and message.source in self._roster.workers
        if waits_still and self._roster.servers and self._called_for != self._generation:
            # Where workers meet at servers, the others may train on for long before they miss anybody.
            self._called_for = self._generation
            self._changes.call_together()

    def _where(self, message: Message) -> None:
        self._members[message.source].seen = time.monotonic()
        self._replacements.ask(message)

    def _awaits(self, message: Message) -> None:
        """A server says for whom it waits."""
        meta, now = message.meta, time.monotonic()
        self._members[message.source].seen = now
        late = {worker: now - late_s for worker, late_s in meta["late"]}
        self._awaited[meta["server"]] = _Awaits(message.source, late, frozenset(meta["waiting"]))

    def _done(self, message: Message) -> None:
        member = self._members[message.source]
        member.finished = True
        if message.meta.get("report") and member.standing == "settled":
            self.reports.append(Report(**message.meta["report"]))
        self._answer(message, {})
        self._settle()

    def _failed(self, message: Message) -> None:
        meta = message.meta
        self._note("failed", failed=message.source, **meta)
        text, place = meta["message"], f"\n  at {meta['place']}" if meta.get("place") else ""
        who = f"rank {message.source}: "
        error = _as_error(meta["error"], f"{'' if text.startswith(who) else who}{text}{place}")
        error.exit_code = meta.get("exit_code", error.exit_code)
        member = self._members.get(message.source)
        if self._is_spare(message.source):
            self._give_up(message.source, f"it failed: {text}")
            return
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
        """All processes have this long to join and begin, each since it was started."""
        limit, now = self.rules.start_deadline_s, time.monotonic()
        ended = self._ended_before_joining(0.0)
        if ended:  # a process that ends before it joined can send no word
            self._take_messages()  # unless it could: its own words come first
            self._lose_first(ended)
            for start, cause in ended:
                self._lose_start(start, cause)
        missing = [start for start in self._roster.starting.values() if now - start.since > limit]
        if first := [start.rank for start in missing if start.kind == "first"]:
            raise DeadlineExceeded(f"{name_ranks(first)} did not join within {limit:g} s (start_deadline_s)")
        for start in missing:
            self._lose_start(start, f"did not join within {limit:g} s (start_deadline_s), and killed")
        slow = [m for m in self._members.values() if now - m.start.since > limit and m.active and not m.ready]
        if first := [m.rank for m in slow if m.start.kind == "first"]:
            raise DeadlineExceeded(
                f"{name_ranks(first)} did not begin within {limit:g} s: still making the model or opening the data; "
                "if that needs longer, raise start_deadline_s"
            )
        for member in slow:
            self._kill(member.rank)
            self._lose(member, f"did not begin within {limit:g} s, and killed", _advice("start_deadline_s"))

    def _ended_before_joining(self, seconds: float) -> list[tuple[Start, str]]:
        found = [(start, self._ended(start.rank, seconds)) for start in list(self._roster.starting.values())]
        return [(start, cause) for start, cause in found if cause is not None]

    def _lose_first(self, ended: list[tuple[Start, str]]) -> None:
        """End the run where those that it begins with are among these; all that went together are named."""
        if not any(start.kind == "first" and self._roster.starting.get(start.rank) is start for start, _ in ended):
            return
        waited_s = _TOGETHER_S / max(1, len(self._roster.starting))
        causes = {start.rank: how for start, how in self._ended_before_joining(waited_s) if start.kind == "first"}
        if len(causes) == 1:
            ((rank, cause),) = causes.items()
            raise RankFailed(f"rank {rank} ended before it joined: {cause}")
        listed = "; ".join(f"rank {rank}: {cause}" for rank, cause in causes.items())
        raise RankFailed(f"{name_ranks(causes)} ended before they joined: {listed}")

    def _lose_start(self, start: Start, cause: str) -> None:
        """A process is lost that came later and has not joined, unless its last words were heard by now."""
        if self._roster.starting.get(start.rank) is not start:
            return
        self._give_up(start.rank, cause)
        if start.kind == "replacement" and self._roster.live_workers():
            self._replace(start.endpoints, cause)

    def _watch_silence(self) -> None:
        now = time.monotonic()
        for member in list(self._members.values()):
            silent_s = now - member.seen
            if not member.active or silent_s <= min(self.rules.heartbeat_s, self.rules.start_deadline_s):
                continue
            limit, setting = self._allowed_silence(member)
            if silent_s > limit:
                self._kill(member.rank)
                cause = f"silent for {silent_s:.1f} s, longer than {setting} allows, and killed"
                self._lose(member, cause, _advice(setting))

    def _allowed_silence(self, member: Member) -> tuple[float, str]:
        """How long this process may be silent, and which setting says so."""
        rules = self.rules
        if not self._furthest or not member.begun:  # until the first step, all is part of starting
            return rules.start_deadline_s, "start_deadline_s"
        if self._runs is not None and self._runs(member.rank):
            return max((rules.deadline_s, "deadline_s"), (rules.heartbeat_s, "heartbeat_s"))
        return self._patience_s, "heartbeat_s"

    @property
    def _patience_s(self) -> float:
        """How soon a rank that died without a trace is found out."""
        return self.rules.heartbeat_s * (_BLIND if self._runs is None else 1)

    def _watch_stragglers(self) -> None:
        """Whoever lives but never reports the loss hangs in the user's code; the others must not hang with it."""
        if self._waiting_since is None or self._roster.replacing:  # those who miss a server cannot report before
            return
        limit, now = self.rules.deadline_s, time.monotonic()
        since = max(self._waiting_since, self._replacements.latest)
        for member in [m for m in self._roster.live_workers() if m.rank not in self._waiting]:
            patience = min(member.busy, since + (BUSY_DEADLINES - 1) * limit)
            if now - max(since, patience) > limit:
                self._kill(member.rank)
                cause = f"hung for {limit:g} s while the others waited for it, and killed"
                self._lose(member, cause, _advice("deadline_s"))

    def _watch_awaited(self) -> None:
        """A worker that servers wait for and that makes no step hangs in the user's code, however well it beats.

        One that is slow makes steps. One that itself waits, for another server or for a plan, is not to blame.
        """
        if self._roster.replacing:  # pushes that a lost server had come again
            return
        limit, now = self.rules.deadline_s, time.monotonic()
        excused = {worker for report in self._awaited.values() for worker in report.waiting}
        for server, report in list(self._awaited.items()):
            for worker, late in report.late.items():
                member = self._members.get(worker)
                if member is None or not member.active or member.waits or worker in excused:
                    continue
                since = max(late, member.moved, self._replacements.latest)
                patience = min(member.busy, since + (BUSY_DEADLINES - 1) * limit)
                if now - max(since, patience) > limit:
                    self._kill(worker)
                    cause = f"hung for {now - since:.1f} s while server {server} and others waited for it, and killed"
                    self._lose(member, cause, _advice("deadline_s"))

    def _watch_leavers(self) -> None:
        """Nobody waits for ever for those that the run has no more use for."""
        now = time.monotonic()
        for member in [m for m in self._members.values() if m.standing == "retired" and not m.finished]:
            if now - member.left_out > self.rules.deadline_s:
                self._give_up(member.rank)
        ends_badly = self._blame is not None or self._fatal is not None
        if not self._roster.all_joined or ends_badly or self._roster.live_workers():
            return
        self._through = self._through or now
        self._changes.present = None
        for rank in [*self._roster.starting, *(m.rank for m in self._roster.newcomers())]:
            self._give_up(rank)
        for member in [m for m in self._members.values() if m.active]:
            # Servers that the run began with have met the workers, and end by themselves.
            limit_s = max(_LEAVE_S, self.rules.deadline_s) if member.start.kind == "first" else _LEAVE_S
            if now - self._through > limit_s:
                self._give_up(member.rank)

    def _watch_blame(self) -> None:
        if self._blame is None or self._fatal is not None:
            return
        since, error = self._blame
        nobody_else = not any(m.active for m in self._members.values())
        if nobody_else or time.monotonic() - since > self._patience_s + _GRACE_S:
            raise error

    def _watch_fatal(self) -> None:
        """End the run over a loss that it cannot bear, once all that were lost with it are known."""
        if self._fatal is None:
            return
        since, member, cause, advice = self._fatal
        left = self._roster.live_workers()
        if left and time.monotonic() - since <= _TOGETHER_S:
            return
        step = member.step or self._furthest  # a server counts no steps of its own
        others = self._others_lost(member, all_workers=not left)
        raise Lost(f"{self._roster.describe(member)} was lost: {cause}{others}; last heard of at step {step}{advice}")

    def _others_lost(self, named: Member, *, all_workers: bool) -> str:
        """Who else was lost, and how."""
        since = next(at for at, member, _ in self._fallen if member is named) - _TOGETHER_S
        by_cause: dict[str, list[str]] = {}
        for at, member, cause in self._fallen:
            if all_workers or (at > since and member is not named):
                by_cause.setdefault(cause, []).append(self._roster.describe(member))
        listed = "; ".join(f"{', '.join(who)}: {cause}" for cause, who in by_cause.items())
        if not all_workers:
            return f"; so was {listed}" if listed else ""
        return f"; all workers are lost ({listed})" if len(self._fallen) > 1 else ""

    # Losses.

    def _lose(self, member: Member, cause: str, advice: str = "") -> None:
        """A process is gone: go on without it, or with another in its place, or end the run."""
        rank, rules = member.rank, self.rules
        if self._is_spare(rank):
            self._give_up(rank, cause + advice)
            return
        self._tell_lost(rank, cause + advice, member.step)
        servers = self._roster.servers_of(member)
        self._forget(rank)
        left = [m for m in self._members.values() if m.rank in self._roster.workers and not m.failed]
        bearable = (member.role == "server" or rules.survives_loss) and (not servers or self._can_replace)
        self._fallen.append((time.monotonic(), member, cause))
        if not bearable or not left or self._blame is not None or self._fatal is not None:
            self._fatal = self._fatal or (time.monotonic(), member, cause, advice)
            return
        if servers and self._roster.live_workers():
            self._replace(tuple(servers), cause)
        self._settle()

    @property
    def _can_replace(self) -> bool:
        return self.rules.replaces_servers and self._respawn is not None and self._roster.all_joined

    def _replace(self, servers: tuple[int, ...], cause: str) -> None:
        """Start these servers anew, in a process of their own."""
        assert self._respawn is not None
        self._replacements.lose(servers, cause)
        self._roster.begin(servers, "replacement", "server")
        self._respawn(servers)

    def _is_spare(self, rank: int) -> bool:
        """Whether the run can do without this process as it stands: it does not depend on it yet, or no more."""
        member, start = self._members.get(rank), self._roster.starting.get(rank)
        if member is None:
            return start is not None and start.kind == "newcomer"
        unneeded = self._through is not None and member.start.kind != "first"
        return member.standing != "settled" or unneeded

    def _give_up(self, rank: int, cause: str = "") -> None:
        """End a process that is not needed; with a cause, it is a loss that the user should hear of."""
        self._kill(rank)
        if cause:
            self._tell_lost(rank, cause, 0)
        self._forget(rank)
        self._changes.drop(rank)
        self._settle()

    def _forget(self, rank: int) -> None:
        self._roster.starting.pop(rank, None)
        if rank in self._members:
            self._roster.remove(self._members[rank])
        self._waiting.pop(rank, None)
        self._awaited = {server: report for server, report in self._awaited.items() if report.process != rank}
        self._replacements.forget(rank)

    def _tell_lost(self, rank: int, cause: str, step: int) -> None:
        self._note("lost", lost=rank, cause=cause, generation=self._generation, step=step)
        self._on_event({"event": "lost", "rank": rank, "cause": cause, "step": step})

    # Changes.

    def _scale(self, message: Message) -> None:
        """More or fewer ranks are asked for; the answer says who comes and who goes, or why not."""
        try:
            if self._stop_sent or self._through is not None:
                raise ConfigError("scale: the run must not be ending, and is")
            told = self._changes.begin(message.meta)
        except ConfigError as error:
            self._answer(message, {"refused": str(error)})
            return
        if told["starting"] or told["retiring"]:
            self._note("scaled", workers=told["workers"], servers=told["servers"])
            self._on_event({"event": "scale", **told})
        self._answer(message, told)
        self._changes.move_on()

    def _announce(self, number: int) -> None:
        """Ask the workers to come to the next plan."""
        for member in self._roster.live_workers():
            self._send(member, "change", {"number": number})

    # Plans.

    def _settle(self) -> None:
        """Once every live worker has reported, and every newcomer where there is a change, tell them how to go on."""
        live = [m.rank for m in self._roster.live_workers()]
        if self._fatal is not None or not live or not self._waiting.keys() >= set(live):
            return
        change = self._changes.due
        asked = {rank: self._waiting.pop(rank) for rank in live}
        steps = {rank: message.meta["steps_done"] for rank, message in asked.items()}
        staying = live if change is None else live[: change.workers]
        source = self._furthest_of(staying, steps)
        if change is not None:
            new = [m.rank for m in self._roster.newcomers() if m.role == "worker"]
            asked.update({rank: self._waiting.pop(rank) for rank in new})
            self._changes.carry_out(steps[source])
        members = sorted(self._roster.workers & asked.keys())
        self._count_fruitless(members, change is not None)
        self._generation += 1
        plan = {"generation": self._generation, "members": members, "source": source, **self._new_places()}
        for message in asked.values():
            self._members[message.source].waits = False
            self._answer(message, {**plan, "change": self._changes.announced})
        took_s = time.monotonic() - (self._waiting_since or time.monotonic())
        self._waiting_since = None
        self._on_event({"event": "regroup", **plan, "step": steps[source], "took_s": took_s})
        self._replacements.tell()  # some may have asked for a server that is retired now

    def _furthest_of(self, staying: list[int], steps: dict[int, int]) -> int:
        """Whose state all take: the one with most steps, the lowest number among equals."""
        holders = [rank for rank in staying if steps[rank] >= self._members[rank].owes]
        if not holders:
            raise Lost(f"all workers that held the state were lost; {name_ranks(staying, 'worker')} had not taken it")
        return max(holders, key=lambda rank: (steps[rank], -rank))

    def _new_places(self) -> Meta:
        """Servers and addresses, as far as they are not those of the beginning."""
        roster, rules = self._roster, self.rules
        before = set(range(rules.workers, rules.workers + rules.servers))
        here = roster.workers | roster.servers
        return {
            "servers": None if roster.servers == before else sorted(roster.servers),
            "addresses": {
                str(e): roster.addresses[e] for e in sorted(roster.since_start & here) if e in roster.addresses
            },
        }

    def _count_fruitless(self, members: list[int], changed: bool) -> None:
        self._fruitless = self._fruitless + 1 if members == self._grouped and not changed else 0
        self._grouped = members
        if self._fruitless >= _FRUITLESS:
            raise Lost(f"the workers could not form a group {_FRUITLESS} times in a row; is a link between them cut?")

    # Words to the ranks, and for the record.

    def _tell_stop(self) -> None:
        self._stop_sent = True
        self._note("stop", step=self._furthest, reason="asked by the user")
        for member in self._members.values():
            if member.active:
                self._send(member, "stop", {})

    def _send(self, member: Member, kind: str, meta: Meta) -> None:
        with contextlib.suppress(CommError):  # gone a moment ago: its departure is the next message
            self._channel.send(member.rank, kind, meta)

    def _answer(self, message: Message, meta: Meta) -> None:
        with contextlib.suppress(CommError):  # gone a moment ago: its departure is the next message
            self._channel.reply(message, meta)

    def _note(self, kind: str, **fields: Any) -> None:
        with contextlib.suppress(RecordError):  # a full disk must not hide what went wrong
            self._recorder.write(kind, self._clock.now_ns(), **fields)

    def _first_worker(self) -> int:
        return min((m.rank for m in self._roster.live_workers()), default=-1)


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
