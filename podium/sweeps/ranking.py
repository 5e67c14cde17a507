"""Points of a sweep with means and intervals, the best first, and the best point tested against the others.

A point's mean is over its trials (one per fold and seed) that ran to their end; trials that a rule stopped early were
evaluated at another epoch and do not count. Points whose trials all finished rank before points with unfinished trials,
and of these the points with more finished trials rank first: one lucky fold is not the best of five.

Two points are compared fold by fold and seed by seed. Folds share training samples, so their scores are not
independent and a plain paired t-test finds differences that are not there; the variance is therefore multiplied by
(1/n + validation/training samples) instead of 1/n (Nadeau and Bengio, 2003, https://doi.org/10.1023/A:1024068626366).
Where the gap is the same in every pair, t is undefined. The sign test replaces it, p = 2**(1 - n), with n corrected in
the same way: 1/(1/n + validation/training samples).

The best point is compared with all others, but the same scores made it the best: any point might have been. So p is
multiplied by the number of all pairs of points (Bonferroni), not by the number of other points.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from podium.records.intervals import deviation, mean_interval, paired_p
from podium.sweeps.formats import format_options
from podium.sweeps.trial import Outcome, Trial

ALPHA = 0.05
"""Two points are different when the corrected p is below this, and tied otherwise."""

_ROUNDING = 2.0**-21
"""Relative rounding error of a gap: a metric may have been computed in single precision."""


class Score(NamedTuple):
    """The score of one finished trial of a point."""

    trial: int
    fold: int | None
    seed: int
    value: float


@dataclass(frozen=True, kw_only=True)
class Point:
    """One point of the search, over its folds and seeds."""

    number: int
    options: Mapping[str, Any]
    """As the source gave them; population based training may have changed them on the way."""
    n: int
    """How many of its trials finished with a finite score; the mean is over these."""
    mean: float | None = None
    sd: float | None = None
    """Between its trials; None with fewer than two."""
    low: float | None = None
    high: float | None = None
    """The 95 % t-interval of the mean; None with fewer than two."""
    statuses: Mapping[str, int] = field(default_factory=dict)
    """How many of its trials ended with each status."""
    is_whole: bool = False
    """Whether all its trials finished with a finite score."""
    scores: Sequence[Score] = ()

    @property
    def name(self) -> str:
        return format_options(self.options)

    def to_dict(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self), "scores": [score._asdict() for score in self.scores]}


@dataclass(frozen=True, kw_only=True)
class Rival:
    """The best point compared with another, in pairs of trials with the same fold and seed."""

    point: int
    pairs: int
    gap: float
    """How much better the best is, as a mean over the pairs; below 0 where the other is better in common trials."""
    p: float | None
    """Of the corrected paired t-test, times the number of all pairs of points; None with fewer than two pairs."""

    @property
    def is_distinct(self) -> bool:
        """Whether the best point is significantly better."""
        return self.p is not None and self.p < ALPHA and self.gap > 0

    @property
    def is_better(self) -> bool:
        """Whether the other is significantly better in the common trials; it ranks lower as it finished fewer."""
        return self.p is not None and self.p < ALPHA and self.gap < 0


def find_points(asked: Sequence[Trial], outcomes: Sequence[Outcome], metric: str, *, maximize: bool) -> list[Point]:
    """The points of these trials, the best first."""
    by_number = {outcome.trial.number: outcome for outcome in outcomes}
    trials: dict[int, list[Trial]] = {}
    for trial in asked:
        trials.setdefault(trial.point, []).append(trial)
    points = [_point(number, some, by_number, metric) for number, some in trials.items()]
    sign = -1 if maximize else 1
    return sorted(points, key=lambda p: (p.mean is None, not p.is_whole, -p.n, sign * (p.mean or 0.0), p.number))


def _point(number: int, trials: Sequence[Trial], outcomes: Mapping[int, Outcome], metric: str) -> Point:
    scores, statuses = [], Counter[str]()
    for trial in trials:
        outcome = outcomes.get(trial.number)
        if outcome is None:
            continue
        statuses[outcome.status] += 1
        if outcome.status == "finished" and outcome.evaluation is not None:
            value = outcome.evaluation.value_of(metric)
            if math.isfinite(value):
                scores.append(Score(trial.number, trial.fold, trial.seed, value))
    values = [score.value for score in scores]
    blank = Point(number=number, options=trials[0].options, n=len(values), statuses=dict(statuses))
    if not values:
        return blank
    found = mean_interval(values)
    assert found is not None
    sd = deviation(values, found.mean) if len(values) > 1 else None
    point = dataclasses.replace(blank, is_whole=len(values) == len(trials), scores=tuple(scores))
    return dataclasses.replace(point, mean=found.mean, sd=sd, low=found.low, high=found.high)


def best_score(point: Point, *, maximize: bool) -> Score:
    return (max if maximize else min)(point.scores, key=lambda score: score.value)


def find_rivals(points: Sequence[Point], config: Mapping[str, Any]) -> list[Rival]:
    """The best point (the first) against all others; empty where trials copied each other and are not independent."""
    if not points or points[0].mean is None or config.get("copies"):
        return []
    sign = 1 if config["maximize"] else -1
    overlap = (config.get("folds") or {}).get("overlap", 0.0)
    best = {(score.fold, score.seed): score.value for score in points[0].scores}
    found = []
    for point in points[1:]:
        theirs = {(score.fold, score.seed): score.value for score in point.scores}
        pairs = [(best[key], theirs[key]) for key in best if key in theirs]
        if pairs:
            gaps = [sign * (one - other) for one, other in pairs]
            resolution = _ROUNDING * max(abs(value) for pair in pairs for value in pair)
            p = _paired_p(gaps, overlap, resolution)
            found.append(Rival(point=point.number, pairs=len(gaps), gap=math.fsum(gaps) / len(gaps), p=p))
    return [r if r.p is None else dataclasses.replace(r, p=min(1.0, r.p * count_pairs(points))) for r in found]


def count_pairs(points: Sequence[Point]) -> int:
    """How many pairs of points could have been compared: the factor of the Bonferroni correction."""
    return math.comb(sum(point.mean is not None for point in points), 2)


def _paired_p(gaps: Sequence[float], overlap: float, resolution: float) -> float | None:
    """Two-sided p of a paired t-test; `overlap` is validation / training samples for folds, else 0.

    Gaps that differ by less than `resolution` count as equal, and gaps below it as 0.
    """
    n = len(gaps)
    if n < 2:
        return None
    mean = math.fsum(gaps) / n
    if deviation(gaps, mean) <= resolution:
        # Scores that count samples (accuracy) often have the same gap in a few pairs, by luck.
        return 1.0 if abs(mean) <= resolution else min(1.0, 2.0 ** (1 - 1 / (1 / n + overlap)))
    return paired_p(gaps, overlap)
