"""The phase ends when a straggler appears, or when none is left: the online policies of Sync-Switch.

A worker lags when its speed is below the mean minus one standard deviation of all workers, and at least `factor` times
below the median: among similar workers, one is always below the first bound.

Li, Mangoubi, Xu, Guo, Sync-Switch, ICDCS 2021, https://arxiv.org/abs/2104.08364
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, final

from podium.errors import ConfigError
from podium.strategies.triggers.base import Memory, Outlook, Reading, Seen, Trigger


@final
@dataclass(frozen=True, kw_only=True)
class Straggler(Trigger):
    """Fires when a worker has lagged for `patience` evaluations in a row; with `gone`, when none has."""

    name: ClassVar[str] = "straggler"
    needs_times: ClassVar[bool] = True

    factor: float = 1.5
    """How many times slower than the median a straggler is."""
    patience: int = 3
    """Evaluations in a row."""
    gone: bool = False
    """Fire when no worker lags any more, instead of when one does."""
    latest: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor > 1 or self.patience < 1:
            raise ConfigError(f"trigger straggler: factor must be above 1 and patience at least 1, got {self}")

    def never(self, outlook: Outlook) -> str:
        if outlook.workers < 2:
            return "it compares workers' speeds, and there is one worker"
        if outlook.compared_every is None:
            return ""
        steps = outlook.steps_before(self.horizon(outlook.course))
        seen, every = steps // outlook.compared_every, outlook.compared_every
        if seen >= self.patience:
            return ""
        return (
            f"it wants {self.patience} comparisons of speeds in a row, one every {every} steps, and the phase has "
            f"{steps} steps at most"
        )

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        if len(seen.times) < 2 or seen.validated is not None:
            return None
        worst, slowness, lags = slowest(seen.times, self.factor)
        memory["row"] = memory.get("row", 0) + 1 if lags != self.gone else 0
        why = f"worker {worst} is {slowness:.2f} times slower than the median, {memory['row']} in a row"
        return Reading(slowness, self.factor, memory["row"] >= self.patience, why)


def slowest(times: Mapping[int, float], factor: float) -> tuple[int, float, bool]:
    """The slowest worker, how many times slower than the median it is, and whether it lags."""
    speeds = {rank: 1 / max(seconds, 1e-12) for rank, seconds in times.items()}
    worst = min(speeds, key=lambda rank: (speeds[rank], rank))
    slowness = statistics.median(speeds.values()) / speeds[worst]
    bound = statistics.mean(speeds.values()) - statistics.pstdev(speeds.values())
    # Of two workers, the slower one lies exactly at the bound.
    return worst, slowness, slowness >= factor and speeds[worst] <= bound * (1 + 1e-9)
