"""The coordinator: part of the launcher, it knows every rank, notices lost ranks, and regroups the survivors.

Ranks have a separate channel to it: they join, send heartbeats, report what happened. It never touches a tensor. Its
rules, and where they are:

- No rank begins before all have joined. Joining, and making model and data after it, have a deadline (`starts`).
- A rank that leaves without a message is lost. So is one that falls silent (`heartbeats`); it is killed first.
- A worker that other ranks wait for and that makes no step for a deadline is lost (`stragglers`).
- After a loss, a run whose strategy survives it continues (`losses`). Once every live worker has reported its steps,
  all get the plan: the next generation, its members, and whose state to copy (`regrouping`).
- A lost server is restarted where strategy and launcher can, and workers get its new address (`replacements`).
- Workers and servers may be added or retired on request (`scaling`): the next plan makes the change. A newcomer that
  dies while starting is left out; the run does not depend on it yet.
- Records of ranks on other hosts are appended to the run's folder here (`records_home`); checkpoints and models are
  copied to it (`checkpoints_home`), and from it to other hosts where these may have to begin without it (`copies`).
- Groups of ranks without a common disk form by values that it holds for them (`key_store`).
- A rank that raised would raise again: the run ends, and the user sees that rank's error. If the error only reports
  that another rank did not answer, the coordinator first waits a moment for that loss.
"""

from __future__ import annotations

import threading

from podium.comm.base import DEPARTED, Message
from podium.comm.clocks import Clock
from podium.comm.real.channel import Channel
from podium.comm.real.sockets import Address
from podium.engine.report import Report
from podium.launch.coordination.before_joining import BeforeJoining
from podium.launch.coordination.checkpoints_home import CheckpointsHome
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.copies import Copies
from podium.launch.coordination.heartbeats import Heartbeats
from podium.launch.coordination.key_store import KeyStore
from podium.launch.coordination.leavers import Leavers
from podium.launch.coordination.losses import Losses
from podium.launch.coordination.owner import Owner
from podium.launch.coordination.post import Post
from podium.launch.coordination.records_home import RecordsHome
from podium.launch.coordination.regrouping import Regrouping
from podium.launch.coordination.replacements import Replacements
from podium.launch.coordination.roster import Roster
from podium.launch.coordination.rules import FIRST_ASKER, OPERATOR, Rules
from podium.launch.coordination.scaling import Scaling
from podium.launch.coordination.starts import Starts
from podium.launch.coordination.stragglers import Stragglers
from podium.records.recorder import Recorder

_AT_ONCE = 1000
"""Messages read before deadlines are checked again."""
_EXIT_S = 2.0
"""How long a process that closed its connection may take to end."""


