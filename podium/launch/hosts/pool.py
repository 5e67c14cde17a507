"""The head's side of the agents: who they are, what they fetch, and which ranks run there.

One thread reads what agents send, and only notes it: agents that are not heard in time count as lost. A thread per host
reads and sends files, and another one writes logs. The launcher asks `HostPool` for its state, and waits on its
condition.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from podium.comm.base import DEPARTED, Message, Meta
from podium.comm.real.channel import Channel
from podium.comm.real.link import ChannelHandle
from podium.errors import CommError, ConfigError, DeadlineExceeded, PodiumError
from podium.launch.blobs import as_bytes, as_tensor
from podium.launch.coordination.rules import FIRST_AGENT
from podium.launch.hosts.background import Background
from podium.launch.hosts.base import StartedAgent, Starter
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.facts import HostFacts, complaint
from podium.launch.hosts.failure import Failure, NotOffered
from podium.launch.hosts.invitation import Invitation
from podium.launch.hosts.trees import Offer

SILENT_S = 1.0
"""What an agent that was silent for longer said of its ranks no longer counts: it sends four messages a second."""
_POLL_S = 0.2
_LEAVE_S = 5.0
_LOG = re.compile(r"rank-\d+\.log")


@dataclass
class HostState:
    """One host, as its agent reports it."""

    number: int
    entry: HostEntry
    started: StartedAgent | None = None
    facts: HostFacts | None = None
    clock_skew_s: float | None = None
    """Its clock less this machine's."""
    ready: bool = False
    failure: Failure | None = None
    """Why the host cannot take part, where its facts or its agent have told."""
    gone: str | None = None
    """Why the agent is gone."""
    heard_at: float = 0.0
    running: dict[int, bool] = field(default_factory=dict)
    """By rank: whether its latest process runs, or is stopped."""
    ended: dict[int, str] = field(default_factory=dict)
    """By rank: how its latest process ended."""
    starts: dict[int, int] = field(default_factory=dict)
    """By rank: how many processes it was asked to start; an agent's report names the one that it is about."""

    @property
    def label(self) -> str:
        return self.entry.target

    @property
    def is_up(self) -> bool:
        return self.ready and self.gone is None

    @property
    def answers(self) -> bool:
        """Whether its agent was heard a moment ago, so that what it said of its ranks still holds."""
        return self.facts is not None and self.gone is None and time.monotonic() - self.heard_at <= SILENT_S

    def why_gone(self) -> str | None:
        """Why the agent is gone, with what it printed last; None while it is there."""
        if self.gone is None:
            return None
        last = None if self.started is None else self.started.ended()
        return self.gone if last is None or last in self.gone else f"{self.gone}; {last}"


