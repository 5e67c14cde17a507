"""What a strategy declares about itself: when workers agree, what they send, and which servers it needs.

The launcher prepares a run from these three objects before any worker exists: it starts processes and channels, chooses
how samples are divided, and names records. A strategy of several phases merges the objects of its phases.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from podium.config import parse_spec
from podium.errors import ConfigError
from podium.exchange.codecs import make_codec
from podium.exchange.codecs.base import Codec

if TYPE_CHECKING:
    from podium.engine.worker import Worker


@dataclass(frozen=True, kw_only=True)
class Cadence:
    """When workers agree."""

    every: Literal["step", "round", "lease"] = "step"
    """`step`: all workers take every global step together. `round`: each worker takes local steps, and a round ends
    with `worker.end_round`. `lease`: a worker leases samples from a server and exchanges when it has used them."""
    unequal: bool = False
    """Whether workers may take unequal numbers of steps in a round."""
    survives_loss: bool = False
    """Whether the survivors continue after `step` raised `Lost`: a lost step, or round, is repeated without the lost
    worker. Then workers may also join and leave."""
    outer_every: int = 0
    """Steps between two outer steps, which a checkpoint in between would skip; 0: no outer steps."""
    sums_gradients: bool = False
    """Whether every worker sees its own gradient and their sum, so that the gradient noise scale can be measured."""
    compares_speeds: bool = True
    """Whether the first worker learns the speeds of the other workers."""

    @property
    def by_rounds(self) -> bool:
        return self.every == "round"

    @property
    def by_leases(self) -> bool:
        return self.every == "lease"

    @property
    def feed(self) -> Literal["step", "round", "lease"]:
        """Where a worker's samples come from: its share of a global step, its part of a round, or its next lease."""
        return "step" if self.every == "round" and not self.unequal else self.every

    @staticmethod
    def of_phases(cadences: Sequence[Cadence]) -> Cadence:
        """The loosest of the phases: what one phase needs, the run needs."""
        return Cadence(
            every=max((cadence.every for cadence in cadences), key=("step", "round", "lease").index),
            unequal=any(cadence.unequal for cadence in cadences),
            survives_loss=all(cadence.survives_loss for cadence in cadences),
        )


def whole_step(worker: Worker) -> float:
    """The share where every update is made from a whole global step."""
    return 1.0


@dataclass(frozen=True, kw_only=True)
class Payload:
    """What workers send each other or their servers."""

    kind: Literal["gradients", "drifts", "own", "parameters", "nothing"] = "gradients"
    """`drifts`: how far a worker has moved since all last agreed. `own`: only the strategy can interpret it.
    `parameters` are sent as they are: no codec may pack them."""
    point_to_point: bool = False
    """Whether workers send each other messages, which needs a channel even without servers."""
    share: Callable[[Worker], float] = whole_step
    """An update's samples over those of a global step: a gradient moves the parameters by this part of the rate."""

    @property
    def is_sent(self) -> bool:
        """Whether workers send anything, so that the run's codec and collective matter."""
        return self.kind != "nothing"

    @property
    def can_be_packed(self) -> bool:
        return self.kind != "parameters"

    @staticmethod
    def of_phases(payloads: Sequence[Payload]) -> Payload:
        kinds = [payload.kind for payload in payloads if payload.is_sent]
        return Payload(
            kind=kinds[0] if kinds else "nothing", point_to_point=any(payload.point_to_point for payload in payloads)
        )


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """Which servers must exist from the start. Without any (`count=0`) it is false."""

    count: int = 0
    colocated: bool = False
    """Whether servers live in the workers' processes rather than in their own."""
    role: Literal["optimizer", "outer", "lender"] = "optimizer"
    """`optimizer`: servers run the task's optimizer on gradients. `outer`: servers run an outer optimizer, so the
    task's may be any. `lender`: the server lends samples and has no parameters."""
    replicas: int = 1
    """How many servers hold each range."""
    snapshot_every: int = 0
    """Updates between two snapshots of a server; 0: none."""
    pull: str = "dense"
    """The codec that packs the servers' answers."""
    only_serve: int = 0
    """The last `only_serve` workers serve and do not train."""
    replaceable: bool = False
    """Whether a lost server can be restored from a copy."""
    sends_rows: bool = False
    """Whether only touched rows of embeddings are sent, where their optimizer allows it."""
    not_replayed: str = ""
    """Why a recorded run cannot be replayed; empty: it can."""

    def __bool__(self) -> bool:
        return self.count > 0

    @property
    def processes(self) -> int:
        """The number of servers with their own process."""
        return 0 if self.colocated else self.count

    @cached_property
    def pull_codec(self) -> Codec:
        return make_codec(*parse_spec(self.pull, "pull"))

    def check_options(self, who: str) -> None:
        """Raise ConfigError where options contradict each other."""
        if self.pull_codec.takes_momentum:
            raise ConfigError(f"{who}: pull={self.pull} packs gradients, but servers answer with parameters")
        if self.pull_codec.name == "auto":
            raise ConfigError(f"{who}: pull=auto: servers cannot choose a codec by themselves; name one")
        if self.replicas > self.count:
            raise ConfigError(
                f"{who}: replicas must be at most the number of servers ({self.count}), got {self.replicas}"
            )

    def check(self, who: str, workers: int) -> None:
        """Raise ConfigError where there are too few workers."""
        if self.colocated and self.count > workers:
            raise ConfigError(f"{who}: colocated servers need a worker each ({workers}), got {self.count}")

    @property
    def placement(self) -> str:
        """Where the servers live, as the option is written."""
        return "colocated" if self.colocated else "dedicated"

    @staticmethod
    def of_phases(specs: Sequence[ServerSpec], who: str) -> ServerSpec:
        """Servers live through all phases, so the phases must agree on them; a phase that only leases accepts any."""
        served = [spec for spec in specs if spec]
        holding = [spec for spec in served if spec.role != "lender"] or served
        if not holding:
            return ServerSpec()
        for name in ("count", "placement", "replicas", "snapshot_every", "pull"):
            found = {getattr(spec, name) for spec in holding}
            if len(found) > 1:
                raise ConfigError(
                    f"{who}: servers live through all phases, so their phases must agree on {_OPTION.get(name, name)}, "
                    f"got {', '.join(map(str, sorted(found)))}"
                )
        first = holding[0]
        return ServerSpec(
            count=max(spec.count for spec in served),
            colocated=first.colocated,
            role=min((spec.role for spec in served), key=("optimizer", "outer", "lender").index),
            replicas=first.replicas,
            snapshot_every=first.snapshot_every,
            pull=first.pull,
            only_serve=max(spec.only_serve for spec in served),
            replaceable=all(spec.replaceable for spec in holding),
        )


_OPTION = {"count": "servers"}  # how users write it
