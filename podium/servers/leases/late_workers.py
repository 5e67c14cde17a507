"""The workers that a server waits for, and for how long.

A worker that hangs in its own code still sends heartbeats, so only its servers notice that other workers wait for it.
They report it to the launcher, which can end a process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.comm.base import Meta

_LOOK_S = 1.0
"""How often a server checks which workers it waits for."""


class LateWorkers:
    """Reports to the launcher which workers a server waits for, once it is for longer than half the deadline."""

    def __init__(
        self,
        server: int,
        deadline_s: float,
        tell: Callable[[Meta], None] | None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._server, self._deadline_s, self._tell, self._now_s = server, deadline_s, tell, now_s
        self.look_s = None if tell is None else min(_LOOK_S, deadline_s / 8)
        """Seconds between two checks; None: never."""
        self._look_at = 0.0
        self._late: dict[int, float] = {}  # by worker: since when the server waits for it
        self._told = False

    @property
    def is_due(self) -> bool:
        return self.look_s is not None and self._now_s() >= self._look_at

    def heard(self, worker: int) -> None:
        """A worker has sent a message."""
        if self._late:
            self._late.pop(worker, None)

    def look(self, awaited: Collection[int], waiting: Collection[int]) -> None:
        """The server waits for `awaited`; `waiting` wait for the server."""
        assert self._tell is not None and self.look_s is not None
        now = self._now_s()
        self._look_at = now + self.look_s
        self._late = {worker: self._late.get(worker, now) for worker in awaited}
        late_s = {worker: now - since for worker, since in self._late.items()}
        if self._told or max(late_s.values(), default=0.0) > self._deadline_s / 2:
            self._told = bool(late_s)
            self._tell({"server": self._server, "late": sorted(late_s.items()), "waiting": sorted(waiting)})