@final
class HostPool:
    """Agents, from their invitation to their end."""

    def __init__(
        self,
        channel: Channel,
        starter: Starter,
        invitation: Invitation,
        *,
        welcome: Callable[[int], Meta] = lambda _asked_ns: {},
        offers: Mapping[str, Callable[[], Offer]] | None = None,
        logs: Path | None = None,
        shown: str | None = None,
    ) -> None:
        """`welcome` makes the answer to an agent that may take part, by the time when it asked (`time.monotonic_ns`).

        `offers` are trees by name, made when asked for.

        `logs`: the folder that ranks' output is appended to; `shown`: the file that is also shown on the terminal.
        """
        self._channel, self._starter, self._invitation = channel, starter, invitation
        self._welcome, self._offers, self._logs = welcome, dict(offers or {}), logs
        self._shown = shown
        self._made: dict[str, Offer] = {}
        self._making = threading.Lock()
        self._files: dict[int, Background] = {}
        self._log_files = Background("agent-logs", lambda _error: self._stop_logging())
        self._terminal = Background("terminal", lambda _error: self._stop_showing())
        self.changed = threading.Condition()
        """Guards the states of the hosts, and is notified whenever one changes."""
        self.hosts: dict[int, HostState] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="agents", daemon=True)
        self._thread.start()

    # Starting.

    def start(self, entries: list[HostEntry]) -> list[int]:
        """Start an agent on each of these hosts; returns their numbers. Does not wait."""
        with self.changed:
            first = len(self.hosts)
            numbered = dict(enumerate(entries, first))
            for number, entry in numbered.items():
                self.hosts[number] = HostState(number, entry)
        for number, started in self._starter.start(numbered, self._invitation).items():
            self.hosts[number].started = started
        return list(numbered)

    def wait_ready(self, numbers: list[int], stop: threading.Event | None = None) -> None:
        """Wait until these hosts are ready; raises as soon as one cannot take part."""
        until = time.monotonic() + self._invitation.start_deadline_s
        with self.changed:
            while not (stop is not None and stop.is_set()):
                for number in numbers:
                    if (failure := self._failure_of(self.hosts[number])) is not None:
                        raise failure.error(self.hosts[number].label)
                late = [self.hosts[n] for n in numbers if not self.hosts[n].ready]
                if not late:
                    return
                if time.monotonic() > until:
                    names = ", ".join(state.label for state in late)
                    raise self._lateness(reached=any(state.facts is not None for state in late)).error(names)
                self.changed.wait(_POLL_S)

    def settle(self, numbers: list[int]) -> dict[int, Failure | None]:
        """Wait until each of these hosts is ready or known to be unable to take part; returns why, None where ready."""
        until = time.monotonic() + self._invitation.start_deadline_s
        with self.changed:
            while True:
                found = {n: self._failure_of(self.hosts[n]) for n in numbers}
                late = [n for n in numbers if found[n] is None and not self.hosts[n].ready]
                if late and time.monotonic() > until:
                    found |= {n: self._lateness(reached=self.hosts[n].facts is not None) for n in late}
                    late = []
                if not late:
                    return found
                self.changed.wait(_POLL_S)

    def _failure_of(self, state: HostState) -> Failure | None:
        if state.failure is not None:
            return state.failure
        if not state.ready and state.started is not None and (why := state.started.ended()) is not None:
            what = f"the agent could not be started, or could not stay: {why}"
            return Failure(what, self._starter.remedy(state.entry, why))
        if (why := state.why_gone()) is not None:
            return Failure(f"its agent was lost: {why}", self._starter.advice(state.entry))
        return None

    def _lateness(self, *, reached: bool) -> Failure:
        limit, head = self._invitation.start_deadline_s, self._invitation.head
        if reached:
            fix = "--set start_deadline_s=SECONDS, where copying code, data or a checkpoint to it takes longer"
            return Failure(f"not ready within {limit:g} s (start_deadline_s)", fix)
        what = f"no agent reached this machine at {head} within {limit:g} s (start_deadline_s)"
        fix = "open that port, or give this machine's address for the hosts: --set head=ADDRESS"
        return Failure(what, fix)

    # State.

    def up(self) -> list[HostState]:
        """Hosts that can start ranks."""
        return [state for state in self.hosts.values() if state.is_up and state.answers]

    def send(self, number: int, kind: str, meta: Meta) -> None:
        self._channel.send(FIRST_AGENT + number, kind, meta)

    def call(self, number: int, kind: str, meta: Meta, deadline_s: float) -> Meta:
        """Ask an agent; blocks until it answers."""
        (answer,) = self._channel.wait([self._channel.call(FIRST_AGENT + number, kind, meta)], deadline_s)
        return answer.meta

    def call_all(self, kind: str, asked: Mapping[int, Meta], deadline_s: float) -> dict[int, Meta]:
        """Ask several agents at once; the answer of one that is lost or late is only why: `lost`."""
        until = time.monotonic() + deadline_s
        handles: dict[int, ChannelHandle] = {}
        answers: dict[int, Meta] = {}
        for number, meta in asked.items():
            try:
                handles[number] = self._channel.call(FIRST_AGENT + number, kind, meta)
            except CommError as error:
                answers[number] = {"lost": str(error)}
        for number, handle in handles.items():
            try:
                answers[number] = self._channel.wait([handle], max(0.0, until - time.monotonic()))[0].meta
            except CommError as error:
                answers[number] = {"lost": str(error)}
        return answers

    # What agents send.

    def _listen(self) -> None:
        while not self._closing.is_set():
            try:
                message = self._channel.recv(_POLL_S)
            except DeadlineExceeded:
                continue
            except CommError:
                return
            state = self.hosts.get(message.source - FIRST_AGENT)
            if state is None:
                continue
            try:
                self._take(state, message)
            except Exception as error:  # of one agent; without this thread all others would count as lost
                self._drop(state, error)

    def _take(self, state: HostState, message: Message) -> None:
        asked_ns, meta, kind = time.monotonic_ns(), message.meta, message.kind
        with self.changed:
            state.heard_at = time.monotonic()
            if kind == "hello":
                self._note_facts(state, meta)
            elif kind == "ready":
                state.ready = True
            elif kind == "beat":
                state.running = {int(rank): bool(runs) for rank, runs in meta["running"].items()}
            elif kind == "ended" and int(meta["start"]) == state.starts.get(int(meta["rank"])):
                state.ended[int(meta["rank"])] = str(meta["how"])
            elif kind == "failed":
                told = str(meta["message"])
                failure = Failure(told, self._starter.remedy(state.entry, told), meta.get("exit_code") == 2)
                state.failure = state.failure or failure
            elif kind == DEPARTED and not self._closing.is_set():
                state.gone = str(meta.get("error", "its connection closed without a message"))
            self.changed.notify_all()
        if kind == "hello":
            self._serve_files(state, lambda: self._greet(state, message, asked_ns))
        elif kind == "tree":
            self._serve_files(state, lambda: self._send_tree(state, message))
        elif kind == "chunk":
            self._serve_files(state, lambda: self._send_chunk(message))
        elif kind == "log":
            self._take_output(str(meta["name"]), as_bytes(message.body))

    def _serve_files(self, state: HostState, task: Callable[[], None]) -> None:
        if state.number not in self._files:
            name = f"agent-files-{state.number}"
            self._files[state.number] = Background(name, lambda error: self._drop(state, error))
        self._files[state.number].submit(task)

    def _drop(self, state: HostState, error: Exception) -> None:
        """What this agent sent could not be understood or answered."""
        with self.changed:
            state.gone = state.gone or f"the launcher failed with its message: {type(error).__name__}: {error}"
            self.changed.notify_all()

    def _note_facts(self, state: HostState, meta: Meta) -> None:
        now = time.time()
        state.facts = HostFacts.from_meta(meta)
        state.clock_skew_s = state.facts.time - now
        state.failure = complaint(state.facts, state.label, now)

    def _greet(self, state: HostState, message: Message, asked_ns: int) -> None:
        if state.failure is not None:
            return self._answer(message, {"refused": state.failure.what})
        try:  # in the body: a header has 64 KB, and data may have many files
            self._answer(message, {}, json.dumps(self._welcome(asked_ns)).encode())
        except OSError as error:
            self._refuse(state, message, error)

    def _send_tree(self, state: HostState, message: Message) -> None:
        name = str(message.meta["name"])
        try:
            with self._making:  # one host's thread reads the files for all
                if name not in self._made:
                    self._made[name] = self._offers[name]()
        except (PodiumError, OSError) as error:
            return self._refuse(state, message, error)
        self._answer(message, {}, self._made[name].tree.to_json())

    def _refuse(self, state: HostState, message: Message, error: PodiumError | OSError) -> None:
        """This machine cannot give the host what it needs."""
        what = str(error)
        fix = error.fix_on(state.label) if isinstance(error, NotOffered) else self._starter.remedy(state.entry, what)
        with self.changed:
            state.failure = Failure(what, fix, of_request=True)
            self.changed.notify_all()
        self._answer(message, {"refused": what})

    def _send_chunk(self, message: Message) -> None:
        meta = message.meta
        try:
            self._answer(message, {}, self._made[str(meta["tree"])].chunk(str(meta["path"]), int(meta["offset"])))
        except (ConfigError, OSError) as error:
            self._answer(message, {"refused": f"the launcher's host cannot read {meta['path']}: {error}"})

    def _take_output(self, name: str, data: bytes) -> None:
        if name == self._shown and not self._terminal.offer(lambda: self._show(data)):
            self._stop_showing()  # the terminal takes nothing for long; the log has it all
        if self._logs is not None and _LOG.fullmatch(name) is not None:
            self._log_files.submit(lambda: self._append_log(name, data))

    def _show(self, data: bytes) -> None:
        """Raises where `| head` has ended, or where the terminal cannot show a letter."""
        sys.stdout.write(data.decode(errors="replace"))
        sys.stdout.flush()

    def _append_log(self, name: str, data: bytes) -> None:
        """Raises on a full disk, which must not end a run because of its logs; records report it."""
        if self._logs is not None:
            self._logs.mkdir(parents=True, exist_ok=True)
            with (self._logs / name).open("ab") as file:
                file.write(data)

    def _stop_showing(self) -> None:
        self._shown = None

    def _stop_logging(self) -> None:
        self._logs = None

    def _answer(self, message: Message, meta: Meta, data: bytes = b"") -> None:
        with contextlib.suppress(CommError):  # the agent has just left: its departure is the next message
            self._channel.reply(message, meta, [as_tensor(data)] if data else [])

    # The end.

    def close(self) -> None:
        """End all agents, and with them their ranks."""
        silent = [number for number, state in self.hosts.items() if not state.answers]
        told = {FIRST_AGENT + number for number in self.hosts.keys() - silent}
        for endpoint in told:
            with contextlib.suppress(CommError):  # it has just left
                self._channel.send(endpoint, "end", {})
        self._channel.hang_up([FIRST_AGENT + number for number in silent])
        until = time.monotonic() + _LEAVE_S
        with self.changed:
            # Others may connect only now; the end of their input ends them.
            self.changed.wait_for(lambda: told.isdisjoint(self._channel.peers), max(0.0, until - time.monotonic()))
        self._closing.set()
        for number, state in self.hosts.items():
            if state.started is not None:
                state.started.end(at_once=number in silent)
        self._starter.close()
        self._channel.close()
        self._thread.join(_LEAVE_S)
        for background in (self._log_files, self._terminal, *self._files.values()):
            background.close(_LEAVE_S)

    def describe(self) -> list[dict[str, Any]]:
        """The hosts, for the manifest."""
        return [
            {"host": state.label, **(state.facts._asdict() if state.facts else {})} for state in self.hosts.values()
        ]
