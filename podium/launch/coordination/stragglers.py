"""Workers that still send heartbeats but hang in the user's code, while other ranks wait for them.

Other workers wait in a regroup; servers wait for pushes. A worker that reports that it is busy has up to a dozen
deadlines.
"""

from __future__ import annotations

from typing import NamedTuple

from podium.comm.base import Message
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.losses import Losses
from podium.launch.coordination.members import Member
from podium.launch.coordination.regrouping import Regrouping
from podium.launch.coordination.replacements import Replacements


class ServerWait(NamedTuple):
    """The workers that a server waits for."""

    host: Member
    late: dict[int, float]
    """Since when, by worker."""
    waiting: frozenset[int]
    """Workers that wait for this server."""


class Stragglers:
    """Watches workers that other ranks wait for."""

    def __init__(self, run: RunContext, regrouping: Regrouping, replacements: Replacements, losses: Losses) -> None:
        self._run, self._regrouping, self._replacements, self._losses = run, regrouping, replacements, losses
        self._by_server: dict[int, ServerWait] = {}

    def hear(self, message: Message) -> None:
        """A server reports which workers it waits for."""
        meta, now = message.meta, self._run.now
        host = self._run.roster.members[message.source]
        host.heard_at = now
        late = {worker: now - late_s for worker, late_s in meta["late"]}
        self._by_server[meta["server"]] = ServerWait(host, late, frozenset(meta["waiting"]))

    def check(self) -> None:
        if self._run.roster.replacing:  # workers that wait for a lost server can neither report nor push
            return
        self._check_regroup()
        self._check_servers()

    def _check_regroup(self) -> None:
        if self._regrouping.waiting_since is None:
            return
        limit, now = self._run.rules.deadline_s, self._run.now
        since = max(self._regrouping.waiting_since, self._replacements.latest)
        for member in [m for m in self._run.roster.live_workers() if m.plan_request is None]:
            if member.is_late(now, since, limit):
                self._losses.kill(member, f"hung for {limit:g} s while the others waited for it", "deadline_s")

    def _check_servers(self) -> None:
        """A worker that servers wait for must make steps, unless it waits itself, for another server or for a plan."""
        members, now, limit = self._run.roster.members, self._run.now, self._run.rules.deadline_s
        waits = {server: wait for server, wait in self._by_server.items() if members.get(wait.host.rank) is wait.host}
        self._by_server = waits
        excused = {worker for wait in waits.values() for worker in wait.waiting}
        for server, wait in waits.items():
            for worker, late in wait.late.items():
                member = members.get(worker)
                if member is None or not member.active or member.plan_request or worker in excused:
                    continue
                since = max(late, member.stepped_at, self._replacements.latest)
                if member.is_late(now, since, limit):
                    cause = f"hung for {now - since:.1f} s while server {server} and others waited for it"
                    self._losses.kill(member, cause, "deadline_s")
