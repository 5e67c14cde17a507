"""For folds: a point that is worse than the best point on the same folds is given up, with all its trials.

The rule. When a trial reports, its point's trials (one per fold and seed) that have reported at this epoch are paired
with the best point's trials of the same fold and seed, at the same epoch. The best point is the one with the highest
mean there, among those with at least `least` pairs. Where Wilcoxon's signed-rank test (one-sided, scipy) finds the
point worse, with p below `p`, the point is given up: its running trials are stopped at their next report, and its other
trials never begin. The point with the highest mean is never given up.

Its limits. With n pairs p cannot be below 1 / 2**n, so five folds can decide at 0.05, three at nothing below 0.125. The
rule tests at every report, so more than a share `p` of equally good points is given up in the course of a training. It
compares at equal epochs, and so takes a slow starter for a bad point. The test ignores that folds overlap in their
training samples. A score of inf or nan counts as worst; two of them as equal.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, final

import numpy as np
from scipy import stats

from podium.errors import ConfigError
from podium.sweeps.stopping.base import SLACK, Ledger, Stopping
from podium.sweeps.trial import GO, Evaluation, Trial, Verdict

Scores = dict[tuple[int | None, int], float]  # by fold and seed


@dataclass
class _Memory:
    scores: defaultdict[float, dict[int, Scores]] = field(default_factory=lambda: defaultdict(dict))
    """By epoch and point."""
    epoch: dict[int, float] = field(default_factory=dict)
    """The epoch of each point's last report."""


@final
@dataclass(frozen=True, kw_only=True)
class Wilcoxon(Stopping):
    """Gives up a point, with all its folds, that is worse than the best on the same folds."""

    name: ClassVar[str] = "wilcoxon"
    p: float = 0.1
    """The test's p below which a point is given up."""
    least: int = 4
    """How many pairs of trials a comparison needs."""
    grace: float = 1.0
    """Nothing is compared before this many epochs."""

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ConfigError(f"stopping wilcoxon: p must be between 0 and 1, got {self.p}")
        if 2.0**-self.least > self.p:
            raise ConfigError(
                f"stopping wilcoxon: with least={self.least} pairs p cannot be below {2.0**-self.least:.3g}, so p must "
                f"be above that, got {self.p}"
            )

    def check(self, *, epochs: int | None, eval_every: int, per_point: int) -> None:
        if per_point < self.least:
            raise ConfigError(
                f"stopping wilcoxon: compares pairs of folds and seeds, so each point must have at least "
                f"least={self.least} trials, got {per_point}: give more folds or seeds"
            )

    def hear(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> None:
        memory: _Memory = ledger.memory.setdefault(self.name, _Memory())
        epoch = round(evaluation.epoch, 6)
        memory.epoch[trial.point] = epoch
        memory.scores[epoch].setdefault(trial.point, {})[trial.fold, trial.seed] = (
            ledger[trial.number].entries[-1].score
        )

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        why = self.skip(trial, ledger)
        return Verdict(action="stop", why=why) if why else GO

    def skip(self, trial: Trial, ledger: Ledger) -> str:
        memory: _Memory = ledger.memory.setdefault(self.name, _Memory())
        if any(page.status == "stopped" for page in ledger.points.get(trial.point, ())):
            return f"its point {trial.point} was given up"
        epoch = memory.epoch.get(trial.point, 0.0)
        if epoch < self.grace - SLACK:
            return ""
        return self._worse(trial.point, epoch, memory.scores[epoch])

    def _worse(self, point: int, epoch: float, scores: Mapping[int, Scores]) -> str:
        """Why the point is worse than the best; empty if that is not shown."""
        own = scores[point]
        rivals = {n: s for n, s in scores.items() if n != point and len(own.keys() & s.keys()) >= self.least}
        if not rivals:
            return ""
        best = max(rivals, key=lambda n: (_mean(rivals[n]), -n))
        if _mean(own) >= _mean(rivals[best]):
            return ""
        pairs = sorted(own.keys() & rivals[best].keys(), key=str)
        # Only ranks count, so `-inf` becomes a number below all others.
        a, b = (np.nan_to_num([scores[k] for k in pairs], neginf=-1e300) for scores in (own, rivals[best]))
        if a.mean() >= b.mean():
            return ""
        p = float(stats.wilcoxon(a - b, alternative="less", zero_method="zsplit").pvalue)
        if p >= self.p:
            return ""
        return f"point {point} is worse than point {best} on {len(pairs)} trials at epoch {epoch:g} (p = {p:.2g})"


def _mean(scores: Scores) -> float:
    return sum(scores.values()) / len(scores)
