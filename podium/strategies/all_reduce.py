"""All-reduce: in every step, all workers sum their gradients and take the same step.

A bucket is sent as soon as backward has filled it, so that communication overlaps with the rest of backward. Parameters
move only once all buckets are reduced, so a step that loses a worker has not happened and is retried.

The run chooses the collective that sums buckets and the codec that packs them (`collective`, `codec`).

Li et al., PyTorch Distributed, VLDB 2020, describes bucketing and overlap.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from torch import Tensor

from podium.strategies.base import Strategy
from podium.strategies.checks import at_least
from podium.strategies.traits import Cadence

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


@final
@dataclass(frozen=True, kw_only=True)
class AllReduce(Strategy[None]):
    """Synchronous data parallelism by summed gradients."""

    name: ClassVar[str] = "all-reduce"
    cadence: ClassVar[Cadence] = Cadence(survives_loss=True, sums_gradients=True)

    bucket_bytes: int = 8 << 20
    """Gradients travel in buckets of about this size."""
    overlap: bool = True
    """Whether buckets are sent while backward still runs."""

    def __post_init__(self) -> None:
        at_least(1, self, "bucket_bytes")

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
