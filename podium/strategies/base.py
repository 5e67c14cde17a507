"""A strategy: how replicas come to agree.

A frozen dataclass of hyper-parameters, so that one instance serves every worker and its `repr` is its configuration.
What must outlive a step is the state, which `init` makes and `finish` ends. All three are collective. Training goes in
stretches, each from one `init` to its `finish`; a checkpoint or a change of strategy lies between two stretches, when
the worker's own state is the whole truth. A strategy sees
a worker and, through it, a communicator; it opens no socket, reads no clock and imports no `torch.distributed`, so the
same code runs on processes, in threads and in virtual time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Literal, TypeVar

from torch import Tensor

from podium.config import parse_spec
from podium.errors import ConfigError
from podium.exchange.codecs import make_codec
from podium.exchange.codecs.base import Codec
from podium.exchange.residuals import Sends, Unit

if TYPE_CHECKING:
    from podium.engine.worker import Batch, Worker
    from podium.strategies.phases import Phase

S = TypeVar("S")


class Strategy(ABC, Generic[S]):
    """How replicas come to agree. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    max_workers: ClassVar[int | None] = None
    exchanges: ClassVar[bool] = True
    """Whether gradients are sent anywhere, so that codecs and collectives have a part in it."""
    talks: ClassVar[bool] = False
    """Whether workers send messages to each other, so that they need a channel even where there are no servers."""
    packs: ClassVar[bool] = True
    """Whether what it sends may be packed by a codec."""
    sends: ClassVar[Sends] = "gradients"
    """What workers send each other or servers, for what a codec leaves out of it."""
    sums_gradients: ClassVar[bool] = False
    """Whether every worker sees its own gradient and their sum, so that the gradient noise scale can be measured."""
    compares_speeds: ClassVar[bool] = True
    """Whether the first worker can hear how fast the others are."""
    by_rounds: ClassVar[bool] = False
    """Whether workers step by themselves and agree now and then (`worker.agree`): a lost round is done again."""
    survives_loss: ClassVar[bool] = False
    """Whether training goes on among the survivors after `step` raised `Lost`, and workers may join and leave."""
    replaces_servers: ClassVar[bool] = False
    """Whether a lost server can be restored from a copy."""
    takes_gradients: ClassVar[bool] = True
    """Whether its servers, where it has any, run the task's optimizer; otherwise that may be any."""
    lends_only: ClassVar[bool] = False
    """Whether its server lends samples and holds no parameters."""
    only_serve: int = 0
    """The last so many workers train nothing meanwhile and serve only."""
    bucket_bytes: int = 8 << 20
    """Gradients travel in buckets of about this size; a bucket is never smaller than a tensor."""
    pull: str = "dense"
    """The codec that packs what servers answer."""
    replicas: int = 1
    """How many servers hold each range."""
    snapshot_every: int = 0
    """Updates between two snapshots of a server; 0: none."""

    @cached_property
    def pull_codec(self) -> Codec:
        """What packs the servers' answers."""
        return make_codec(*parse_spec(self.pull, "pull"))

    @property
    def phases(self) -> tuple[Phase, ...]:
        """What the run is made of, in order: this strategy alone, unless it says otherwise."""
        from podium.strategies.phases import Phase

        return (Phase(getattr(self, "name", type(self).__name__), self),)

    def for_workers(self, workers: int) -> Strategy[Any]:
        """This strategy with what it leaves open until the number of workers is known."""
        return self

    def check(self, workers: int) -> None:
        """Raise ConfigError where it cannot run with that many workers."""
        if self.max_workers is not None and workers > self.max_workers:
            raise ConfigError(f"strategy {self.name} runs with {self.max_workers} worker, got workers={workers}")
        if self.colocated and self.server_count > workers:
            raise ConfigError(f"{self.name}: colocated servers need a worker each ({workers}), got {self.server_count}")

    def unit(self, worker: Worker) -> Unit:
        """How far what workers send moves the parameters."""
        return Unit(self.sends, of=type(self).__name__ if self.sends == "own" else "")

    @property
    def outer_every(self) -> int:
        """Steps between two outer steps, which a checkpoint in between would do without; 0: there are none."""
        return 0

    @property
    def server_count(self) -> int:
        """How many servers must exist from the start."""
        return 0

    @property
    def sends_rows(self) -> bool:
        """Whether only touched rows of embeddings travel, where their optimizer allows it."""
        return False

    @property
    def colocated(self) -> bool:
        """Whether servers live in the workers' processes rather than in their own."""
        return False

    @property
    def feed(self) -> Literal["step", "cursor", "round"]:
        """Fed by its share of a global step, or by the next lease from a cursor."""
        return "step"

    def as_recorded(self, shares_memory: bool) -> Strategy[S]:
        """This strategy as it was in a recorded run; raises where that cannot be replayed."""
        return self

    @abstractmethod
    def init(self, worker: Worker) -> S: ...

    @abstractmethod
    def step(self, worker: Worker, state: S, batch: Batch) -> Tensor:
        """Train on one batch; returns its loss. Raising `Lost` leaves the parameters untouched."""

    def settle(self, worker: Worker, state: S) -> None:
        """Wait for the answers that this worker still awaits: it is about to leave the others in mid-epoch."""

    def finish(self, worker: Worker, state: S) -> None:
        """Bring home whatever lives elsewhere: afterwards the worker's own state is the whole truth."""
