"""How many steps each worker takes in a round, where workers of unequal speed may take unequal numbers.

All workers then reach the end of a round at about the same time. A worker learns its speed from its own steps, as
balancers do (`podium.balance.speed`), and tells it with each round's exchange; the numbers change where that saves more
time than may be noise.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.balance.runtime import SURE
from podium.balance.speed import UNKNOWN_NOISE, Speed, SpeedModel
from podium.engine.progress import Round
from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.worker import Worker

GAIN = 0.02
"""What part of the time other numbers of steps must promise to save."""


@dataclass
class Pace:
    """How many steps each worker does in a round; shared by strategies with rounds."""

    steps: str
    """`equal`, `speed`, or a number per worker."""
    period: int
    """What the numbers are meant for: in a shorter round they are smaller in proportion."""
    length: int = 1
    """Steps in the present round, of the fastest worker."""
    began: int = 0
    speeds: list[float] = field(default_factory=list)
    """Samples per second that the present numbers of steps go by, by place; 0 where nothing is known."""
    model: SpeedModel = field(default_factory=SpeedModel)
    """This worker's own speed."""
    seen: Round = field(default_factory=Round)
    """What of the present round the model has seen."""

    def begin_round(self, worker: Worker, length: int) -> None:
        """Say how long the round is that begins now; the same on all workers."""
        self.length, self.began = length, worker.position
        worker.progress.plan_round(self._of_workers(worker, length))

    def _of_workers(self, worker: Worker, length: int) -> list[int]:
        ranks = worker.comm.workers
        if self.steps == "equal":
            return [length] * len(ranks)
        if self.steps == "speed":
            if len(self.speeds) != len(ranks) or not any(self.speeds):
                return [1] * len(ranks)  # to see who is how fast
            return steps_by_speed(self.speeds, length)
        numbers = numbers_in(self.steps)
        own = [numbers[min(rank, len(numbers) - 1)] for rank in ranks]  # who joins later does as the last
        return [max(1, round(number * length / self.period)) for number in own]

    def is_over(self, worker: Worker) -> bool:
        """Whether this worker has done its part of the round."""
        if self.steps == "equal":
            return worker.round.steps >= self.length
        if self.steps == "speed":
            self._observe(worker.round)
        return worker.position > self.began  # the feed moves it with the last step

    def measure(self, worker: Worker) -> tuple[Tensor, Handle] | None:
        """Begin to tell all workers how fast this one was in the round that ends; before the round is closed."""
        if self.steps != "speed":
            return None
        told = torch.zeros(worker.comm.size, len(Speed._fields), dtype=torch.float64)
        told[worker.comm.index] = torch.tensor(self._speed(worker.round), dtype=told.dtype)
        return told, worker.comm.all_reduce(told)

    def learn(self, worker: Worker, measured: tuple[Tensor, Handle] | None) -> None:
        """Take up what was measured, where other numbers of steps save enough. Decided on all workers alike."""
        if measured is None:
            return
        told, handle = measured
        worker.comm.wait(handle)
        speeds = [Speed(a, b, c, d, int(n), int(at)) for a, b, c, d, n, at in told.tolist()]
        found = self.decide(speeds)
        if found is not None and worker.comm.index == 0:
            worker.sender.news.append(self._news(worker, speeds, *found))

    def decide(self, told: Sequence[Speed]) -> tuple[list[int], list[int], float] | None:
        """Go by these speeds from here on, if that promises enough: steps before and after, and the gain asked for.

        What is compared is the time in which all together do as much as in a global step. None: nothing changes.
        """
        known = len(self.speeds) == len(told)
        before = self.speeds if known else [0.0] * len(told)
        rates = [_rate(speed) or old for speed, old in zip(told, before, strict=True)]
        if not any(rates):
            return None
        now = steps_by_speed(before, self.length) if any(before) else [1] * len(told)
        wanted = steps_by_speed(rates, self.length)
        if wanted == now:
            self.speeds = rates
            return None
        last = max(range(len(now)), key=lambda i: now[i] / (rates[i] or math.inf))
        least = max(GAIN, SURE * told[last].error) if any(before) else 0.0
        if any(before) and 1 - _step_s(wanted, rates) / _step_s(now, rates) < least:
            return None
        self.speeds = rates
        return now, wanted, least

    def _observe(self, done: Round) -> None:
        """The step that a round has come to have since it was last looked at."""
        seen = self.seen if done.steps > self.seen.steps else Round()
        self.model.observe(done.samples - seen.samples, (done.busy_ns - seen.busy_ns) / 1e9)
        self.seen = dataclasses.replace(done)

    def _speed(self, done: Round) -> Speed:
        """As the model knows it; in the first rounds, as the last one was."""
        found = self.model.speed
        if found.passes or not done.samples or not done.busy_ns:
            return found
        error = UNKNOWN_NOISE / math.sqrt(done.steps)
        per_sample_s = done.busy_ns / done.samples / 1e9
        return Speed(0.0, per_sample_s, UNKNOWN_NOISE, error, done.steps, max(1, done.samples // done.steps))

    def _news(
        self, worker: Worker, told: Sequence[Speed], before: list[int], after: list[int], least: float
    ) -> dict[str, Any]:
        """For the records: as a balancer's, but that what is divided is a round, in steps."""
        part = worker.progress.batch_size / len(told)
        return {
            "kind": "balance",
            "position": worker.position,
            "balancer": "steps=speed",
            "unit": "steps",
            "ranks": list(worker.comm.workers),
            "before": before,
            "after": after,
            "why": "gain",
            "predicted_s": {
                "before": part * _step_s(before, self.speeds),
                "after": part * _step_s(after, self.speeds),
            },
            "least": least,
            "members": [{**speed._asdict(), "most": None, "exchange_s": 0.0} for speed in told],
        }


def steps_by_speed(speeds: Sequence[float], length: int) -> list[int]:
    """Steps of each worker in a round: the fastest does `length`, and so does one whose speed is not known (0)."""
    fastest = max(speeds)
    return [max(1, round(length * (speed or fastest) / fastest)) for speed in speeds]


def _rate(speed: Speed) -> float:
    """Samples per second, in steps as they are now; 0 where nothing is known."""
    return speed.samples / speed.seconds(speed.samples) if speed.passes and speed.samples else 0.0


def _step_s(steps: Sequence[int], rates: Sequence[float]) -> float:
    """The time, in samples' worth, in which all together do as many steps as there are workers."""
    longest = max(number / rate for number, rate in zip(steps, rates, strict=True) if rate)
    return longest * len(steps) / sum(steps)


def numbers_in(steps: str) -> list[int]:
    """Of `4,1,1` or, where commas part options, `4/1/1`."""
    return [int(number) for number in re.split(r"[,/]", steps)]


def check_steps(who: str, steps: str) -> None:
    """Raise ConfigError unless this says how many steps each worker does."""
    if steps not in ("equal", "speed") and not re.fullmatch(r"0*[1-9]\d*([,/]0*[1-9]\d*)*", steps):
        raise ConfigError(f"{who}: steps must be equal, speed or numbers of at least 1 such as 4,1,1, got {steps!r}")


def check_workers(who: str, steps: str, workers: int) -> None:
    """Raise ConfigError where there is not a number for every worker."""
    if steps not in ("equal", "speed") and len(numbers_in(steps)) != workers:
        raise ConfigError(f"{who}: steps must have one number per worker ({workers}), got {steps!r}")
