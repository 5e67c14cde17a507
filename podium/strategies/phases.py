"""Phases: a run as a list of strategies, each with the trigger that ends it.

    all-reduce until plateau | parameter-server:mode=async;servers=2
    all-reduce until straggler | parameter-server:mode=async until straggler:gone=true | all-reduce
    all-reduce until epoch:at=5 | all-reduce:codec=power-sgd

Synchronous early and relaxed late is one pattern behind many papers: Strategy-Switch, Sync-Switch, post-local SGD,
warm-ups of compressed gradients. Any strategy may follow any other. A phase ends as a segment before a checkpoint does:
`finish` of its strategy collects all state in the worker, and `init` of the next one begins from there. No process is
started or ended. The worker's state carries over; see `docs/concepts.md`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, final

from torch import Tensor

from podium.config import build, lift, parse_spec
from podium.errors import ConfigError
from podium.strategies.base import Strategy
from podium.strategies.traits import Cadence, Payload, ServerSpec
from podium.strategies.triggers import make_trigger
from podium.strategies.triggers.base import Trigger

if TYPE_CHECKING:
    from podium.engine.batch import Batch
    from podium.engine.worker import Worker


class Phase(NamedTuple):
    """A strategy, and the trigger that ends it; without one it lasts to the end of the run."""

    text: str
    strategy: Strategy[Any]
    until: Trigger | None = None
    codec: str | None = None
    """This phase's codec; the run's own when not given."""


def phases_of(strategy: Strategy[Any]) -> tuple[Phase, ...]:
    """The phases of a run, in order; a plain strategy is the only phase."""
    if isinstance(strategy, Phased):
        return strategy.phases
    return (Phase(getattr(strategy, "name", type(strategy).__name__), strategy),)


class Phased(Strategy[Any]):
    """A strategy made of phases. The phase runner switches between them; on its own it behaves as its first phase."""

    @abstractmethod
    def written(self) -> str:
        """The phases as text."""

    keep_moments: bool = True
    """Whether the next phase keeps the optimizer's moments; otherwise it begins without any."""
    repeat: bool = False
    """Whether the first phase follows the last again."""

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        return parse_phases(self.written(), self.name)

    def __post_init__(self) -> None:
        phases = self.phases
        if self.repeat == (phases[-1].until is None) or any(phase.until is None for phase in phases[:-1]):
            last = "every phase needs" if self.repeat else "every phase but the last needs"
            raise ConfigError(f"{self.name}: {last} a trigger (`STRATEGY until TRIGGER`), got {self.written()!r}")
        if self.repeat and any(getattr(phase.until, "at", None) is not None for phase in phases):
            raise ConfigError(f"{self.name}: phases that repeat need `after` in place of `at`, got {self.written()!r}")
        _ = self.server_spec  # raises where phases disagree

    @cached_property
    def cadence(self) -> Cadence:
        return Cadence.of_phases([phase.strategy.cadence for phase in self.phases])

    @cached_property
    def payload(self) -> Payload:
        return Payload.of_phases([phase.strategy.payload for phase in self.phases])

    @cached_property
    def server_spec(self) -> ServerSpec:
        return ServerSpec.of_phases([phase.strategy.server_spec for phase in self.phases], self.name)

    @property
    def bucket_bytes(self) -> int:  # type: ignore[override]  # buffers are laid out once
        return self.phases[0].strategy.bucket_bytes

    def check(self, workers: int) -> None:
        for phase in self.phases:
            phase.strategy.check(workers)
            self._check_rule(phase)

    def _check_rule(self, phase: Phase) -> None:
        """Refuse a trigger whose input its phase does not have."""
        rule, strategy = phase.until, phase.strategy
        if rule is None:
            return
        if rule.needs_noise and not strategy.cadence.sums_gradients:
            raise ConfigError(f"{self.name}: trigger {rule.name} works under all-reduce, got {phase.text!r}")
        if rule.needs_times and not strategy.cadence.compares_speeds:
            raise ConfigError(
                f"{self.name}: trigger {rule.name}: under {strategy.name} workers do not learn each other's speeds, "
                f"got {phase.text!r}"
            )

    # The first phase.

    def init(self, worker: Worker) -> Any:
        return self.phases[0].strategy.init(worker)

    def step(self, worker: Worker, state: Any, batch: Batch) -> Tensor:
        return self.phases[0].strategy.step(worker, state, batch)

    def finish(self, worker: Worker, state: Any) -> None:
        self.phases[0].strategy.finish(worker, state)


@final
@dataclass(frozen=True, kw_only=True)
class Phases(Phased):
    """Phases as the user writes them."""

    name: ClassVar[str] = "phases"

    run: str
    """`STRATEGY until TRIGGER | STRATEGY until TRIGGER | … | STRATEGY`; options as `NAME:K=V;K=V`."""
    keep_moments: bool = True
    repeat: bool = False

    def written(self) -> str:
        return self.run


def parse_phases(text: str, who: str = "phases") -> tuple[Phase, ...]:
    """The inverse of joining phases' texts by ` | `."""
    return tuple(_parse_phase(part.strip(), who) for part in text.split("|"))


def _parse_phase(text: str, who: str) -> Phase:
    from podium.strategies import find_strategy

    spec, until, rule = f"{text} ".partition(" until ")
    if not spec.strip() or (until and not rule.strip()):
        raise ConfigError(f"{who}: a phase is `STRATEGY` or `STRATEGY until TRIGGER`, got {text!r}")
    name, options = parse_spec(spec.strip(), "strategy")
    own, lifted = lift(options)
    if "collective" in lifted:
        raise ConfigError(f"{who}: the collective is the run's and stays the same in all phases, got {text!r}")
    strategy: Strategy[Any] = build(find_strategy(name), own, who=f"strategy {name}")
    if isinstance(strategy, Phased):
        raise ConfigError(f"{who}: a phase cannot be made of phases, got {name}")
    return Phase(text, strategy, make_trigger(rule.strip()) if until else None, lifted.get("codec"))
