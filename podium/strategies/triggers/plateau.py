"""The rule of Strategy-Switch: the phase ends once the loss has settled.

Of the last w losses, one per epoch, s = 1/(w-1) * sum |L_i - L_{i-1}| / D_i; fires when s <= threshold.

As published, D_i = L_{i-1}, w = 6 and the threshold is 0.01 (`against=last;threshold=0.01;floor=0;fallen=1`). On
LeNet-5 and ResNet-20 that never fired in time: where the loss falls by the same factor every epoch, s is constant. So
by default D_i is the first loss seen: s is the change per epoch relative to the first loss. Three more settings make it
fire when it should: a loss below `floor` counts as `floor` in the denominator, so that changes too small to matter look
small; the rule does not fire before the loss has `fallen` to a part of the first, since some models make no progress
before they begin to learn; and `latest` ends the phase if the rule does not.

Provatas, Chalas, Konstantinou, Koziris, Strategy-Switch: From All-Reduce to Parameter Server for Faster Efficient
Training, IEEE Access 13, 2025, https://doi.org/10.1109/ACCESS.2025.3528248
"""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from podium.errors import ConfigError
from podium.strategies.triggers.base import Course, Memory, Outlook, Reading, Seen, Trigger

MOST, LEAST = 6, 3
"""Bounds of a window that depends on the budget: as published where it fits, and never fewer than two changes."""


@final
@dataclass(frozen=True, kw_only=True)
class Plateau(Trigger):
    """Fires when the loss has settled: its mean change over a window of epochs is small."""

    name: ClassVar[str] = "plateau"

    window: int = MOST
    """Number of losses in the mean; 0: 6, or as many as the phase sees before `latest` ends it, at least 3."""
    threshold: float = 0.05
    """Fires at this change per loss, or less."""
    against: Literal["first", "last"] = "first"
    """A change is relative to the first loss or, as published, to the one before it."""
    on: Literal["training", "validation"] = "training"
    """Which loss: the mean over an epoch's steps, or that of each validation."""
    smoothing: float = 0.0
    """Weight of the previous smoothed loss in the new one; 0: no smoothing."""
    floor: float = 0.05
    """A loss below this counts as this much."""
    fallen: float = 0.8
    """Does not fire before the loss is this part of the first, or less; 1: fires at any loss."""
    latest: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2 and self.window != 0:
            raise ConfigError(
                f"trigger plateau: window must be at least 2, or 0 for one by the budget, got {self.window}"
            )
        if not self.threshold >= 0 or not self.floor >= 0:
            raise ConfigError(f"trigger plateau: threshold and floor must be 0 or more, got {self}")
        if not 0 < self.fallen <= 1:
            raise ConfigError(f"trigger plateau: fallen must be above 0 and at most 1, got {self.fallen}")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"trigger plateau: smoothing must be at least 0 and below 1, got {self.smoothing}")

    def fitted(self, course: Course) -> Plateau:
        return self if self.window else dataclasses.replace(self, window=self.losses_wanted(course))

    def never(self, outlook: Outlook) -> str:
        course = outlook.course
        window, seen = self.losses_wanted(course), self._losses_seen(course)
        if seen >= window:
            return ""
        unit = "validations'" if self.on == "validation" else "epochs'"
        ends = f"{self.horizon(course) / course.samples:.3g} of {course.end / course.samples:.3g} epochs"
        return (
            f"it looks at {window} {unit} losses and sees {seen} before latest={self.latest:g} ends the phase "
            f"(at {ends})"
        )

    def losses_wanted(self, course: Course) -> int:
        """The window; with `window=0`, chosen by the run's budget."""
        return self.window or max(LEAST, min(MOST, self._losses_seen(course)))

    def _losses_seen(self, course: Course) -> int:
        """Number of losses before the phase ends at the latest."""
        epochs = 1 if self.on == "training" else course.eval_every
        samples = epochs * course.samples
        return self.horizon(course) // samples - course.began // samples if samples else 0

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        loss = seen.validated if self.on == "validation" else _mean_of_epoch(seen, memory)
        if loss is None:
            return None
        before = memory.get("smoothed", loss)
        memory["smoothed"] = smoothed = self.smoothing * before + (1 - self.smoothing) * loss
        first = memory.setdefault("first", loss)
        window = self.losses_wanted(seen.course)
        losses = memory["losses"] = [*memory.get("losses", []), smoothed][-window:]
        if len(losses) < window:
            return Reading(float("inf"), self.threshold, False, f"{len(losses)} of {window} losses seen")
        s = change(losses, self.floor, first if self.against == "first" else None)
        if s <= self.threshold and smoothed > self.fallen * first:
            return Reading(s, self.threshold, False, f"{self.on} loss has not begun to fall: {loss:.4g}")
        word = "settled" if s <= self.threshold else "still changes"
        return Reading(s, self.threshold, s <= self.threshold, f"{self.on} loss {word}: {loss:.4g}")


def change(losses: list[float], floor: float, first: float | None = None) -> float:
    """The mean change from one loss to the next, relative to `first` or, where it is None, to the one before."""
    steps = [abs(b - a) / max(a if first is None else first, floor, 1e-12) for a, b in itertools.pairwise(losses)]
    return sum(steps) / len(steps)


def _mean_of_epoch(seen: Seen, memory: Memory) -> float | None:
    """The mean training loss of the epoch that has just ended; None within an epoch.

    Where workers take steps together, an epoch ends with a step; otherwise its end is seen with the first step of the
    next epoch.
    """
    if seen.loss is None or seen.validated is not None:
        return None
    moved, samples = seen.position != memory.get("position", seen.course.began), seen.course.samples
    memory["position"] = seen.position
    # Within a round the position stays where the round began.
    epoch = (seen.position - 1) // samples if moved else seen.position // samples
    at_end = moved and seen.position % samples == 0
    mean = None
    if epoch != memory.get("epoch", epoch) and memory["count"]:
        mean, memory["sum"], memory["count"] = memory["sum"] / memory["count"], 0.0, 0
    memory["epoch"] = epoch
    memory["sum"] = memory.get("sum", 0.0) + seen.loss
    memory["count"] = memory.get("count", 0) + 1
    if at_end:
        mean, memory["sum"], memory["count"] = memory["sum"] / memory["count"], 0.0, 0
    return mean
