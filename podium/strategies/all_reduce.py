"""All-reduce: every step, all workers add up their gradients and take the same step.

Buckets go out as soon as backward has filled them, so that communication hides behind the rest of backward. Parameters
move only once all buckets are reduced, so a step that loses a rank has not happened and can be done again.

Which collective adds them up, and how they are packed, is the run's choice (`collective`, `codec`).

Li et al., PyTorch Distributed, VLDB 2020, describes bucketing and overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from podium.errors import ConfigError
from podium.strategies.base import Strategy

if TYPE_CHECKING:
    from podium.engine.worker import Batch, Worker


@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy[None]):
    """Synchronous data parallelism by summed gradients."""

    name: ClassVar[str] = "all-reduce"
    survives_loss: ClassVar[bool] = True
    sums_gradients: ClassVar[bool] = True

    bucket_bytes: int = 8 << 20
    """Gradients travel in buckets of about this size."""
    overlap: bool = True
    """Whether buckets go out while backward still runs."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ConfigError(f"all-reduce: bucket_bytes must be at least 1, got {self.bucket_bytes}")

    def init(self, worker: Worker) -> None:
        return None

    def step(self, worker: Worker, state: None, batch: Batch) -> Tensor:
        loss = worker.backward(batch, on_ready=worker.issue if self.overlap else None)
        if not self.overlap:
            for bucket in range(worker.buckets):
                worker.issue(bucket)
        worker.complete()
        worker.apply(batch)
        return loss
