"""Processes that the run no longer needs, and that take too long to end by themselves."""

from __future__ import annotations

from podium.launch.coordination.context import RunContext
from podium.launch.coordination.losses import Losses
from podium.launch.coordination.scaling import Scaling

_LEAVE_S = 10.0
"""How long a server that was started during the run may outlive the last worker: it may never have met one."""


class Leavers:
    """Ends retired ranks, and all remaining processes once the last worker has ended."""

    def __init__(self, run: RunContext, scaling: Scaling, losses: Losses) -> None:
        self._run, self._scaling, self._losses = run, scaling, losses

    def check(self) -> None:
        roster, now = self._run.roster, self._run.now
        for member in [m for m in roster.members.values() if m.standing == "retired" and not m.finished]:
            if now - member.retired_at > self._run.rules.deadline_s:
                self._losses.give_up(member.rank)
        if roster.all_joined and not self._losses.ends_run and not roster.live_workers():
            self._end_rest(now)

    def _end_rest(self, now: float) -> None:
        """The last worker has ended: give up newcomers at once, and servers that stay too long."""
        roster, limit_s = self._run.roster, self._run.rules.deadline_s
        if self._losses.workers_ended_at is None:
            self._losses.workers_ended_at = now
        self._scaling.cancel()
        for rank in [*roster.starting, *(m.rank for m in roster.newcomers())]:
            self._losses.give_up(rank)
        for member in roster.active():
            # Servers that the run began with are connected to the workers, and end by themselves.
            allowed_s = max(_LEAVE_S, limit_s) if member.start.kind == "first" else _LEAVE_S
            if now - self._losses.workers_ended_at > allowed_s:
                self._losses.give_up(member.rank)
