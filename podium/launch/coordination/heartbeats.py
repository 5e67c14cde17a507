"""Silent processes: one that is stopped or gone is lost after `heartbeat_s`, one that runs after `deadline_s`.

A running process may be silent longer because code that holds the interpreter's lock also blocks its heartbeats.
"""

from __future__ import annotations

from podium.launch.coordination.context import RunContext
from podium.launch.coordination.losses import Losses
from podium.launch.coordination.members import Member
from podium.launch.coordination.regrouping import Regrouping


class Heartbeats:
    """Watches when each member last sent a message."""

    def __init__(self, run: RunContext, regrouping: Regrouping, losses: Losses) -> None:
        self._run, self._regrouping, self._losses = run, regrouping, losses
        self._looked_at = run.now

    def look(self) -> None:
        """Call when all messages that have arrived are read."""
        now = self._run.now
        if now - self._looked_at > self._run.rules.heartbeat_s / 2:
            # The coordinator's own process was suspended or starved: the members were not silent.
            for member in self._run.roster.members.values():
                member.heard_at = now
        self._looked_at = now

    def check(self) -> None:
        now, rules = self._run.now, self._run.rules
        if now - self._looked_at > rules.heartbeat_s / 2:
            return  # something else took long: what members sent meanwhile is read first
        for member in self._run.roster.active():
            silent_s = now - member.heard_at
            if silent_s <= min(rules.heartbeat_s, rules.start_deadline_s):
                continue
            limit, setting = self._allowed(member)
            if silent_s > limit:
                self._losses.kill(member, f"silent for {silent_s:.1f} s, longer than {setting} allows", setting)

    def _allowed(self, member: Member) -> tuple[float, str]:
        """How long this process may be silent, and the setting that limits it."""
        rules, processes = self._run.rules, self._run.processes
        if not self._regrouping.furthest_step or not member.begun:  # until the first step, the run is starting
            return rules.start_deadline_s, "start_deadline_s"
        if processes is not None and processes.is_running(member.rank):
            return max((rules.deadline_s, "deadline_s"), (rules.heartbeat_s, "heartbeat_s"))
        return self._run.silence_s, "heartbeat_s"
