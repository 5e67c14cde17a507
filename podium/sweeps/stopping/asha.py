"""Successive halving without waiting: at each rung only the best trials continue.

Li et al., 2020, https://arxiv.org/abs/1810.05934. Rungs lie at `grace`, `grace * factor`, `grace * factor**2` … epochs.
Of the k trials that have reached a rung so far, the best k // factor, and at least one, may continue.

A trial is never paused, only stopped or continued (the stopping variant): none can be promoted later, so a trial that
reaches a rung early is compared with few others. That distorts trials that train side by side: all reach a rung at once
and report one after the other, so the first would always continue, and the second best would be stopped if it reported
right after the best. So by default running trials that have not reached the rung yet count as if they were worse, and
each trial is compared at its highest rung again at every later report, when they have reached it. Trials side by side
then get successive halving in any order of reports. `again=false` compares once, with the trials that have reached the
rung, as published.
"""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar, final

from podium.errors import ConfigError
from podium.sweeps.stopping.base import SLACK, Ledger, Stopping
from podium.sweeps.trial import GO, Evaluation, Trial, Verdict


@dataclass
class _Memory:
    scores: defaultdict[tuple[int | None, int], list[float]] = field(default_factory=lambda: defaultdict(list))
    """Scores of all trials that have reached a rung, ascending, by fold and rung."""
    own: dict[int, tuple[int, float]] = field(default_factory=dict)
    """Each trial's highest rung and its score there."""


@final
@dataclass(frozen=True, kw_only=True)
class ASHA(Stopping):
    """Asynchronous successive halving: at each rung only the best trials continue."""

    name: ClassVar[str] = "asha"
    grace: float = 1.0
    """Epochs before the first rung."""
    factor: int = 3
    """One in this many continues at each rung; rungs are this many times further apart."""
    again: bool = True
    """Whether a trial is compared at its highest rung again at every later report."""

    def __post_init__(self) -> None:
        if self.grace <= 0:
            raise ConfigError(f"stopping asha: grace must be above 0 epochs, got {self.grace}")
        if self.factor < 2:
            raise ConfigError(f"stopping asha: factor must be at least 2, got {self.factor}")

    @property
    def first_at(self) -> float:
        return self.grace

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        memory: _Memory = ledger.memory.setdefault(self.name, _Memory())
        entries = ledger[trial.number].entries
        before = entries[-2].epoch if len(entries) > 1 else 0.0
        if self.again and trial.number in memory.own:
            why = self._why_stop(trial, ledger, memory)
            if why:  # the trial does not count at further rungs
                return Verdict(action="stop", why=why)
        for rung, at in enumerate(self._rungs(evaluation.epoch)):
            if at <= before + SLACK:
                continue
            memory.own[trial.number] = rung, entries[-1].score
            bisect.insort(memory.scores[trial.fold, rung], entries[-1].score)
            why = self._why_stop(trial, ledger, memory)
            if why:
                return Verdict(action="stop", why=why)
        return GO

    def _why_stop(self, trial: Trial, ledger: Ledger, memory: _Memory) -> str:
        """The trial's place at its highest rung, if too low to continue; else empty."""
        rung, own = memory.own[trial.number]
        scores = memory.scores[trial.fold, rung]
        place = 1 + len(scores) - bisect.bisect_right(scores, own)
        if place <= max(1, len(scores) // self.factor):
            return ""
        count = len(scores) + (_coming(rung, trial, ledger, memory) if self.again else 0)
        stay = max(1, count // self.factor)
        if place <= stay:
            return ""
        return f"place {place} of {count} at epoch {self.grace * self.factor**rung:g}, where {stay} may continue"

    def _rungs(self, epoch: float) -> Iterator[float]:
        """The epochs of all rungs up to this one."""
        at = self.grace
        while at <= epoch + SLACK:
            yield at
            at *= self.factor


def _coming(rung: int, trial: Trial, ledger: Ledger, memory: _Memory) -> int:
    """How many running trials have passed the rung before and not reached this one."""
    running = [n for n, page in ledger.running.items() if page.trial.fold == trial.fold]
    return sum(memory.own[n][0] == rung - 1 if n in memory.own else rung == 0 for n in running)
