"""A trigger: the rule that ends a phase.

A frozen dataclass of settings, like a strategy. The first worker feeds it what it sees after every step and every
validation; what the rule must remember is a plain mapping, which checkpoints keep. A rule that knows beforehand where
it will fire says so (`horizon`), and then nobody has to vote on it.

Rules must end: `latest` is the share of the run's budget at which the phase ends whatever the rule says.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from podium.errors import ConfigError

Memory = dict[str, Any]
"""What a rule remembers: JSON types only."""


class Course(NamedTuple):
    """The run that a phase is part of, in samples of the global order."""

    samples: int  # per epoch
    batch_size: int
    end: int = 0
    began: int = 0  # where the present phase began
    again: bool = False  # whether it is not its first time
    eval_every: int = 1  # epochs between validations; 0: only at the end

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    def position_of(self, step: float) -> int:
        """Samples used by that many global steps, to the nearest whole one; the last of each epoch may be short."""
        epochs, rest = divmod(round(step), self.steps_per_epoch)
        return epochs * self.samples + rest * self.batch_size

    def step_at(self, position: int) -> int:
        """How many global steps these samples make up."""
        epochs, offset = divmod(position, self.samples)
        return epochs * self.steps_per_epoch + -(-offset // self.batch_size)

    def position_at(self, share: float) -> int:
        """Where this share of the budget is used up: at the end of a global step."""
        return min(self.end, self.position_of(share * self.step_at(self.end)))


class Outlook(NamedTuple):
    """What is known of a phase before the run begins."""

    course: Course
    """`began` is where the phase begins at the earliest."""
    workers: int = 1
    compared_every: int | None = None
    """Global steps between two comparisons of the workers' speeds; None where it is not known."""
    rates: Sequence[float] | None = None
    """The learning rate of each global step; None where it is not known."""

    def steps_before(self, position: int) -> int:
        """Global steps of the phase up to this place."""
        return self.course.step_at(position) - self.course.step_at(self.course.began)


class Seen(NamedTuple):
    """What the first worker sees after a step or a validation."""

    course: Course
    position: int
    loss: float | None = None
    """Mean training loss of the last step over all workers; its own, where workers do not go in step."""
    validated: float | None = None
    """The loss of a validation that has just been made."""
    metrics: Mapping[str, float] = {}
    """Of that validation."""
    rate: float = 0.0
    """The learning rate of the first parameter group."""
    times: Mapping[int, float] = {}
    """Seconds of computing per sample, by worker; empty where they were not just compared."""
    step_s: float = 0.0
    """How long the last step took, waiting included."""
    noise: float | None = None
    """The gradient noise scale in samples; None where it was not measured."""

    @property
    def epoch(self) -> float:
        return self.position / self.course.samples

    @property
    def share(self) -> float:
        """Of the budget."""
        return self.position / self.course.end


class Reading(NamedTuple):
    """A rule's value at one evaluation."""

    value: float
    threshold: float
    fires: bool
    why: str


class Trigger(ABC):
    """When a phase ends. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    needs_times: ClassVar[bool] = False
    """Whether workers' speeds must be compared for it."""
    needs_noise: ClassVar[bool] = False
    """Whether the gradient noise scale must be measured for it."""
    latest: float = 1.0
    """Share of the budget at which the phase ends in any case; from its second time on, counted from its beginning."""

    def __post_init__(self) -> None:
        if not 0 < self.latest <= 1:
            raise ConfigError(f"trigger {self.name}: latest must be above 0 and at most 1, got {self.latest}")

    def horizon(self, course: Course) -> int:
        """The sample position at which the phase ends at the latest."""
        if not course.again:
            return course.position_at(self.latest)
        steps = course.step_at(course.began) + self.latest * course.step_at(course.end)
        return min(course.end, course.position_of(steps))

    def fitted(self, course: Course) -> Trigger:
        """This rule with what it leaves open until the run's budget is known."""
        return self

    def never(self, outlook: Outlook) -> str:
        """Why this rule cannot fire before the phase ends anyway; empty where it can, or where that is not known."""
        return ""

    @abstractmethod
    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        """The rule's value now, or None where this is no time for it. `memory` begins empty and may be written to."""
