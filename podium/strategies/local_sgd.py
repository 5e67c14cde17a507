"""Local SGD: every worker steps by itself; after a number of steps all go on from the mean of their parameters.

    repeat:  each worker:  H steps of the task's optimizer on its own samples
             all:          x = sum of w_i x_i, with w_i the worker's part of the round's samples

The number of steps, H, may grow over a warm-up, shrink with the loss, or follow the learning rate:

    loss   H = ceil(period sqrt(loss / first loss)): talk more often as there is less to gain
    rate   H = max(period, floor((alpha / rate)^2)): talk less often as steps become small

Workers of unequal speed may do unequal numbers of steps in a round, so that all are through at the same time. Their
speeds are learnt from their own steps, as balancers do (`podium.balance.speed`), and told with each round's exchange;
the numbers change where that saves more time than may be noise.

Stich, 2018, arXiv 1805.09767. Warm-up of the period: Lin et al., 2018, arXiv 1808.07217. By loss: Wang and Joshi, 2018,
arXiv 1810.08313 (AdaComm). By rate: Gu et al., 2024, arXiv 2310.14423 (the quadratic synchronization rule).
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.balance.runtime import SURE
from podium.balance.speed import UNKNOWN_NOISE, Speed, SpeedModel
from podium.errors import ConfigError, UnknownName
from podium.exchange.residuals import Sends
from podium.strategies.averaging import Anchor, mean_moments
from podium.strategies.base import Strategy
from podium.strategies.rounds import Round

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.worker import Batch, Worker

AVERAGED = ("parameters", "moments", "buffers")
LONGEST = 1 << 30
"""Steps of a round that goes on to the end: the rate is zero."""
GAIN = 0.02
"""What part of the time other numbers of steps must promise to save."""
LOSSES = "local-sgd.losses"
"""The name under which the first and the last round's loss are remembered."""


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
        worker.round_steps = self._of_workers(worker, length)

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
            worker.outgoing.news.append(self._news(worker, speeds, *found))

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
        part = worker.batch_size / len(told)
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


def feed_of(steps: str) -> Literal["step", "round"]:
    return "step" if steps == "equal" else "round"


