"""How many steps each worker takes in a round, where workers of unequal speed may take unequal numbers.

All workers then reach the end of a round at about the same time. A worker learns its speed from its own steps, as
balancers do (`podium.balance.speed`), and sends it with each round's exchange; the numbers change where that saves more
time than noise explains.
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
"""Part of the time that new numbers of steps must be predicted to save."""


@dataclass
class Pace:
    """How many steps each worker takes in a round; used by strategies with rounds."""

    steps: str
    """`equal`, `speed`, or a number per worker."""
    period: int
    """The round length that given numbers refer to: in a shorter round they shrink in proportion."""
    length: int = 1
    """Steps of the fastest worker in the present round."""
    began: int = 0
    speeds: list[float] = field(default_factory=list)
    """Samples per second behind the present numbers of steps, by worker index; 0 where unknown."""
    model: SpeedModel = field(default_factory=SpeedModel)
    """This worker's own speed."""
    seen: Round = field(default_factory=Round)
    """The part of the present round that the model has seen."""

    def begin_round(self, worker: Worker, length: int) -> None:
        """Set the length of the round that begins now; the same on all workers."""
        self.length, self.began = length, worker.position
        worker.progress.plan_round(self._of_workers(worker, length))

    def _of_workers(self, worker: Worker, length: int) -> list[int]:
        ranks = worker.comm.workers
        if self.steps == "equal":
            return [length] * len(ranks)
        if self.steps == "speed":
            if len(self.speeds) != len(ranks) or not any(self.speeds):
                return [1] * len(ranks)  # one step each, to measure speeds
            return steps_by_speed(self.speeds, length)
        numbers = numbers_in(self.steps)
        own = [numbers[min(rank, len(numbers) - 1)] for rank in ranks]  # a worker that joins later does as the last
        return [max(1, round(number * length / self.period)) for number in own]

    def is_over(self, worker: Worker) -> bool:
        """Whether this worker has done its part of the round."""
        if self.steps == "equal":
            return worker.round.steps >= self.length
        if self.steps == "speed":
            self._observe(worker.round)
        return worker.position > self.began  # the feed moves it with the last step

    def measure(self, worker: Worker) -> tuple[Tensor, Handle] | None:
        """Start to send this worker's speed in the ending round to all workers; call it before the round is closed."""
        if self.steps != "speed":
            return None
        told = torch.zeros(worker.comm.size, len(Speed._fields), dtype=torch.float64)
        told[worker.comm.index] = torch.tensor(self._speed(worker.round), dtype=told.dtype)
        return told, worker.comm.all_reduce(told)

    def learn(self, worker: Worker, measured: tuple[Tensor, Handle] | None) -> None:
        """Adopt new numbers of steps where the measured speeds promise enough. All workers decide alike."""
        if measured is None:
            return
        told, handle = measured
        worker.comm.wait(handle)
        speeds = [Speed(a, b, c, d, int(n), int(at)) for a, b, c, d, n, at in told.tolist()]
        found = self.decide(speeds)
        if found is not None and worker.comm.index == 0:
            worker.sender.news.append(self._news(worker, speeds, *found))

    def decide(self, told: Sequence[Speed]) -> tuple[list[int], list[int], float] | None:
        """Adopt these speeds if that promises enough: returns steps before and after, and the gain required.

        It compares the time in which all workers together train on a global step's samples. None: no change.
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
        """Feed the model with the steps that were added to the round since the last call."""
        seen = self.seen if done.steps > self.seen.steps else Round()
        self.model.observe(done.samples - seen.samples, (done.busy_ns - seen.busy_ns) / 1e9)
        self.seen = dataclasses.replace(done)

    def _speed(self, done: Round) -> Speed:
        """The model's speed; in the first rounds, the speed of the last round."""
        found = self.model.speed
        if found.passes or not done.samples or not done.busy_ns:
            return found
        error = UNKNOWN_NOISE / math.sqrt(done.steps)
        per_sample_s = done.busy_ns / done.samples / 1e9
        return Speed(0.0, per_sample_s, UNKNOWN_NOISE, error, done.steps, max(1, done.samples // done.steps))

    def _news(
        self, worker: Worker, told: Sequence[Speed], before: list[int], after: list[int], least: float
    ) -> dict[str, Any]:
        """A `balance` record like a balancer's, but with a round divided in steps."""
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
    """Steps of each worker in a round: the fastest takes `length`, and so does one of unknown speed (0)."""
    fastest = max(speeds)
    return [max(1, round(length * (speed or fastest) / fastest)) for speed in speeds]


def _rate(speed: Speed) -> float:
    """Samples per second at the present batch size; 0 where unknown."""
    return speed.samples / speed.seconds(speed.samples) if speed.passes and speed.samples else 0.0


def _step_s(steps: Sequence[int], rates: Sequence[float]) -> float:
    """The time in which all workers together take as many steps as there are workers, with one sample per step."""
    longest = max(number / rate for number, rate in zip(steps, rates, strict=True) if rate)
    return longest * len(steps) / sum(steps)


def numbers_in(steps: str) -> list[int]:
    """The numbers in `4,1,1` or, where commas separate options, `4/1/1`."""
    return [int(number) for number in re.split(r"[,/]", steps)]


def check_steps(who: str, steps: str) -> None:
    """Raise ConfigError unless `steps` is `equal`, `speed` or numbers."""
    if steps not in ("equal", "speed") and not re.fullmatch(r"0*[1-9]\d*([,/]0*[1-9]\d*)*", steps):
        raise ConfigError(f"{who}: steps must be equal, speed or numbers of at least 1 such as 4,1,1, got {steps!r}")


def check_workers(who: str, steps: str, workers: int) -> None:
    """Raise ConfigError unless there is one number per worker."""
    if steps not in ("equal", "speed") and len(numbers_in(steps)) != workers:
        raise ConfigError(f"{who}: steps must have one number per worker ({workers}), got {steps!r}")
