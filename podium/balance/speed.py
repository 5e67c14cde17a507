"""How long a worker takes for a pass over some samples: t(b) = fixed + per_sample * b, learnt while it trains."""

from __future__ import annotations

from typing import NamedTuple


class Speed(NamedTuple):
    """What a forward and backward pass takes on one worker."""

    fixed_s: float
    per_sample_s: float
    noise: float = 0.0
    """Coefficient of variation of a pass."""
    error: float = 0.0
    """Relative standard error of what `seconds` says."""
    passes: int = 0
    """How many passes this is learnt from; 0: nothing is known."""

    def seconds(self, samples: float) -> float:
        """What a pass over so many samples takes."""
        return self.fixed_s + self.per_sample_s * samples


class SpeedModel:
    """One worker's speed, from its own passes."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, float]] = []

    def observe(self, samples: int, seconds: float) -> None:
        """A pass over so many samples took so long."""
        self._seen.append((samples, seconds))

    @property
    def speed(self) -> Speed:
        """What is known now."""
        last = self._seen[-8:]
        if len(self._seen) < 3:
            return Speed(0.0, 0.0)
        return Speed(0.0, sum(s for _, s in last) / sum(n for n, _ in last), 0.0, 0.0, len(last))
