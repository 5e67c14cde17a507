"""A strategy of one's own: steps on local gradients, and every few of them the replicas are averaged.

    podium train digits-mlp --strategy examples/my_strategy.py:LocalSteps:every=4 --workers 2

Stich, Local SGD Converges Fast and Communicates Little, 2018, https://arxiv.org/abs/1805.09767
"""

from dataclasses import dataclass
from typing import ClassVar, final

from torch import Tensor

from podium import Batch, Cadence, ConfigError, Payload, Strategy, Worker


@final
@dataclass(frozen=True, kw_only=True)
class LocalSteps(Strategy[None]):
    """Local SGD. Momentum, where there is any, is not averaged; a checkpoint keeps the first worker's."""

    name: ClassVar[str] = "local-steps"
    cadence: ClassVar[Cadence] = Cadence(every="round")  # workers step by themselves and sync now and then
    payload: ClassVar[Payload] = Payload(kind="parameters")  # so that a codec for gradients is refused

    every: int = 8
    """Steps between two averages."""

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"local-steps: every must be at least 1, got {self.every}")

    def init(self, worker: Worker) -> None:
        return None

    def step(self, worker: Worker, state: None, batch: Batch) -> Tensor:
        loss = worker.train_locally(batch)
        if worker.steps_done % self.every == 0:
            self._average(worker)
            worker.end_round()
        return loss

    def finish(self, worker: Worker, state: None) -> None:
        self._average(worker)

    @staticmethod
    def _average(worker: Worker) -> None:
        for flat in worker.params:
            flat.div_(worker.comm.size)
        worker.comm.wait(*(worker.comm.all_reduce(flat) for flat in worker.params))
