"""The median rule: whoever has never been better than the others were on average is stopped.

Golovin et al., 2017, https://doi.org/10.1145/3097983.3098043: a trial is stopped at an epoch when its best score up to
there is below the median of the others' mean scores up to there. The others are all that have reported at that epoch
before it, whether they are through or not.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, ClassVar, final

from podium.colocate.stopping.base import SLACK, WORST, Ledger, Stopping
from podium.colocate.trial import GO, Evaluation, Trial, Verdict
from podium.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class Median(Stopping):
    """Stopped when the best score so far is below the median of the others' means so far."""

    name: ClassVar[str] = "median"
    grace: float = 1.0
    """No trial is stopped before this many epochs."""
    least: int = 4
    """How many others must have reported at the same epoch."""

    def __post_init__(self) -> None:
        if self.grace < 0:
            raise ConfigError(f"stopping median: grace must be 0 epochs or more, got {self.grace}")
        if self.least < 1:
            raise ConfigError(f"stopping median: least must be at least 1, got {self.least}")

    @property
    def first_at(self) -> float:
        return self.grace

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        memory: dict[Any, list[float]] = ledger.memory.setdefault(self.name, defaultdict(list))
        scores = [entry.score for entry in ledger[trial.number].entries]
        means = memory[trial.fold, round(evaluation.epoch, 6)]  # ascending
        best, median, others = max(scores), _median(means), len(means)
        bisect.insort(means, sum(scores) / len(scores))
        if evaluation.epoch < self.grace - SLACK or others < self.least or best >= median:
            return GO
        sign = 1 if ledger.maximize else -1
        why = f"best {ledger.metric} {sign * best:.4g}, {others} others had a median of {sign * median:.4g}"
        return Verdict(action="stop", why=f"{why} at epoch {evaluation.epoch:g}")


def _median(ascending: list[float]) -> float:
    if not ascending:
        return WORST
    middle = len(ascending) // 2
    return ascending[middle] if len(ascending) % 2 else (ascending[middle - 1] + ascending[middle]) / 2
