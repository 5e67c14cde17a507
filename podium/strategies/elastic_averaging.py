"""Elastic averaging (EASGD), synchronous: workers roam, tied by springs to a centre that they pull along.

    repeat:  each worker:  period steps of the task's optimizer, from its own x_i
             all:          e_i = elasticity w_i (x_i - c), with w_i the worker's part of the round's samples
                           x_i = x_i - e_i
                           c   = c + sum of e_i

With equal parts the paper's moving rate is elasticity / workers. At 1 the centre becomes the mean of the workers; at 0
they never meet. What travels is the sum of w_i (x_i - c), once per period.

EAMSGD is the same for a task whose optimizer has Nesterov momentum; the momentum stays with its worker.

Zhang, Choromanska, LeCun, 2015, arXiv 1412.6651.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.residuals import Sends
from podium.strategies.averaging import Anchor, mean_moments
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.engine.worker import Batch, Worker

CENTRE = "centre"
"""Its name among what the worker keeps."""


@final
@dataclass(frozen=True, kw_only=True)
class ElasticAveraging(Strategy[Anchor]):
    """Workers explore by themselves around a common centre. The state is the centre.

    The centre is what training comes to: at the end of a stretch (a checkpoint, say) all workers become the centre, and
    begin anew from there. A worker without samples in a round neither pulls nor is pulled. One worker alone has a
    centre, too, so it is not plain training.
    """

    name: ClassVar[str] = "elastic-averaging"
    by_rounds: ClassVar[bool] = True
    sends: ClassVar[Sends] = "own"
    survives_loss: ClassVar[bool] = True

    period: int = 4
    """Steps between two pulls."""
    elasticity: float = 0.9
    """How much of the way to the mean of the workers the centre goes; the paper's beta."""

    def __post_init__(self) -> None:
        if self.period < 1:
            raise ConfigError(f"elastic-averaging: period must be at least 1, got {self.period}")
        if not 0 <= self.elasticity <= 1:
            raise ConfigError(f"elastic-averaging: elasticity must be from 0 to 1, got {self.elasticity:g}")

    def init(self, worker: Worker) -> Anchor:
        if CENTRE not in worker.kept:  # there is one where the last stretch ended in a loss
            worker.kept[CENTRE] = [flat.clone() for flat in worker.params]
        return Anchor(worker, self.name, worker.kept[CENTRE])

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
        del worker.kept[CENTRE]  # the parameters are the centre now
