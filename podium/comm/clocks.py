"""Clocks: wall time, and wall time on a slower accelerator. The virtual world has its own clock."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from typing import ClassVar, final

from podium.errors import ConfigError


class Clock(ABC):
    """A world's time. In a real world it passes by itself; in the virtual one work must be charged."""

    is_simulated: ClassVar[bool] = False
    """Whether time is simulated, so that even a check for which ranks wait changes the run's duration."""

    @abstractmethod
    def now_ns(self) -> int:
        """Nanoseconds since the run began."""

    def now_s(self) -> float:
        return self.now_ns() / 1e9

    def begin_pass(self, samples: int) -> None:
        """A forward and backward pass over this many samples begins now."""

    def reach(self, fraction: float) -> None:
        """This fraction of the backward pass is done."""

    def touch(self, nbytes: int) -> None:
        """This many bytes of parameters were updated in memory."""


@final
class WallClock(Clock):
    """Nanoseconds since its creation, or since `start_ns` of the machine's monotonic clock, which ranks may share."""

    def __init__(self, start_ns: int | None = None) -> None:
        self._start = time.monotonic_ns() if start_ns is None else start_ns

    def now_ns(self) -> int:
        return time.monotonic_ns() - self._start


@final
class SlowClock(Clock):
    """Wall time on a slower accelerator: each pass takes 1 / speed times as long, by sleeping.

    It sleeps whenever a part of the pass is done, so that gradients come as late as they would there. Other ranks have
    the processor meanwhile. Time is measured on the host: work that a pass queues on a GPU does not count.
    """

    def __init__(
        self,
        wall: Clock,
        *,
        speed: float,
        changes: Sequence[tuple[int, float]] = (),
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """`changes`: pairs of a time, in nanoseconds of this clock, and the speed from then on; in order of time."""
        for each in (speed, *(changed for _, changed in changes)):
            if not 0 < each <= 1:
                raise ConfigError(f"a slow clock's speed must be above 0 and at most 1, got {each}")
        self._wall, self._sleep = wall, sleep
        self._speed, self._changes = speed, deque(changes)
        self._since: int | None = None  # when the part of the pass under way began; None between passes

    def now_ns(self) -> int:
        return self._wall.now_ns()

    def begin_pass(self, samples: int) -> None:
        while self._changes and self.now_ns() >= self._changes[0][0]:
            _, self._speed = self._changes.popleft()
        self._since = self.now_ns()

    def reach(self, fraction: float) -> None:
        if self._since is None:
            return
        self._sleep((self.now_ns() - self._since) * (1 / self._speed - 1) / 1e9)
        self._since = self.now_ns() if fraction < 1 else None
