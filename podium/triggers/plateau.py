"""The rule of Strategy-Switch: the phase ends once the loss has settled.

Of the last w losses, one per epoch, s = 1/(w-1) * sum |L_i - L_{i-1}| / L_{i-1}; fires when s <= threshold.

Provatas, Chalas, Konstantinou, Koziris, Strategy-Switch: From All-Reduce to Parameter Server for Faster Efficient
Training, IEEE Access 13, 2025, https://doi.org/10.1109/ACCESS.2025.3528248 (w = 6, threshold 0.01).

Two things keep the plain rule from firing. Losses are noisy, and s adds up the noise: they are smoothed first. And a
loss that falls by the same factor every epoch keeps s where it is for ever: a loss below `floor` counts as `floor` in
the denominator, so that changes too small to matter look small. `latest` ends the phase where neither helps.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import ClassVar, Literal, final

from podium.errors import ConfigError
from podium.triggers.base import Memory, Reading, Seen, Trigger


@final
@dataclass(frozen=True, kw_only=True)
class Plateau(Trigger):
    """Fires when the mean relative change of the loss over a window of epochs is small."""

    name: ClassVar[str] = "plateau"

    window: int = 6
    """How many losses are looked at."""
    threshold: float = 0.01
    on: Literal["training", "validation"] = "training"
    """Which loss: the mean over an epoch's steps, or that of each validation."""
    smoothing: float = 0.5
    """How much of the smoothed loss is what it was before; 0 takes losses as they come."""
    floor: float = 0.05
    """A loss below this counts as this much."""
    latest: float = 0.35

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.window < 2:
            raise ConfigError(f"trigger plateau: window must be at least 2, got {self.window}")
        if not self.threshold >= 0 or not self.floor >= 0:
            raise ConfigError(f"trigger plateau: threshold and floor must be 0 or more, got {self}")
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"trigger plateau: smoothing must be at least 0 and below 1, got {self.smoothing}")

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        loss = seen.validated if self.on == "validation" else _mean_of_epoch(seen, memory)
        if loss is None:
            return None
        before = memory.get("smoothed", loss)
        memory["smoothed"] = smoothed = self.smoothing * before + (1 - self.smoothing) * loss
        losses = memory["losses"] = [*memory.get("losses", []), smoothed][-self.window :]
        if len(losses) < self.window:
            return Reading(float("inf"), self.threshold, False, f"{len(losses)} of {self.window} losses seen")
        s = change(losses, self.floor)
        word = "settled" if s <= self.threshold else "still changes"
        return Reading(s, self.threshold, s <= self.threshold, f"{self.on} loss {word}: {loss:.4g}")


def change(losses: list[float], floor: float) -> float:
    """The mean relative change from one loss to the next."""
    steps = [abs(b - a) / max(a, floor, 1e-12) for a, b in itertools.pairwise(losses)]
    return sum(steps) / len(steps)


def _mean_of_epoch(seen: Seen, memory: Memory) -> float | None:
    """The mean training loss of the epoch that has just ended; None in its midst.

    Where workers go in step, an epoch ends with a step; where they do not, its end is seen with the first step of the
    next.
    """
    if seen.loss is None or seen.validated is not None:
        return None
    epoch, at_end = (seen.position - 1) // seen.course.samples, seen.position % seen.course.samples == 0
    ended: list[float] = []
    if epoch != memory.get("epoch", epoch):
        ended, memory["steps"] = memory["steps"], []
    memory["epoch"] = epoch
    memory["steps"] = [*memory.get("steps", []), seen.loss]
    if at_end:
        ended, memory["steps"] = memory["steps"], []
    return sum(ended) / len(ended) if ended else None
