"""A balancer: who gets how much of a global step, so that all workers finish it at the same time.

It looks at what workers have told each other of their speed (`podium.balance.speed`) and divides samples. Weights by
samples keep the mathematics unchanged, whatever the division: see `podium.engine.worker`. `podium.balance.runtime`
decides when a balancer is asked, and whether its answer is used.
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
    """Samples that fit into its memory at a time; None: as many as there are."""
    exchange_s: float = 0.0
    """Seconds of an exchange that its own link takes, and that its computing does not hide."""

    def finish_s(self, samples: float) -> float:
        """When it finishes this many samples; a worker without samples still takes part in the exchange."""
        return self.exchange_s + (self.speed.seconds(samples) if samples > 0 else 0.0)


class Balancer(ABC):
    """Divides global steps. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    learns: ClassVar[bool] = False
    """Whether it wants to know how fast workers are; otherwise it is never asked again."""

    @abstractmethod
    def divide(self, count: int, members: Sequence[Member]) -> list[int]:
        """How many of `count` samples each member takes, in their order; adds up to `count`.

        Called on every worker with the same arguments, and must answer the same.
        """


@dataclass(frozen=True, kw_only=True)
class Learning(Balancer):
    """A balancer that follows the workers' speeds while they train."""

    learns: ClassVar[bool] = True

    every: int = 4
    """Steps between two looks at the speeds."""
    gain: float = 0.02
    """What part of a step a change must promise to save, or it is not made; more where speeds are not known well."""
    most: str = ""
    """Samples that a worker can hold at a time, by rank, as in `64/16`; 0: no limit. Later ranks are like the last."""

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
        """What the user says that this worker can hold at a time; None: no limit."""
        if not self.most:
            return None
        numbers = [int(number) for number in self.most.split("/")]
        return numbers[min(rank, len(numbers) - 1)] or None


def finish_s(counts: Sequence[int], members: Sequence[Member]) -> float:
    """When the last member finishes, given the samples of each."""
    return max(member.finish_s(count) for member, count in zip(members, counts, strict=True))
