"""Consistency: which workers may begin their next step, and which pushes make up an update.

One gate serves all modes. A worker's clock counts its pushes; the worker may begin its next step while its clock is at
most `bound` ahead of the slowest worker's. Pushes are gathered until there are enough for an update; a push that is too
stale is dropped, and its slice lent again.

    BSP        bound 0     all workers make an update            a step is all-reduce's
    SSP(s)     bound s     every push is an update               Ho et al., NIPS 2013
    DSSP       bound from lo to hi, by recent intervals          Zhao et al., ICDCS 2019
    ASP        no bound    every push is an update               Dean et al., NIPS 2012
    n-softsync no bound    workers / n pushes make an update     Zhang et al., IJCAI 2016, arXiv 1511.05950
    backup(b)  update      the first N of N + b; late ones drop  Chen et al., arXiv 1604.00981
    GBA        no bound    a global batch of samples; too stale  Su et al., NeurIPS 2022, arXiv 2205.11048
                           ones drop

With a bound of 0 no worker can read between two pushes of one clock, so they are gathered into one update: SSP(0) is
BSP, momentum included. SSP without a bound is ASP.

With a persistent speed gap every finite bound ends at the slowest worker's pace: slack absorbs only variation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from podium.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Rules:
    """A consistency model, sent to the servers."""

    bound: float | None = None
    """How far a worker may be ahead of the slowest; None: without limit."""
    bound_high: float | None = None
    """DSSP: the bound may rise to this, where that shortens the wait."""
    pushes: int = 1
    """An update is made of this many pushes, …"""
    all_workers: bool = False
    """… or one of every worker that still has work, …"""
    samples: int | None = None
    """… or this many samples."""
    wait: bool = False
    """Whether a worker waits for the update that its push becomes part of."""
    freshest: int | None = None
    """Pushes that are staler than this are dropped; None: none is."""

    @property
    def immediate(self) -> bool:
        """Whether every push is applied on arrival, unit by unit, without a decision."""
        return self.pushes == 1 and not self.all_workers and self.samples is None and self.freshest is None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, fields: Any) -> Rules:
        try:
            return cls(**fields)
        except TypeError as error:
            raise ConfigError(f"parameter-server: the rules that came with the seed do not fit: {error}") from None


class Push(NamedTuple):
    """What the gate knows of one worker's gradient over one slice."""

    source: int
    lease: int
    samples: int = 0
    staleness: int = 0


