"""Triggers with a position that is known beforehand: a step, an epoch, or a share of the budget."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, final

from podium.errors import ConfigError
from podium.strategies.triggers.base import Course, Memory, Outlook, Reading, Seen, Trigger


class Fixed(Trigger):
    """Ends the phase at a known position; `after` counts from the phase's beginning, `at` from the run's."""

    at: float | None = None
    after: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        given = [value for value in (self.at, self.after) if value is not None]
        if len(given) != 1 or not given[0] > 0:
            raise ConfigError(f"trigger {self.name}: one of at and after must be given, above 0, got {self}")

    def horizon(self, course: Course) -> int:
        place = self._steps(self.at if self.at is not None else self.after or 0.0, course)
        began = 0 if self.at is not None else course.step_at(course.began)
        return min(super().horizon(course), course.position_of(began + place))

    def never(self, outlook: Outlook) -> str:
        course = outlook.course
        name, amount = ("after", self.after or 0.0) if self.at is None else ("at", self.at)
        began = course.step_at(course.began) if self.at is None else 0
        place = course.position_of(began + self._steps(amount, course))
        if place >= course.end:
            return f"{name}={amount:g} lies at or beyond the end of the run, which has {_length(course)}"
        if place > super().horizon(course):
            return f"{name}={amount:g} lies beyond latest={self.latest:g}, which ends the phase before"
        if place <= course.began > 0:
            return f"{name}={amount:g} has passed before the phase begins, so the phase ends at once"
        return ""

    @abstractmethod
    def _steps(self, amount: float, course: Course) -> float:
        """The amount in global steps."""

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        """Workers do not vote on it, since all know the position. Evaluated only to record when it would have fired."""
        horizon = self.horizon(seen.course)
        if seen.position < horizon:
            return None
        return Reading(float(seen.position), float(horizon), True, self.reached)

    @property
    def reached(self) -> str:
        """The reason in the record of the switch: `epoch 2 reached`, `2 epochs after the phase began`."""
        if self.at is not None:
            return f"{self.name} {self.at:g} reached"
        return f"{self.after:g} {self.name}{'s' * (self.after != 1)} after the phase began"


@final
@dataclass(frozen=True, kw_only=True)
class AtStep(Fixed):
    """After a number of global steps."""

    name: ClassVar[str] = "step"
    at: float | None = None
    after: float | None = None
    latest: float = 1.0

    def _steps(self, amount: float, course: Course) -> float:
        return amount


@final
@dataclass(frozen=True, kw_only=True)
class AtEpoch(Fixed):
    """After a number of epochs, whole or not."""

    name: ClassVar[str] = "epoch"
    at: float | None = None
    after: float | None = None
    latest: float = 1.0

    def _steps(self, amount: float, course: Course) -> float:
        return amount * course.steps_per_epoch


@final
@dataclass(frozen=True, kw_only=True)
class AtShare(Fixed):
    """After a share of the budget, as in Sync-Switch.

    Li, Mangoubi, Xu, Guo, Sync-Switch, ICDCS 2021, https://arxiv.org/abs/2104.08364
    """

    name: ClassVar[str] = "share"
    at: float | None = None
    after: float | None = None
    latest: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if max(self.at or 0.0, self.after or 0.0) >= 1:
            raise ConfigError(f"trigger share: must be below 1, the whole budget, got {self}")

    def _steps(self, amount: float, course: Course) -> float:
        return amount * course.step_at(course.end)


def _length(course: Course) -> str:
    return f"{course.step_at(course.end):,} steps ({course.end / course.samples:g} epochs)"
