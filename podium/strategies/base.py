"""A strategy: how replicas come to agree.

A frozen dataclass of hyper-parameters, so that one instance serves every worker and its `repr` is its configuration.
What must outlive a step is the state, which `init` makes and `finish` ends. All three are collective. Training goes in
segments, each from one `init` to its `finish`; a checkpoint or a change of strategy lies between two segments, when the
worker's own state is the whole truth. A strategy sees a worker and, through it, a communicator; it opens no socket,
reads no clock and imports no `torch.distributed`, so the same code runs on processes, in threads and in virtual time.

What the run has to know beforehand is declared in three objects: `cadence`, `payload` and `server_spec`. Their defaults
fit a strategy that sums gradients every step, without servers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch import Tensor

from podium.errors import ConfigError
from podium.strategies.traits import Cadence, Payload, ServerSpec

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker

S = TypeVar("S")


class Strategy(ABC, Generic[S]):
    """How replicas come to agree. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    max_workers: ClassVar[int | None] = None
    bucket_bytes: int = 8 << 20
    """Gradients travel in buckets of about this size; a bucket is never smaller than a tensor."""

    @property
    def cadence(self) -> Cadence:
        """When workers agree: every step, after rounds of local steps, or lease by lease."""
        return Cadence()

    @property
    def payload(self) -> Payload:
        """What workers send."""
        return Payload()

    @property
    def server_spec(self) -> ServerSpec:
        """Which servers must exist from the start: none, unless it says otherwise."""
        return ServerSpec()

    def for_workers(self, workers: int) -> Strategy[Any]:
        """This strategy with the options filled in whose default depends on the number of workers."""
        return self

    def check(self, workers: int) -> None:
        """Raise ConfigError where it cannot run with that many workers."""
        if self.max_workers is not None and workers > self.max_workers:
            raise ConfigError(f"strategy {self.name} runs with {self.max_workers} worker, got workers={workers}")
        self.server_spec.check(self.name, workers)

    @abstractmethod
    def init(self, worker: Worker) -> S: ...

    @abstractmethod
    def step(self, worker: Worker, state: S, batch: Batch) -> Tensor:
        """Train on one batch; returns its loss. Raising `Lost` leaves the parameters untouched."""

    def settle(self, worker: Worker, state: S) -> None:
        """Wait for the answers that this worker still awaits: it is about to leave the others in mid-epoch."""

    def finish(self, worker: Worker, state: S) -> None:
        """Collect whatever lives elsewhere: afterwards the worker's own state is the whole truth."""
