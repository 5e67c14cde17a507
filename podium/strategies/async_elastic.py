"""Asynchronous elastic averaging: workers explore by themselves, tied to a centre on the servers as by a spring.

    every `period` local steps:   d = a (x - centre),   x -= d,   centre += d,        a = elasticity / workers

Workers need not be where the centre is, and seldom are: the centre is what was learned, and `finish` gives it to all.
With a task whose optimizer has Nesterov momentum it is the paper's EAMSGD. The pull of the centre and the push of d are
two messages, and others may have moved the centre in between, as in the paper.

Zhang, Choromanska, LeCun, 2015, Deep learning with Elastic Averaging SGD, arXiv 1412.6651.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch

from podium.errors import ConfigError
from podium.servers import client
from podium.strategies.async_local_sgd import Leasing, State

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.engine.worker import Batch, Worker


@final
@dataclass(frozen=True, kw_only=True)
class AsyncElastic(Leasing):
    """The centre on servers, and each worker on a spring of its own."""

    name: ClassVar[str] = "async-elastic"

    elasticity: float = 0.9
    """The paper's beta: how far a worker and the centre go to meet each other, times the workers."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.elasticity <= 1:
            raise ConfigError(f"{self.name}: elasticity must be from 0 to 1, got {self.elasticity}")

    def outer(self, worker: Worker) -> Meta:
        return {"lr": 1.0, "momentum": 0.0, "delay": 1}

    def exchange(self, worker: Worker, state: State, batch: Batch) -> None:
        size = worker.round.samples
        client.pull(worker, state.served, state.there, self.pull_codec, lease=batch.lease, size=size)
        a = self.elasticity / worker.comm.size
        for grad, x, centre in zip(worker.flat.grads, worker.params, state.there, strict=True):
            way = torch.sub(centre, x, out=grad[: x.numel()]).mul_(a)  # -d: servers step against what they are given
            x += way
        self.push(worker, state, batch, bare=True)
        worker.comm.clock.touch(2 * worker.flat.nbytes)
