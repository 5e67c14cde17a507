"""Work stealing: no worker is told how much to do; a worker that has finished draws more.

A global step is cut into micro-batches, and every worker draws the next one from a counter that all share until the
step has none left. A slow worker draws fewer, whatever made it slow and however recently: no speed is guessed.
What it costs: a draw and the fixed part of a pass for every micro-batch, and at the end of a step the fast wait for
the micro-batch that the slowest is at, so the last ones are smaller. Simulated with 2 to 8 workers of random speeds up
to 5:1, the default comes to 96 % of what their speeds add up to where a pass costs its samples and nothing else, to
87 % where it costs as much more as one sample of an equal part of 64, and to 79 % with two. Then take larger ones, or
balance=equal-finish.

Dividing what is left by the number of workers is guided self-scheduling: Polychronopoulos and Kuck, 1987.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, final

from podium.balance.base import Balancer, Member
from podium.data.order import divide
from podium.errors import ConfigError

PARTS = 4
"""Micro-batches for each worker in a step, where their size is not given."""
SHRINK = 4
"""How many times smaller the last ones are."""


@final
@dataclass(frozen=True, kw_only=True)
class Steal(Balancer):
    """Each micro-batch goes to the worker that draws it first, and is a pass of its own: `accumulate` splits none."""

    name: ClassVar[str] = "steal"

    micro: int | None = None
    """Samples of a micro-batch; a quarter of an equal part, when not given. Never more than `accumulate` allows for a
    pass."""
    least: int | None = None
    """Samples of the last ones: they shrink towards the end of a step; a quarter of `micro`, when not given."""

    def __post_init__(self) -> None:
        for name in ("micro", "least"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"balance steal: {name} must be at least 1 sample, got {value}")
        if self.micro is not None and self.least is not None and self.least > self.micro:
            raise ConfigError(f"balance steal: least must be at most micro ({self.micro}), got {self.least}")

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """Equal parts, for phases in which workers step by themselves and there is nothing to draw from."""
        return divide(count, [1.0] * len(members))

    def sizes(self, count: int, workers: int, most: int) -> list[int]:
        """How many samples each micro-batch of a step has, in order; none has more than `most`."""
        micro = min(most, self.micro or max(1, count // (PARTS * workers)))
        least = min(micro, self.least or max(1, micro // SHRINK))
        found, left = [], count
        while left:
            found.append(min(left, micro, max(least, -(-left // (2 * workers)))))
            left -= found[-1]
        return found
