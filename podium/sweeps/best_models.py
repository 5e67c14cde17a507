"""Which models a sweep keeps while the best point is not known yet."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from podium.sweeps.trial import Outcome


@dataclass
class _PointModel:
    """The trials of a point so far."""

    number: int
    over: int = 0
    failed: bool = False
    values: list[float] = field(default_factory=list)
    best: Outcome | None = None

    @property
    def mean(self) -> float:
        return math.fsum(self.values) / len(self.values)  # exact in any order: a tie must stay a tie


class BestModelKeeper:
    """Keeps the model of the best point's best trial, and deletes others as soon as they cannot be that model.

    A point's mean is not known before all its trials are over, so until then each point keeps its best trial's model.
    A point with failed trials keeps its model, too: a resumed sweep trains them again, and the point may win.
    """

    def __init__(self, folder: Path, config: Mapping[str, Any], outcomes: Sequence[Outcome]) -> None:
        self._folder, self._metric, self._sign = folder, config["metric"], 1 if config["maximize"] else -1
        self._per_point = len(config["seeds"]) * (config["folds"] or {}).get("count", 1)
        self._points: dict[int, _PointModel] = {}
        self._champion: _PointModel | None = None  # the best of the points whose trials all finished
        for outcome in outcomes:
            self.add(outcome)

    def add(self, outcome: Outcome) -> None:
        """Take the outcome of a trial, and delete models that can no longer be the best."""
        point = self._points.setdefault(outcome.trial.point, _PointModel(outcome.trial.point))
        point.over += 1
        point.failed |= outcome.status == "failed"
        through = outcome.status == "finished" and outcome.evaluation is not None
        value = outcome.evaluation.value_of(self._metric) if through and outcome.evaluation is not None else math.nan
        if math.isfinite(value):
            point.values.append(value)
            known = None if point.best is None else point.best.evaluation
            if known is not None and self._sign * (value - known.value_of(self._metric)) <= 0:
                self._delete(outcome)
            else:
                self._delete(point.best)
                point.best = outcome
        else:
            self._delete(outcome)
        if point.over == self._per_point:
            self._weigh(point)

    def end(self) -> None:
        """The sweep is finished: delete all models but the best point's, and those of points with failed trials."""
        some = [point for point in self._points.values() if point.values]
        best = self._champion or max(
            some, key=lambda p: (len(p.values), self._sign * p.mean, -p.number), default=None
        )  # as `ranking.find_points` ranks them
        for point in some:
            if point is not best and not point.failed:
                self._delete(point.best)

    def _weigh(self, point: _PointModel) -> None:
        """All trials of a point are over: make it the champion, or delete its model."""
        if point.failed:
            return
        champion = self._champion
        if len(point.values) < self._per_point:
            if champion is not None:
                self._delete(point.best)
            return
        if champion is None or (self._sign * point.mean, -point.number) > (
            self._sign * champion.mean,
            -champion.number,
        ):
            self._champion = point
            for other in self._points.values():
                if other is not point and other.over == self._per_point and not other.failed:
                    self._delete(other.best)
        else:
            self._delete(point.best)

    def _delete(self, outcome: Outcome | None) -> None:
        if outcome is not None and outcome.model:
            (self._folder / outcome.model).unlink(missing_ok=True)
