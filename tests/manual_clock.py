"""A clock that tests move, so that deadlines and speeds are shown without waiting."""

from __future__ import annotations

from typing import final

from podium.comm.clocks import Clock


@final
class ManualClock(Clock):
    """Time passes when a test says so."""

    def __init__(self) -> None:
        self._ns = 0

    def now_ns(self) -> int:
        return self._ns

    def advance(self, seconds: float) -> None:
        self._ns += round(seconds * 1e9)
