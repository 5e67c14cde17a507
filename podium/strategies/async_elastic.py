"""Asynchronous elastic averaging: each worker trains alone, pulled to a centre that lives on the servers.

    every `period` local steps:   d = a (x - centre),   x -= d,   centre += d,        a = elasticity / workers

Workers differ from the centre: the centre is the result of training, and `finish` copies it to all workers. With a task
whose optimizer has Nesterov momentum it is the paper's EAMSGD. The pull of the centre and the push of d are two
messages, and other workers may have moved the centre in between, as in the paper.

Zhang, Choromanska, LeCun, 2015, Deep learning with Elastic Averaging SGD, arXiv 1412.6651.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from podium.servers.worker_side.pushing import pull
from podium.strategies.async_local_sgd import Leasing, State
from podium.strategies.checks import fraction

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


@final
@dataclass(frozen=True, kw_only=True)
class AsyncElastic(Leasing):
    """The centre lives on servers; each worker and the centre pull at each other."""

    name: ClassVar[str] = "async-elastic"

    elasticity: float = 0.9
    """The paper's beta: the part of their distance that worker and centre move, times the number of workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fraction(self, "elasticity")

    def outer(self, worker: Worker) -> Meta:
        return {"lr": 1.0, "momentum": 0.0, "delay": 1}

    def exchange(self, worker: Worker, state: State, batch: Batch) -> None:
        size = worker.round.samples
        pull(worker, state.served, state.there, self.server_spec.pull_codec, lease=batch.lease, size=size)
        a = self.elasticity / worker.comm.size
        for grad, x, centre in zip(worker.flat.grads, worker.params, state.there, strict=True):
            way = torch.sub(centre, x, out=grad[: x.numel()]).mul_(a)  # -d: servers subtract what they receive
            x += way
        self.push(worker, state, batch, bare=True)
        worker.comm.clock.touch(2 * worker.flat.nbytes)
