"""A strategy: how replicas come to agree.

A frozen dataclass of hyper-parameters, so that one instance serves every worker and its `repr` is its configuration.
Data that must outlive a step is the state, which `init` makes and `finish` ends. `init`, `step` and `finish` are
collective. Training runs in segments, each from one `init` to its `finish`; a checkpoint or a change of strategy lies
between two segments, when the worker's own state is complete. A strategy sees a worker and, through it, a communicator;
it opens no socket, reads no clock and imports no `torch.distributed`, so the same code runs on processes, in threads
and in virtual time.

Three objects declare what the run must know beforehand: `cadence`, `payload` and `server_spec`. Their defaults fit a
strategy that sums gradients every step, without servers.
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
        """Which servers must exist from the start; none by default."""
        return ServerSpec()

    def for_workers(self, workers: int) -> Strategy[Any]:
        """This strategy, with defaults filled in that depend on the number of workers."""
        return self

    def check(self, workers: int) -> None:
        """Raise ConfigError where the strategy cannot run with that many workers."""
        if self.max_workers is not None and workers > self.max_workers:
            raise ConfigError(f"strategy {self.name} runs with {self.max_workers} worker, got workers={workers}")
        self.server_spec.check(self.name, workers)

    @abstractmethod
    def init(self, worker: Worker) -> S: ...

    @abstractmethod
    def step(self, worker: Worker, state: S, batch: Batch) -> Tensor:
        """Train on one batch; returns its loss. Raising `Lost` leaves the parameters untouched."""

    def settle(self, worker: Worker, state: S) -> None:
        """Wait for outstanding answers: this worker is about to leave the run in mid-epoch."""

    def finish(self, worker: Worker, state: S) -> None:
        """Collect the state that lives on other ranks: afterwards the worker's own state is complete."""
