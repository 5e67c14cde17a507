"""Workers that only take time: the real speed models, the real balancer and the real rule, without a network."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from podium.balance.base import Learning, Member
from podium.balance.equal_finish import EqualFinish
from podium.balance.runtime import Decision, decide, in_vain, members_of, told_of
from podium.balance.speed import Speed, SpeedModel

Noise = Callable[[random.Random], float]


def lognormal(spread: float) -> Noise:
    """Factors around a mean of 1."""
    return lambda rng: rng.lognormvariate(-(spread**2) / 2, spread) if spread else 1.0


@dataclass
class Simulation:
    """Steps of `count` samples, divided as in a run: speeds are told every few steps, and heard one step later."""

    speeds: list[Speed]
    """As they are; a test may change them in mid-run."""
    count: int = 256
    balancer: Learning = field(default_factory=EqualFinish)
    noise: Noise = field(default_factory=lambda: lognormal(0.0))
    seed: int = 0

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self.models = [SpeedModel() for _ in self.speeds]
        self.now = self.balancer.divide(self.count, [Member(i, Speed(0.0, 1.0)) for i in range(len(self.speeds))])
        self.idle = [0] * len(self.speeds)
        self.vain = [0] * len(self.speeds)
        self.decisions: list[tuple[int, Decision]] = []
        self.shares: list[float] = []
        """Of the ideal, by step."""
        self.divisions: list[list[int]] = []
        self.steps = 0
        self._told: list[Speed] | None = None

    def run(self, steps: int) -> Simulation:
        for _ in range(steps):
            self._step()
        return self

    def share_of_ideal(self) -> float:
        """What the best division of steps would take, in parts of what the present one takes; noise does not count."""
        return ideal_s(self.speeds, self.count) / finish(self.speeds, self.now)

    def _step(self) -> None:
        self.divisions.append(self.now)
        self.shares.append(self.share_of_ideal())
        for model, speed, samples in zip(self.models, self.speeds, self.now, strict=True):
            if samples:
                model.observe(samples, speed.seconds(samples) * self.noise(self._rng))
        self.steps += 1
        if self._told is not None:
            self._decide(self._told)
            self._told = None
        if self.steps % self.balancer.every == 0:
            self._told = [told_of(model) for model in self.models]

    def _decide(self, told: Sequence[Speed]) -> None:
        members = members_of(range(len(told)), [[*speed, -1, 0.0] for speed in told])
        self.idle = [0 if count else idle + 1 for count, idle in zip(self.now, self.idle, strict=True)]
        found = decide(self.balancer, self.count, self.now, members, self.idle, self.vain)
        if found is not None:
            self.vain = in_vain(self.vain, self.now, found)
            self.now = found.counts
            self.decisions.append((self.steps, found))


def finish(speeds: Sequence[Speed], counts: Sequence[int]) -> float:
    return max(speed.seconds(count) for speed, count in zip(speeds, counts, strict=True) if count)


def ideal_s(speeds: Sequence[Speed], count: int) -> float:
    """By bisection on when all are through, in parts of samples: nothing of the balancers is used."""
    low, high = 0.0, min(speed.seconds(count) for speed in speeds)
    for _ in range(100):
        middle = (low + high) / 2
        done = sum(max(0.0, middle - speed.fixed_s) / speed.per_sample_s for speed in speeds)
        low, high = (middle, high) if done < count else (low, middle)
    return high
