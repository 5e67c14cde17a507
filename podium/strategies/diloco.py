"""DiLoCo: each worker takes many local steps; then all take one outer step along the mean of their drifts.

    repeat:  each worker:  sync_every steps of the task's optimizer, from x
             all:          d = sum of w_i (x_i - x), with w_i the worker's part of the round's samples
                           m = outer_momentum m + d
                           x = x + outer_lr (d + outer_momentum m)       (Nesterov; without it: x + outer_lr m)

The inner optimizer's moments stay with their workers from round to round. With an outer rate of 1 and no outer momentum
it is local SGD.

Douillard et al., 2023, arXiv 2311.08105.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, NamedTuple, final

import torch
from torch import Tensor

from podium.strategies.averaging import Anchor, mean_moments
from podium.strategies.base import Strategy
from podium.strategies.checks import above_zero, at_least, fraction
from podium.strategies.pace import Pace, check_steps, check_workers
from podium.strategies.traits import Cadence, Payload

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker

MOMENTUM = "outer momentum"
"""Its name in the worker's strategy state."""


@dataclass(frozen=True, kw_only=True)
class Outer:
    """SGD on the anchor, with the mean drift in place of minus a gradient."""

    lr: float
    momentum: float
    nesterov: bool

    def prepare(self, worker: Worker) -> None:
        """Create the momentum, unless a checkpoint or a segment that lost a worker has left one."""
        if self.momentum and MOMENTUM not in worker.strategy_state:
            worker.strategy_state[MOMENTUM] = [torch.zeros_like(flat) for flat in worker.params]

    def step(self, anchor: Tensor, drift: Tensor, momentum: Tensor | None) -> None:
        """Move the anchor along the drift."""
        if momentum is None:
            anchor.add_(drift, alpha=self.lr)
            return
        momentum.mul_(self.momentum).add_(drift)
        along = drift.add(momentum, alpha=self.momentum) if self.nesterov else momentum
        anchor.add_(along, alpha=self.lr)


class DiLoCoState(NamedTuple):
    """Of the present round."""

    anchor: Anchor
    pace: Pace


@final
@dataclass(frozen=True, kw_only=True)
class DiLoCo(Strategy[DiLoCoState]):
    """Local steps, and an outer step with momentum.

    A single worker takes outer steps, too, so it differs from plain training. A round that the end of a segment cuts
    short (at a checkpoint, say) ends in the plain mean: momentum is meant for a whole round. Where `steps` is not
    equal, a round ends with the epoch or segment at the latest, and takes an outer step however short it is.
    """

    name: ClassVar[str] = "diloco"
    payload: ClassVar[Payload] = Payload(kind="drifts")

    sync_every: int = 50
    """Steps between two outer steps."""
    outer_lr: float = 0.7
    outer_momentum: float = 0.9
    nesterov: bool = True
    steps: str = "equal"
    """Steps of each worker in a round: `equal`, by `speed` (the fastest does `sync_every`), or numbers, by rank:
    `40,10,10`, or with `/`."""

    def __post_init__(self) -> None:
        at_least(1, self, "sync_every")
        above_zero(self, "outer_lr")
        fraction(self, "outer_momentum", below_one=True)
        check_steps("diloco", self.steps)

    def check(self, workers: int) -> None:
        super().check(workers)
        check_workers("diloco", self.steps, workers)

    @property
    def _outer(self) -> Outer:
        return Outer(lr=self.outer_lr, momentum=self.outer_momentum, nesterov=self.nesterov)

    @property
    def cadence(self) -> Cadence:
        outer_every = self.sync_every if self.outer_momentum else 0
        return Cadence(every="round", unequal=self.steps != "equal", survives_loss=True, outer_every=outer_every)

    def init(self, worker: Worker) -> DiLoCoState:
        self._outer.prepare(worker)
        state = DiLoCoState(Anchor(worker, "diloco"), Pace(self.steps, self.sync_every))
        state.pace.begin_round(worker, self.sync_every)
        return state

    def step(self, worker: Worker, state: DiLoCoState, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if state.pace.is_over(worker):
            self._outer_step(worker, state)
        return loss

    def _outer_step(self, worker: Worker, state: DiLoCoState) -> None:
        measured = state.pace.measure(worker)
        drifts = state.anchor.drift(worker)
        state.pace.learn(worker, measured)
        for i, (anchor, drift) in enumerate(zip(state.anchor.flats, drifts, strict=True)):
            self._outer.step(anchor, drift, worker.strategy_state[MOMENTUM][i] if self.outer_momentum else None)
        state.anchor.pull_here(worker)
        state.pace.begin_round(worker, self.sync_every)

    def finish(self, worker: Worker, state: DiLoCoState) -> None:
        if worker.round.steps:
            state.anchor.to_mean(worker)
        if state.anchor.weight is not None:
            mean_moments(worker, state.anchor.weight)
