"""What all parts of the coordinator share."""

from __future__ import annotations

from typing import NamedTuple

from podium.comm.clocks import Clock
from podium.launch.coordination.owner import Owner, ProcessOwner
from podium.launch.coordination.post import Post
from podium.launch.coordination.roster import Roster
from podium.launch.coordination.rules import Rules

_BLIND = 5
"""Heartbeats of silence allowed where the launcher cannot see the silent process."""


class RunContext(NamedTuple):
    """The run that is coordinated: its limits, time, launcher, messages and members."""

    rules: Rules
    clock: Clock
    owner: Owner
    post: Post
    roster: Roster

    @property
    def now(self) -> float:
        return self.clock.now_s()

    @property
    def silence_s(self) -> float:
        """Silence after which a process that is not known to run counts as lost."""
        return self.rules.heartbeat_s * (_BLIND if self.processes is None else 1)

    @property
    def processes(self) -> ProcessOwner | None:
        """The launcher, where the processes are its children."""
        return self.owner if isinstance(self.owner, ProcessOwner) else None
