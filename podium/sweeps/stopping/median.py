"""The median rule: a trial whose best score is below the other trials' typical mean score is stopped.

Golovin et al., 2017, https://doi.org/10.1145/3097983.3098043: a trial is stopped at an epoch when its best score so far
is below the median of the other trials' mean scores up to that epoch. The other trials are all that have reported at
that epoch by then, whether they have ended or not.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar, final

from podium.errors import ConfigError
from podium.sweeps.stopping.base import SLACK, WORST, Ledger, Stopping
from podium.sweeps.trial import GO, Evaluation, Trial, Verdict


@final
@dataclass(frozen=True, kw_only=True)
class Median(Stopping):
    """Stops a trial when its best score so far is below the median of the other trials' means so far."""

    name: ClassVar[str] = "median"
    grace: float = 1.0
    """No trial is stopped before this many epochs."""
    least: int = 4
    """How many other trials must have reported at the same epoch."""

    def __post_init__(self) -> None:
        if self.grace < 0:
            raise ConfigError(f"stopping median: grace must be 0 epochs or more, got {self.grace}")
        if self.least < 1:
            raise ConfigError(f"stopping median: least must be at least 1, got {self.least}")

    @property
    def first_at(self) -> float:
        return self.grace

    def hear(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> None:
        scores = [entry.score for entry in ledger[trial.number].entries]
        bisect.insort(self._means(trial, evaluation, ledger), sum(scores) / len(scores))

    def _means(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> list[float]:
        """The mean scores of all trials of this fold that have reported at this epoch, ascending."""
        memory: dict[Any, list[float]] = ledger.memory.setdefault(self.name, defaultdict(list))
        return memory[trial.fold, round(evaluation.epoch, 6)]

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        scores = [entry.score for entry in ledger[trial.number].entries]
        means = self._means(trial, evaluation, ledger)
        own = bisect.bisect_left(means, sum(scores) / len(scores))
        best, median, others = max(scores), _median_without(own, means), len(means) - 1
        if evaluation.epoch < self.grace - SLACK or others < self.least or best >= median:
            return GO
        sign = 1 if ledger.maximize else -1
        why = f"best {ledger.metric} {sign * best:.4g}, {others} others had a median of {sign * median:.4g}"
        return Verdict(action="stop", why=f"{why} at epoch {evaluation.epoch:g}")


def _median_without(own: int, ascending: list[float]) -> float:
    """The median of all values but the one at index `own`."""
    count = len(ascending) - 1
    if not count:
        return WORST
    low, high = (ascending[place + (place >= own)] for place in ((count - 1) // 2, count // 2))
    return low if low == high else (low + high) / 2