class Coordinator:
    """Processes what ranks report, and watches them until all have ended."""

    def __init__(
        self,
        rules: Rules,
        owner: Owner,
        channel: Channel,
        recorder: Recorder,
        clock: Clock,
        before_joining: BeforeJoining | None = None,
    ) -> None:
        """`before_joining` answers ranks that have not joined; asking needs the secret, as all messages do."""
        self._before_joining = before_joining or BeforeJoining()
        run = RunContext(rules, clock, owner, Post(channel, recorder, owner, clock), Roster(rules, clock))
        self._run, self._post, self._roster = run, run.post, run.roster
        self._scaling, self._replacements = Scaling(run), Replacements(run)
        self._regrouping = Regrouping(run, self._scaling, self._replacements)
        self._losses = Losses(run, self._scaling, self._replacements, self._regrouping)
        self._starts = Starts(run, self._losses)
        self._heartbeats = Heartbeats(run, self._regrouping, self._losses)
        self._stragglers = Stragglers(run, self._regrouping, self._replacements, self._losses)
        self._leavers = Leavers(run, self._scaling, self._losses)
        records = None if recorder.path is None else recorder.path.parent
        run_dir = None if records is None else records.parent
        home, saved, copies = RecordsHome(run, records), CheckpointsHome(run, run_dir), Copies(run, run_dir)
        store = KeyStore(run)
        self._joining: list[Message] = []
        self._stop_asked = False  # by a rank, where no launcher gets signals
        self._stop_sent = False
        self.reports: list[Report] = []
        self._do = {
            "beat": self._beat,
            "begun": self._begun,
            "event": self._event,
            "regroup": self._regrouping.ask,
            "where": self._where,
            "awaits": self._stragglers.hear,
            "find": home.find,
            "records": home.append,
            "upload": saved.upload,
            "publish": saved.publish,
            "keeps": copies.add,
            "spread": copies.spread,
            "copy-part": copies.send_part,
            "copied": copies.done,
            "store-set": store.set,
            "store-get": store.get,
            "store-add": store.add,
            "store-check": store.check,
            "store-delete": store.delete,
            "done": self._done,
            "failed": self._losses.fail,
            DEPARTED: self._departed,
        }

    @property
    def address(self) -> Address:
        return self._post.address

    def run(self, stop: threading.Event | None = None) -> list[Report]:
        """Run until every process has ended; raises the error that made the run fail."""
        roster = self._roster
        roster.begin_run()
        self._heartbeats.look()
        while roster.starting or any(not member.finished for member in roster.members.values()):
            self._take_messages()
            self._check()
            if (self._stop_asked or (stop is not None and stop.is_set())) and roster.all_joined and not self._stop_sent:
                self._send_stop()
        self._losses.check()
        return sorted(self.reports)

    def announce_end(self, why: str, *, but: int) -> None:
        """Tell all ranks except `but` that the run is over, so that each can print why before it ends."""
        for message in self._joining:
            if message.source != but:
                self._post.answer(message, {"ended": why})
        for member in self._roster.active():
            if member.rank != but:
                self._post.send(member, "ended", {"why": why})

    def wait_for_departures(self, limit_s: float) -> None:
        """Wait until all ranks have closed their connections, which they do last; at most this long."""
        self._post.wait_for_departures(limit_s)

    def close(self) -> None:
        self._post.close()

    def _check(self) -> None:
        """Check every deadline."""
        if ended := self._starts.ended():
            self._take_messages()  # a process may have sent its error before it ended
            self._starts.lose(ended)
        self._starts.check()
        self._heartbeats.check()
        self._stragglers.check()
        self._leavers.check()
        self._losses.check()

    def _take_messages(self) -> None:
        """Read all that have arrived, so that no rank counts as silent while its heartbeat is unread."""
        for n in range(_AT_ONCE):
            message = self._post.receive(0.0) if n else self._post.receive()
            if message is None:
                break
            self._take(message)
        self._heartbeats.look()

    def _take(self, message: Message) -> None:
        kind, source = message.kind, message.source
        if kind == "failed" and source >= FIRST_ASKER:  # a rank that cannot even join
            message = message._replace(source=(source := source - FIRST_ASKER))
        if kind == "join":
            self._join(message)
        elif kind == "scale" and source == OPERATOR:
            ending = self._stop_sent or self._losses.workers_ended_at is not None
            self._scaling.request(message, ending=ending)
        elif kind in ("settings", "file") and source >= FIRST_ASKER:
            self._post.answer(message, *self._before_joining.answer(message))
        elif source in self._roster.members or self._failed_before_joining(message):
            self._do[kind](message)  # ignore the last messages of ranks that were given up

    def _failed_before_joining(self, message: Message) -> bool:
        """False for a replacement: its messages look like those of the process it replaces."""
        source, roster = message.source, self._roster
        return message.kind == "failed" and source in roster.starting and source not in roster.known

    def _join(self, message: Message) -> None:
        member = self._roster.admit(message)
        if member is None:
            return  # it was given up, and its process was killed
        self._joining.append(message)
        if self._roster.all_joined:
            backend = self._regrouping.choose_backend(self._roster.workers)
            for waiting in self._joining:
                book = self._roster.address_book(self._roster.members.get(waiting.source))
                self._post.answer(waiting, {**book, "backend": backend})
            self._joining.clear()
            self._replacements.answer_questions()
        if self._stop_sent:
            self._post.send(member, "stop")

    def _beat(self, message: Message) -> None:
        self._roster.members[message.source].beat(self._run.now, message.meta)
        if message.meta.get("stop"):
            self._stop_asked = True
        facts = message.meta.get("progress")
        if facts:
            self._regrouping.note_step(facts["step"])
            if message.source == min((m.rank for m in self._roster.live_workers()), default=-1):
                self._post.tell(facts)

    def _begun(self, message: Message) -> None:
        member = self._roster.members[message.source]
        member.begun = True
        if member.start.kind == "replacement":
            self._replacements.begun(member)
        self._scaling.advance()

    def _event(self, message: Message) -> None:
        self._roster.members[message.source].heard_at = self._run.now
        self._post.tell(message.meta)

    def _where(self, message: Message) -> None:
        self._roster.members[message.source].heard_at = self._run.now
        self._replacements.ask(message)

    def _done(self, message: Message) -> None:
        member = self._roster.members[message.source]
        member.finished = True
        if message.meta.get("report") and member.standing == "settled":
            self.reports.append(Report(**message.meta["report"]))
        self._post.answer(message, {})
        self._regrouping.settle()

    def _departed(self, message: Message) -> None:
        member = self._roster.members[message.source]
        if member.active:
            cause = self._run.owner.how_it_ended(member.rank, _EXIT_S)
            self._run.owner.kill(member.rank)  # in case its connection broke while it lives
            self._losses.lose(member, cause or "its connection closed without a message")

    def _send_stop(self) -> None:
        self._stop_sent = True
        self._post.record("stop", step=self._regrouping.furthest_step, reason="asked by the user")
        for member in self._roster.active():
            self._post.send(member, "stop")
