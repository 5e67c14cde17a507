"""Elastic averaging (EASGD), synchronous: each worker trains alone, pulled to a common centre that follows them.

    repeat:  each worker:  period steps of the task's optimizer, from its own x_i
             all:          e_i = elasticity w_i (x_i - c), with w_i the worker's part of the round's samples
                           x_i = x_i - e_i
                           c   = c + sum of e_i

With equal parts the paper's moving rate is elasticity / workers. At 1 the centre becomes the mean of the workers; at 0
workers and centre do not influence each other. Workers sum w_i (x_i - c), once per period.

EAMSGD is the same for a task whose optimizer has Nesterov momentum; the momentum stays with its worker.

Zhang, Choromanska, LeCun, 2015, arXiv 1412.6651.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from podium.strategies.averaging import Anchor, mean_moments
from podium.strategies.base import Strategy
from podium.strategies.checks import at_least, fraction
from podium.strategies.traits import Cadence, Payload

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker

CENTRE = "centre"
"""Its name in the worker's strategy state."""


@final
@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(Strategy[Anchor]):
    """Workers explore around a common centre. The state is the centre.

    The centre is the result of training: at the end of a segment (at a checkpoint, say) all workers take its parameters
    and continue from there. A worker without samples in a round neither pulls nor is pulled. A single worker has a
    centre, too, so it differs from plain training.
    """

    name: ClassVar[str] = "elastic-averaging"
    cadence: ClassVar[Cadence] = Cadence(every="round", survives_loss=True)
    payload: ClassVar[Payload] = Payload(kind="own")

    period: int = 4
    """Steps between two pulls."""
    elasticity: float = 0.9
    """The part of the way to the workers' mean that the centre moves; the paper's beta."""

    def __post_init__(self) -> None:
        at_least(1, self, "period")
        fraction(self, "elasticity")

    def init(self, worker: Worker) -> Anchor:
        if CENTRE not in worker.strategy_state:  # a segment that lost a worker has left one
            worker.strategy_state[CENTRE] = [flat.clone() for flat in worker.params]
        return Anchor(worker, self.name, worker.strategy_state[CENTRE])

    def step(self, worker: Worker, state: Anchor, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if worker.round.steps >= self.period:
            self._meet(worker, state)
        return loss

    def _meet(self, worker: Worker, centre: Anchor) -> None:
        drifts = centre.drift(worker)
        assert centre.weight is not None
        for param, flat, drift in zip(worker.params, centre.flats, drifts, strict=True):
            param.sub_(param - flat, alpha=self.elasticity * centre.weight)
            flat.add_(drift, alpha=self.elasticity)

    def finish(self, worker: Worker, state: Anchor) -> None:
        if worker.round.steps:
            self._meet(worker, state)
        if state.weight is not None:
            mean_moments(worker, state.weight)
        state.pull_here(worker)
        del worker.strategy_state[CENTRE]  # the parameters are the centre now
