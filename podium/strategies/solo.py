"""Solo: one worker trains alone. The reference for all other strategies."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from podium.strategies.base import Strategy
from podium.strategies.traits import Payload

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


@final
@dataclass(frozen=True, kw_only=True)
class Solo(Strategy[None]):
    """Plain training in one process."""

    name: ClassVar[str] = "solo"
    max_workers: ClassVar[int | None] = 1
    payload: ClassVar[Payload] = Payload(kind="nothing")

    def init(self, worker: Worker) -> None:
        return None

    def step(self, worker: Worker, state: None, batch: Batch) -> Tensor:
        loss = worker.backward(batch)
        worker.apply(batch)
        return loss
