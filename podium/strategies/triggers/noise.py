"""The gradient noise scale ends the phase: once it is well above the batch, exact steps gain little.

How it is measured: `podium/records/noise.py`.

McCandlish, Kaplan, Amodei et al., An Empirical Model of Large-Batch Training, 2018, https://arxiv.org/abs/1812.06162
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.errors import ConfigError
from podium.strategies.triggers.base import Memory, Outlook, Reading, Seen, Trigger


@final
@dataclass(frozen=True, kw_only=True)
class NoiseScale(Trigger):
    """Fires once the gradient noise scale is `factor` times the global batch."""

    name: ClassVar[str] = "noise"
    needs_noise: ClassVar[bool] = True

    factor: float = 4.0
    every: int = 20
    """Global steps between two evaluations, and before the first."""
    latest: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.factor > 0 or self.every < 1:
            raise ConfigError(f"trigger noise: factor must be above 0 and every at least 1, got {self}")

    def never(self, outlook: Outlook) -> str:
        steps = outlook.steps_before(self.horizon(outlook.course))
        if outlook.workers < 2:
            return "the gradient noise scale is measured between workers, and there is one"
        if steps < self.every:
            return f"it is evaluated every {self.every} steps, and the phase has {steps} at most"
        return ""

    def judge(self, seen: Seen, memory: Memory) -> Reading | None:
        if seen.validated is not None or seen.noise is None:
            return None
        memory["steps"] = memory.get("steps", 0) + 1
        if memory["steps"] % self.every:
            return None
        value = seen.noise / seen.course.batch_size
        why = f"gradient noise scale {seen.noise:.4g} samples, batch {seen.course.batch_size}"
        return Reading(value, self.factor, value >= self.factor, why)