@dataclass
class LocalState:
    """Since all last agreed."""

    anchor: Anchor
    pace: Pace
    first_loss: float | None = None
    last_loss: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[LocalState]):
    """Steps of one's own, and every so many of them the mean of all.

    With one worker it is plain training in bits. With a period of 1 and plain SGD it is all-reduce, to rounding; with
    momentum, where moments are averaged, too. A stretch that ends in the middle of a round (at a checkpoint, say) ends
    the round early. Then, and at the end, moments are averaged in any case, so that the replicas are alike.
    """

    name: ClassVar[str] = "local-sgd"
    by_rounds: ClassVar[bool] = True
    sends: ClassVar[Sends] = "drifts"
    survives_loss: ClassVar[bool] = True

    period: int = 8
    """Steps between two averages."""
    warm_up: int = 0
    """Global steps over which the period grows from 1, doubling."""
    adapt: Literal["none", "loss", "rate"] = "none"
    """Whether the period shrinks with the loss, or grows as the learning rate falls."""
    alpha: float = 0.01
    """For `adapt=rate`: the rate at which a round would be one step; above it, and until (alpha / rate)^2 exceeds it,
    the period holds."""
    average: str = "parameters"
    """What is averaged after each round, of `parameters`, `moments`, `buffers`: `parameters,moments`, or with `+`."""
    steps: str = "equal"
    """Steps of each worker in a round: `equal`, by `speed` (the fastest does `period`), or numbers, by rank: `4,1,1`,
    or with `/`."""

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"local-sgd: period must be at least 1, got {self.period}")
        if self.warm_up < 0:
            raise ConfigError(f"local-sgd: warm_up must be 0 or more steps, got {self.warm_up}")
        if not self.alpha > 0:
            raise ConfigError(f"local-sgd: alpha must be above 0, got {self.alpha:g}")
        if self.adapt not in ("none", "loss", "rate"):
            raise UnknownName("local-sgd: adapt", self.adapt, ("none", "loss", "rate"))
        for what in self._averaged:
            if what not in AVERAGED:
                raise UnknownName("local-sgd: average", what, AVERAGED)
        if "parameters" not in self._averaged:
            raise ConfigError(f"local-sgd: average must hold parameters, got {self.average!r}")
        check_steps("local-sgd", self.steps)

    def check(self, workers: int) -> None:
        super().check(workers)
        check_workers("local-sgd", self.steps, workers)

    @property
    def feed(self) -> Literal["step", "cursor", "round"]:
        return feed_of(self.steps)

    @property
    def _averaged(self) -> list[str]:
        return [part.strip() for part in re.split(r"[,+]", self.average)]

    def init(self, worker: Worker) -> LocalState:
        state = LocalState(Anchor(worker, "local-sgd"), Pace(self.steps, self.period))
        if self.adapt == "loss":
            state.first_loss, state.last_loss = self._losses_so_far(worker)
        state.pace.begin_round(worker, self._length(worker, state))
        return state

    def step(self, worker: Worker, state: LocalState, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if state.pace.is_over(worker):
            self._average(worker, state)
            state.pace.begin_round(worker, self._length(worker, state))
        return loss

    def finish(self, worker: Worker, state: LocalState) -> None:
        if worker.round.steps:
            self._average(worker, state)
        if state.anchor.weight is not None:
            mean_moments(worker, state.anchor.weight)

    def _average(self, worker: Worker, state: LocalState) -> None:
        measured = state.pace.measure(worker)
        state.anchor.to_mean(worker)
        state.pace.learn(worker, measured)
        if "moments" in self._averaged:
            assert state.anchor.weight is not None
            mean_moments(worker, state.anchor.weight)
        if "buffers" in self._averaged:
            worker.mean_buffers()
        if self.adapt == "loss":
            self._remember_loss(worker, state)

    def _length(self, worker: Worker, state: LocalState) -> int:
        """Steps in the round that begins now."""
        done = worker.global_step
        if done < self.warm_up:
            doublings = math.ceil(math.log2(self.period))
            return min(self.period, 1 << (done * doublings // self.warm_up))
        if self.adapt == "loss" and state.first_loss and state.last_loss is not None:
            by_loss = math.ceil(self.period * math.sqrt(max(0.0, state.last_loss / state.first_loss)))
            return max(1, min(self.period, by_loss))
        if self.adapt == "rate":
            rate = max(float(group["lr"]) for group in worker.optimizer.param_groups)
            by_rate = (self.alpha / rate) ** 2 if rate > 0 else LONGEST
            return max(self.period, min(LONGEST, math.floor(by_rate + 1e-9)))  # 0.15 / 0.05 is just below 3
        return self.period

    def _remember_loss(self, worker: Worker, state: LocalState) -> None:
        """Where a checkpoint keeps it."""
        if worker.step_loss is None:
            return
        state.last_loss = worker.step_loss
        if state.first_loss is None:
            state.first_loss = worker.step_loss
        memory = worker.outgoing.memory
        memory.put_named(LOSSES, torch.tensor([state.first_loss, state.last_loss], dtype=torch.float64))
        worker.outgoing.step_done()

    @staticmethod
    def _losses_so_far(worker: Worker) -> tuple[float | None, float | None]:
        """As the first worker that knows them has them: one that has joined knows nothing. Collective."""
        comm, known = worker.comm, worker.outgoing.memory.get_named(LOSSES)
        mine = torch.tensor([0.0, 0.0, 0.0] if known is None else [1.0, *known.tolist()], dtype=torch.float64)
        told = torch.empty((comm.size, 3), dtype=torch.float64)
        comm.wait(comm.all_gather(mine, told.view(-1)))
        for has, first, last in told.tolist():
            if has:
                return first, last
        return None, None
