"""A trigger: the rule that ends a phase.

A frozen dataclass of settings, like a strategy. The first worker evaluates it after every step and every validation;
the rule's state is a plain mapping, which checkpoints save. A rule that knows beforehand where it will fire returns the
position (`horizon`), and then workers do not vote on it.

Phases must end: `latest` is the share of the run's budget at which the phase ends even if the rule has not fired.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

from podium.errors import ConfigError

Memory = dict[str, Any]
"""A rule's state: JSON types only."""


class Course(NamedTuple):
    """The run that a phase is part of, in samples of the global order."""

    samples: int  # per epoch
    batch_size: int
    end: int = 0
    began: int = 0  # where the present phase began
    again: bool = False  # whether the phase ran before
    eval_every: int = 1  # epochs between validations; 0: only at the end

    @property
    def steps_per_epoch(self) -> int:
        return -(-self.samples // self.batch_size)

    def position_of(self, step: float) -> int:
        """Samples used by that many global steps, rounded; the last step of each epoch may be short."""
        epochs, rest = divmod(round(step), self.steps_per_epoch)
        return epochs * self.samples + rest * self.batch_size

    def step_at(self, position: int) -> int:
        """How many global steps these samples make up."""
        epochs, offset = divmod(position, self.samples)
        return epochs * self.steps_per_epoch + -(-offset // self.batch_size)

    def position_at(self, share: float) -> int:
        """The position at which this share of the budget is used, at the end of a global step."""
        return min(self.end, self.position_of(share * self.step_at(self.end)))


class Outlook(NamedTuple):
    """What is known of a phase before the run begins."""

    course: Course
    """`began` is the earliest position at which the phase can begin."""
    workers: int = 1
    compared_every: int | None = None
    """Global steps between two comparisons of the workers' speeds; None where unknown."""
    rates: Sequence[float] | None = None
    """The learning rate of each global step; None where unknown."""

    def steps_before(self, position: int) -> int:
        """Global steps of the phase up to this position."""
        return self.course.step_at(position) - self.course.step_at(self.course.began)


class Seen(NamedTuple):
    """What the first worker sees after a step or a validation."""

    course: Course
    position: int
    loss: float | None = None
    """Mean training loss of the last step over all workers; in asynchronous training, the first worker's own."""
    validated: float | None = None
    """The loss of a validation that has just ended."""
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
    """Whether the rule needs a comparison of the workers' speeds."""
    needs_noise: ClassVar[bool] = False
    """Whether the rule needs the gradient noise scale."""
    latest: float = 1.0
    """Share of the budget at which the phase ends in any case; when a phase repeats, counted from its beginning."""

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
        """This rule, with settings filled in that depend on the run's budget."""
        return self

    def never(self, outlook: Outlook) -> str:
        """Why this rule cannot fire before the phase ends anyway; empty where it can, or may."""
        return ""

    @abstractmethod
    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        """The rule's value now, or None where it is not evaluated. `memory` begins empty and may be written to."""
