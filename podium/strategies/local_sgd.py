"""Local SGD: each worker trains alone; after H steps all workers continue from the mean of their parameters.

    repeat:  each worker:  H steps of the task's optimizer on its own samples
             all:          x = sum of w_i x_i, with w_i the worker's part of the round's samples

The number of steps, H, may grow over a warm-up, shrink with the loss, or follow the learning rate:

    loss   H = ceil(period sqrt(loss / first loss)): average more often as there is less to gain
    rate   H = max(period, floor((alpha / rate)^2)): average less often as steps become small

Workers of unequal speed may take unequal numbers of steps in a round (`steps`), so that all end it at the same time.

Stich, 2018, arXiv 1805.09767. Warm-up of the period: Lin et al., 2018, arXiv 1808.07217. By loss: Wang and Joshi, 2018,
arXiv 1810.08313 (AdaComm). By rate: Gu et al., 2024, arXiv 2310.14423 (the quadratic synchronization rule).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, final

import torch
from torch import Tensor

from podium.errors import ConfigError, UnknownName
from podium.strategies.averaging import Anchor, mean_moments
from podium.strategies.base import Strategy
from podium.strategies.checks import above_zero, at_least
from podium.strategies.pace import Pace, check_steps, check_workers
from podium.strategies.traits import Cadence, Payload

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker

AVERAGED = ("parameters", "moments", "buffers")
LONGEST = 1 << 30
"""Steps of a round that lasts to the end of the segment, where the learning rate is zero."""
LOSSES = "local-sgd.losses"
"""The name under which the losses of the first and the last round are stored."""


@dataclass
class LocalState:
    """Of the present round."""

    anchor: Anchor
    pace: Pace
    first_loss: float | None = None
    last_loss: float | None = None


@final
@dataclass(frozen=True, kw_only=True)
class LocalSGD(Strategy[LocalState]):
    """Each worker trains alone; every `period` steps all workers average their parameters.

    With one worker it equals plain training in bits. With a period of 1 and plain SGD it equals all-reduce to rounding;
    with momentum, too, where moments are averaged. A segment that ends in the middle of a round (at a checkpoint, say)
    ends the round early. Then, and at the end, moments are averaged in any case, so that the replicas are equal.
    """

    name: ClassVar[str] = "local-sgd"
    payload: ClassVar[Payload] = Payload(kind="drifts")

    period: int = 8
    """Steps between two averages."""
    warm_up: int = 0
    """Global steps over which the period grows from 1, doubling."""
    adapt: Literal["none", "loss", "rate"] = "none"
    """Whether the period shrinks with the loss, or grows as the learning rate falls."""
    alpha: float = 0.01
    """For `adapt=rate`: the learning rate at which a round would be one step. A round lasts `period` steps until
    (alpha / rate)^2 exceeds `period`."""
    average: str = "parameters"
    """What is averaged after each round, of `parameters`, `moments`, `buffers`: `parameters,moments`, or with `+`."""
    steps: str = "equal"
    """Steps of each worker in a round: `equal`, by `speed` (the fastest does `period`), or numbers, by rank: `4,1,1`,
    or with `/`."""

    def __post_init__(self) -> None:
        at_least(1, self, "period")
        at_least(0, self, "warm_up")
        above_zero(self, "alpha")
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
    def cadence(self) -> Cadence:
        return Cadence(every="round", unequal=self.steps != "equal", survives_loss=True)

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
            worker.buffers.mean()
        if self.adapt == "loss":
            self._remember_loss(worker, state)

    def _length(self, worker: Worker, state: LocalState) -> int:
        """Steps in the round that begins now."""
        done = worker.progress.global_step
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
        """Store the losses of the first and the last round where a checkpoint saves them."""
        if worker.votes.mean_loss is None:
            return
        state.last_loss = worker.votes.mean_loss
        if state.first_loss is None:
            state.first_loss = worker.votes.mean_loss
        memory = worker.sender.memory
        memory.put_named(LOSSES, torch.tensor([state.first_loss, state.last_loss], dtype=torch.float64))
        worker.sender.step_done()

    @staticmethod
    def _losses_so_far(worker: Worker) -> tuple[float | None, float | None]:
        """The losses of the first worker that knows them: a worker that has joined knows none. Collective."""
        comm, known = worker.comm, worker.sender.memory.get_named(LOSSES)
        mine = torch.tensor([0.0, 0.0, 0.0] if known is None else [1.0, *known.tolist()], dtype=torch.float64)
        told = torch.empty((comm.size, 3), dtype=torch.float64)
        comm.wait(comm.all_gather(mine, told.view(-1)))
        for has, first, last in told.tolist():
            if has:
                return first, last
        return None, None
