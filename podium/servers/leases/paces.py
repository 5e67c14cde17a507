"""Speeds that workers report with their pushes: for leases in proportion to speed, and for the phases' triggers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.servers.wire.messages import Push


class Paces:
    """The last reported speed of each worker, over all segments."""

    def __init__(self) -> None:
        self._busy: dict[int, float] = {}  # seconds of computing per sample
        self._step: dict[int, float] = {}  # nanoseconds per local step

    def hear(self, worker: int, push: Push) -> None:
        if push.busy > 0:
            self._busy[worker] = push.busy
        if push.pace > 0:
            self._step[worker] = push.pace

    @property
    def is_known(self) -> bool:
        """Whether any worker has reported its computing time."""
        return bool(self._busy)

    def busy(self, training: Sequence[int]) -> list[tuple[int, float]]:
        """Seconds of computing per sample of all these workers; empty where one is not known yet."""
        known = [(worker, self._busy[worker]) for worker in training if worker in self._busy]
        return known if len(known) == len(training) else []

    def steps(self, worker: int, training: Sequence[int], most: int) -> int:
        """How many local steps a worker does while the fastest does `most`; one where its pace is not known yet."""
        paces = {w: self._step[w] for w in training if w in self._step}
        return max(1, round(most * min(paces.values()) / paces[worker])) if worker in paces else 1
