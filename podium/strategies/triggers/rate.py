"""The first decay of the learning rate ends the phase, as in post-local SGD.

Lin, Stich, Patel, Jaggi, Don't Use Large Mini-Batches, Use Local SGD, ICLR 2020, https://arxiv.org/abs/1808.07217
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.errors import ConfigError
from podium.strategies.triggers.base import Memory, Outlook, Reading, Seen, Trigger


@final
@dataclass(frozen=True, kw_only=True)
class RateDecay(Trigger):
    """Fires once the learning rate has fallen to a part of its highest so far; a warm-up does not fire it."""

    name: ClassVar[str] = "rate-decay"

    to: float = 0.5
    """Fires at this part of the highest rate so far, or below."""
    latest: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.to < 1:
            raise ConfigError(f"trigger rate-decay: to must lie between 0 and 1, got {self.to}")

    def never(self, outlook: Outlook) -> str:
        if outlook.rates is None:
            return ""
        course, highest, fallen = outlook.course, 0.0, False
        last = course.step_at(self.horizon(course))
        for rate in outlook.rates[course.step_at(course.began) : last]:
            highest = max(highest, rate)
            fallen = fallen or (highest > 0 and rate <= self.to * highest)
        if fallen:
            return ""
        return f"the schedule leaves the learning rate above {self.to:g} of its highest for the phase's {last:,} steps"

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        if seen.validated is not None:
            return None
        memory["highest"] = max(memory.get("highest", 0.0), seen.rate)
        value = seen.rate / memory["highest"] if memory["highest"] else 1.0
        fires = value <= self.to
        if not fires and abs(value - memory.get("read", 2.0)) < 0.01:  # a smooth schedule changes it at every step
            return None
        memory["read"] = value
        return Reading(value, self.to, fires, f"learning rate {seen.rate:.4g}, highest {memory['highest']:.4g}")
