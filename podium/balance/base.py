"""A balancer: divides a global step among the workers, so that all finish it at the same time.

It divides samples by the speeds that workers have sent each other (`podium.balance.speed`). Gradients are weighted by
samples, so the division does not change the mathematics: see `podium.engine.worker`. `podium.balance.runtime` decides
when to call a balancer, and whether to use its answer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from podium.balance.speed import Speed
from podium.errors import ConfigError


class Member(NamedTuple):
    """What is known of one worker."""

    rank: int
    speed: Speed
    most: int | None = None
    """Samples that fit into its memory at a time; None: no limit."""
    exchange_s: float = 0.0
    """Seconds that an exchange takes on its own link and that do not overlap with its computing."""

    def finish_s(self, samples: float) -> float:
        """Seconds until it finishes this many samples; a worker without samples still takes part in the exchange."""
        return self.exchange_s + (self.speed.seconds(samples) if samples > 0 else 0.0)


class Balancer(ABC):
    """Divides global steps. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    """Whether it uses the workers' speeds; otherwise its division never changes."""

    @abstractmethod
    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """How many of `count` samples each member takes, in their order; the numbers sum to `count`.

        Called on every worker with the same arguments, and must return the same.
        """


@dataclass(frozen=True, kw_only=True)
class Learning(Balancer):
    """A balancer that follows the workers' speeds while they train."""

    learns: ClassVar[bool] = True

    every: int = 4
    """Steps between two exchanges of speeds."""
    gain: float = 0.02
    """Part of a step that a change must be predicted to save; more is required where speeds are uncertain."""
    most: str = ""
    """Samples that fit into a worker's memory at a time, by rank, as in `64/16`; 0: no limit. Further ranks are like
    the last."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"balance {self.name}: every must be at least 1 step, got {self.every}")
        if not 0 <= self.gain < 1:
            raise ConfigError(f"balance {self.name}: gain must be at least 0 and below 1, got {self.gain}")
        for number in self.most.split("/") if self.most else ():
            if not (number.strip().isascii() and number.strip().isdigit()):
                raise ConfigError(
                    f"balance {self.name}: most must be whole numbers by rank, divided by /, with 0 for no limit, as "
                    f"in 64/16, got {self.most!r}"
                )

    def limit(self, rank: int) -> int | None:
        """The user's limit of samples at a time for this worker; None: no limit."""
        if not self.most:
            return None
        numbers = [int(number) for number in self.most.split("/")]
        return numbers[min(rank, len(numbers) - 1)] or None


def finish_s(counts: Sequence[int], members: Sequence[Member]) -> float:
    """Seconds until the last member finishes, given the samples of each."""
    return max(member.finish_s(count) for member, count in zip(members, counts, strict=True))
