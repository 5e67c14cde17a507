"""Points × folds × seeds: every point of a search, trained once per fold and seed.

The inner source sees one trial per point, as if there were neither folds nor seeds, and receives one score: the mean,
when all trials of the point are over.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, final

from podium.errors import ConfigError
from podium.sweeps.search.base import Source
from podium.sweeps.trial import Outcome, Status, Trial

_WORST_FIRST: tuple[Status, ...] = ("failed", "diverged", "stopped", "finished")


@dataclass
class _Point:
    trial: Trial  # the inner source's
    missing: int
    outcomes: list[Outcome] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)


@final
class CrossedSource(Source):
    """Every point of another source once per fold and seed; `ask` returns a point's trials one after the other."""

    def __init__(self, points: Source, *, seeds: Sequence[int] = (0,), folds: int | None = None) -> None:
        """`folds`: how many there are; None validates on the task's test data."""
        if not seeds or len(set(seeds)) < len(seeds):
            raise ConfigError(f"sweep: seeds must be at least one, all different, got {list(seeds)}")
        if folds is not None and folds < 1:
            raise ConfigError(f"sweep: folds must be at least 1, got {folds}")
        self.points, self.seeds = points, tuple(seeds)
        self.folds: tuple[int | None, ...] = (None,) if folds is None else tuple(range(folds))
        self._ready: deque[Trial] = deque()
        self._open: dict[int, _Point] = {}
        self._asked = 0

    @property
    def total(self) -> int | None:
        points = self.points.total
        return None if points is None else points * len(self.folds) * len(self.seeds)

    @property
    def exhausted(self) -> bool:
        return not self._ready and self.points.exhausted

    def ask(self) -> Trial | None:
        if not self._ready:
            self._open_next()
        return self._ready.popleft() if self._ready else None

    def tell(self, outcome: Outcome, score: float | None) -> None:
        point = self._open[outcome.trial.point]
        point.missing -= 1
        point.outcomes.append(outcome)
        if score is not None:
            point.scores.append(score)
        if point.missing == 0:
            del self._open[outcome.trial.point]
            mean = sum(point.scores) / len(point.scores) if point.scores else None
            self.points.tell(_summary(point), mean)

    def recall(self, points: Sequence[Mapping[str, Any]]) -> None:
        self.points.recall(points)

    def _open_next(self) -> None:
        inner = self.points.ask()
        if inner is None:
            return
        self._open[inner.point] = _Point(inner, missing=len(self.folds) * len(self.seeds))
        for fold in self.folds:
            for seed in self.seeds:
                self._ready.append(
                    Trial(number=self._asked, options=inner.options, seed=seed, fold=fold, point=inner.point)
                )
                self._asked += 1


def _summary(point: _Point) -> Outcome:
    """The point's status: the worst of its trials' statuses."""
    status = min((outcome.status for outcome in point.outcomes), key=_WORST_FIRST.index)
    return Outcome(
        trial=point.trial,
        status=status,
        why=next((o.why for o in point.outcomes if o.status == status), ""),
        steps=sum(o.steps for o in point.outcomes),
        samples=sum(o.samples for o in point.outcomes),
        seconds=sum(o.seconds for o in point.outcomes),
    )
