"""Phases: a run as a list of strategies, each with the trigger that ends it.

    all-reduce until plateau | parameter-server:mode=async;servers=2
    all-reduce until straggler | parameter-server:mode=async until straggler:gone=true | all-reduce
    all-reduce until epoch:at=5 | all-reduce:codec=power-sgd

Exact early and relaxed late is one pattern behind many papers: Strategy-Switch, Sync-Switch, post-local SGD, warm-ups
of compressed gradients. Any strategy may follow any other. A phase ends as a stretch before a checkpoint does: `finish`
of its strategy brings everything home into the worker, and `init` of the next one sets out from there. No process is
started or ended. What carries over is the worker's state; see `docs/concepts.md`.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, final

from torch import Tensor

from podium.config import build, lift, parse_spec
from podium.errors import ConfigError
from podium.strategies.base import Strategy
from podium.strategies.triggers import make_trigger
from podium.strategies.triggers.base import Trigger

if TYPE_CHECKING:
    from podium.engine.worker import Batch, Worker


class Phase(NamedTuple):
    """A strategy, and the trigger that ends it; none: it goes on to the end of the run."""

    text: str
    strategy: Strategy[Any]
    until: Trigger | None = None
    codec: str | None = None
    """How this phase packs what it sends; the run's own codec when not given."""


class Phased(Strategy[Any]):
    """A strategy made of phases. Whoever trains leads it from one to the next; left alone, it is its first phase."""

    @abstractmethod
    def written(self) -> str:
        """The phases as text."""

    keep_moments: bool = True
    """Whether the optimizer's moments go on in the next phase; without, it begins with none."""
    repeat: bool = False
    """Whether the first phase follows the last."""

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
        for name in ("server_count", "colocated", "replicas", "snapshot_every", "pull"):
            found = {getattr(phase.strategy, name) for phase in self._served}
            if len(found) > 1:
                raise ConfigError(
                    f"{self.name}: servers live through all phases, so their phases must agree on {name}, "
                    f"got {', '.join(map(str, sorted(found)))}"
                )

    @cached_property
    def _served(self) -> list[Phase]:
        """Phases that say what servers are like: where some hold parameters, one that only lends takes any."""
        served = [phase for phase in self.phases if phase.strategy.server_count]
        return [phase for phase in served if not phase.strategy.lends_only] or served

    def _of_servers(self, name: str) -> Any:
        """What the phases with servers say of them."""
        return getattr(self._served[0].strategy if self._served else self.phases[0].strategy, name)

    # What the run must be ready for.

    @property
    def server_count(self) -> int:
        return max(phase.strategy.server_count for phase in self.phases)

    @property
    def colocated(self) -> bool:
        return bool(self._of_servers("colocated"))

    @property
    def feed(self) -> Literal["step", "cursor", "round"]:
        """Leases, where any phase has them: what must hold for one must hold for the run."""
        feeds = {phase.strategy.feed for phase in self.phases}
        return "cursor" if "cursor" in feeds else "round" if "round" in feeds else "step"

    @property
    def exchanges(self) -> bool:  # type: ignore[override]  # as its phases do
        return any(phase.strategy.exchanges for phase in self.phases)

    @property
    def talks(self) -> bool:  # type: ignore[override]  # as its phases do
        return any(phase.strategy.talks for phase in self.phases)

    @property
    def survives_loss(self) -> bool:  # type: ignore[override]  # as its phases do
        return all(phase.strategy.survives_loss for phase in self.phases)

    @property
    def replaces_servers(self) -> bool:  # type: ignore[override]  # as its phases do
        return all(phase.strategy.replaces_servers for phase in self._served)

    @property
    def bucket_bytes(self) -> int:  # type: ignore[override]  # buffers are laid out once
        return self.phases[0].strategy.bucket_bytes

    @property
    def replicas(self) -> int:  # type: ignore[override]  # as its phases do
        return int(self._of_servers("replicas"))

    @property
    def snapshot_every(self) -> int:  # type: ignore[override]  # as its phases do
        return int(self._of_servers("snapshot_every"))

    @property
    def pull(self) -> str:  # type: ignore[override]  # as its phases do
        return str(self._of_servers("pull"))

    def check(self, workers: int) -> None:
        for phase in self.phases:
            phase.strategy.check(workers)
            self._check_rule(phase)

    def _check_rule(self, phase: Phase) -> None:
        """Refuse a rule that has nothing to go by in its phase."""
        rule, strategy = phase.until, phase.strategy
        if rule is None:
            return
        if rule.needs_noise and not strategy.sums_gradients:
            raise ConfigError(f"{self.name}: trigger {rule.name} works under all-reduce, got {phase.text!r}")
        if rule.needs_times and not strategy.compares_speeds:
            raise ConfigError(
                f"{self.name}: trigger {rule.name}: under {strategy.name} workers do not hear of each other's speeds, "
                f"got {phase.text!r}"
            )

    def as_recorded(self, shares_memory: bool) -> Strategy[Any]:
        raise ConfigError(f"replay: {self.name}: a run with phases cannot be replayed")

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
    """Phases of one's own."""

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