@dataclass
class Clocks:
    """How often each worker has pushed, and so which workers may begin their next step."""

    rules: Rules
    workers: set[int]
    pushes: dict[int, int] = field(default_factory=dict)
    resting: set[int] = field(default_factory=set)
    """Workers that have no work left: no worker waits for them."""
    allowed: dict[int, float] = field(default_factory=dict)
    """DSSP: how far ahead each worker may be at present."""
    _at: dict[int, tuple[int, int]] = field(default_factory=dict)  # when a worker pushed last, and the interval before

    def tick(self, worker: int, now_ns: int) -> None:
        """This worker has pushed."""
        before = self._at.get(worker)
        self._at[worker] = (now_ns, now_ns - before[0] if before else 0)
        self.pushes[worker] = self.pushes.get(worker, 0) + 1
        self.resting.discard(worker)
        if self.rules.bound_high is not None:
            self.allowed.pop(worker, None)

    def rest(self, workers: Iterable[int]) -> None:
        """These workers have no work left: no worker waits for them."""
        self.resting.update(workers)

    def wake(self, worker: int) -> None:
        """A worker that rested has work again."""
        self.resting.discard(worker)

    def lose(self, worker: int) -> None:
        self.workers.discard(worker)

    def lead(self, worker: int) -> int:
        """How many pushes a worker is ahead of the slowest that still has work."""
        others = [self.pushes.get(w, 0) for w in self.workers - self.resting]
        return self.pushes.get(worker, 0) - min(others, default=self.pushes.get(worker, 0))

    def slowest(self) -> set[int]:
        """Workers that still have work and have pushed least often."""
        working = self.workers - self.resting
        least = min((self.pushes.get(w, 0) for w in working), default=0)
        return {w for w in working if self.pushes.get(w, 0) == least}

    def may_go(self, worker: int) -> bool:
        """Whether this worker may begin its next clock."""
        rules = self.rules
        if rules.bound is None or worker not in self.workers:
            return True
        lead = self.lead(worker)
        if lead <= rules.bound:
            return True
        if rules.bound_high is None:
            return False
        if worker not in self.allowed:
            self.allowed[worker] = self._allowed_lead(worker)
        return lead <= self.allowed[worker]

    def _allowed_lead(self, worker: int) -> float:
        """DSSP: the lead, within the bounds, at which this worker's wait is shortest.

        This worker and the slowest are expected to keep their last intervals between pushes; of equal waits the smaller
        lead wins.
        """
        assert self.rules.bound is not None and self.rules.bound_high is not None
        low, high = int(self.rules.bound), int(self.rules.bound_high)
        slowest = min(self.workers - self.resting, key=lambda w: (self.pushes.get(w, 0), w))
        (now, mine), (then, theirs) = self._at[worker], self._at.get(slowest, (0, 0))
        if mine <= 0 or theirs <= 0:
            return low
        lead = self.lead(worker)
        best, shortest = high, float("inf")
        for extra in range(high - lead + 2):  # further clocks, the last of them begun with the highest lead
            here = now + extra * mine
            catches_up = max(1, -(-(here - then) // theirs))
            wait = then + catches_up * theirs - here
            if wait < shortest:
                best, shortest = lead + extra - 1, wait
        return best


class Gathering:
    """Pushes that wait to become an update."""

    def __init__(self, rules: Rules, workers: Collection[int]) -> None:
        self.rules, self.workers = rules, set(workers)
        self.resting: set[int] = set()
        self.waiting: list[Push] = []

    def add(self, push: Push) -> bool:
        """Whether this push is fresh enough to count; it then waits for further pushes."""
        if self.rules.freshest is not None and push.staleness > self.rules.freshest:
            return False
        self.waiting.append(push)
        return True

    def rest(self, workers: Iterable[int]) -> None:
        """These workers have no work left: no worker waits for them."""
        self.resting.update(workers)

    def wake(self, worker: int) -> None:
        """A worker that rested has work again."""
        self.resting.discard(worker)

    def clear(self) -> None:
        """Drop all pushes that wait: workers will send them again."""
        self.waiting.clear()

    def forget(self, source: int) -> None:
        """A worker is gone: no worker waits for it. Its pushes stay."""
        self.workers.discard(source)
        self.resting.discard(source)

    def take(self, last: bool = False) -> list[Push]:
        """The pushes that make the next update, in the order of their slices; none while there are not enough.

        `last`: no more pushes will come, so all that wait make an update.
        """
        if not self.waiting or not (last or self._is_enough()):
            return []
        taken, self.waiting = sorted(self.waiting, key=lambda push: (push.lease, push.source)), []
        return taken

    def missing(self) -> set[int]:
        """Workers that workers with a waiting push wait for."""
        if not self.waiting or not self.rules.wait:
            return set()
        return self.workers - self.resting - {push.source for push in self.waiting}

    def _is_enough(self) -> bool:
        rules, working = self.rules, self.workers - self.resting
        if rules.all_workers:
            return working <= {push.source for push in self.waiting}
        if rules.samples is not None:
            return sum(push.samples for push in self.waiting) >= rules.samples
        if rules.wait:  # at most one push each of the workers with work left and of those that have pushed
            return len(self.waiting) >= min(rules.pushes, len(working | {push.source for push in self.waiting}))
        return len(self.waiting) >= rules.pushes
