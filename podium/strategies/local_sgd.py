"""Local SGD: every worker steps by itself; after a number of steps all go on from the mean of their parameters.

    repeat:  each worker:  H steps of the task's optimizer on its own samples
             all:          x = sum of w_i x_i, with w_i the worker's part of the round's samples

The number of steps, H, may grow over a warm-up, shrink with the loss, or follow the learning rate:

    loss   H = ceil(period sqrt(loss / first loss)): talk more often as there is less to gain
    rate   H = max(period, floor((alpha / rate)^2)): talk less often as steps become small

Workers of unequal speed may do unequal numbers of steps in a round, so that all are through at the same time.

Stich, 2018, arXiv 1805.09767. Warm-up of the period: Lin et al., 2018, arXiv 1808.07217. By loss: Wang and Joshi, 2018,
arXiv 1810.08313 (AdaComm). By rate: Gu et al., 2024, arXiv 2310.14423 (the quadratic synchronization rule).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.averaging import Anchor, mean_moments
from podium.errors import ConfigError, UnknownName
from podium.leftovers import Sends
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.worker import Batch, Worker

AVERAGED = ("parameters", "moments", "buffers")
LONGEST = 1 << 30
"""Steps of a round that goes on to the end: the rate is zero."""
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
    """Samples per nanosecond, by place; 0 where nothing is known."""

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
            fastest = max(self.speeds)
            return [max(1, round(length * (speed or fastest) / fastest)) for speed in self.speeds]
        numbers = numbers_in(self.steps)
        own = [numbers[min(rank, len(numbers) - 1)] for rank in ranks]  # who joins later does as the last
        return [max(1, round(number * length / self.period)) for number in own]

    def is_over(self, worker: Worker) -> bool:
        """Whether this worker has done its part of the round."""
        if self.steps == "equal":
            return worker.round.steps >= self.length
        return worker.position > self.began  # the feed moves it with the last step

    def measure(self, worker: Worker) -> tuple[Tensor, Handle] | None:
        """Begin to tell all workers how fast this one was in the round that ends; before the round is closed."""
        if self.steps != "speed":
            return None
        told = torch.zeros(worker.comm.size, dtype=torch.float64)
        told[worker.comm.index] = worker.round.samples / max(1, worker.round.busy_ns)
        return told, worker.comm.all_reduce(told)

    def learn(self, worker: Worker, measured: tuple[Tensor, Handle] | None) -> None:
        """Take up what was measured: half by the last round, half by those before."""
        if measured is None:
            return
        told, handle = measured
        worker.comm.wait(handle)
        before = self.speeds if len(self.speeds) == worker.comm.size else [0.0] * worker.comm.size
        pairs = zip(before, told.tolist(), strict=True)
        self.speeds = [(old + new) / 2 if old and new else old or new for old, new in pairs]


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
