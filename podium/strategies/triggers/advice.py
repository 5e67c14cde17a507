"""Advice from a cost model: the phase ends once asynchronous training is predicted to be faster by a factor.

From the workers' measurements (seconds of computing per sample t_i, step time T, b samples each, p workers, n bytes):

    exchange of a synchronous step    X = T - max_i b t_i, of which a ring takes 2 (p-1)/p n/R: so n/R = X p / (2 (p-1))
    asynchronous, per global batch    A = B / sum_i b / (b t_i + 2 n/R)

fires when T / A >= gain. The model ignores that exchanges overlap with backward (X is then too small, and A with it),
that many workers may share the servers' links, and that staleness costs accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.errors import ConfigError
from podium.strategies.triggers.base import Memory, Outlook, Reading, Seen, Trigger


@final
@dataclass(frozen=True, kw_only=True)
class Advice(Trigger):
    """Fires when asynchronous training is predicted to be `gain` times as fast."""

    name: ClassVar[str] = "advice"
    needs_times: ClassVar[bool] = True

    gain: float = 1.3
    """Predicted speed-up at which it fires."""
    after: float = 0.1
    """Share of the budget before which it does not fire."""
    latest: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.gain > 0 or not 0 <= self.after < 1:
            raise ConfigError(f"trigger advice: gain must be above 0 and after at least 0 and below 1, got {self}")

    def never(self, outlook: Outlook) -> str:
        if outlook.workers < 2:
            return "it compares workers' speeds, and there is one worker"
        course, every = outlook.course, outlook.compared_every
        last = self.horizon(course)
        if course.position_at(self.after) > last:
            return f"advice counts after {self.after:g} of the budget, and latest={self.latest:g} ends the phase before"
        steps = outlook.steps_before(last)
        if every is not None and steps < every:
            return f"speeds are compared every {every} steps, and the phase has {steps} at most"
        return ""

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        if len(seen.times) < 2 or seen.step_s <= 0 or seen.validated is not None:
            return None
        memory["step_s"] = step_s = 0.8 * memory.get("step_s", seen.step_s) + 0.2 * seen.step_s
        value = predicted_gain(list(seen.times.values()), step_s, seen.course.batch_size)
        why = f"asynchronous training is predicted to be {value:.2f} times as fast"
        return Reading(value, self.gain, value >= self.gain and seen.share >= self.after, why)


def predicted_gain(times: list[float], step_s: float, batch_size: int) -> float:
    """Synchronous time of a global batch over its asynchronous time."""
    workers = len(times)
    own = batch_size / workers
    exchange = max(0.0, step_s - own * max(times))
    transfer = exchange * workers / (2 * (workers - 1))
    rate = sum(own / (own * t + 2 * transfer) for t in times)
    return step_s * rate / batch_size
