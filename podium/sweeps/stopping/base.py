"""When a trial is stopped early: one small interface, and the ledger that rules read.

A rule is a frozen dataclass of settings and reads nothing but the ledger, which has the reports of all trials so far.
Scores in the ledger are signed so that larger is better; inf and nan become `-inf`, the worst score, so comparisons
need no special cases.

Trials are compared at the same epoch, not at the same step (batch sizes may differ) and not at the same time (a trial
may begin when others end), and with trials of the same fold only. A sweep of thousands of small models reports
thousands of times per second, so rules keep sorted scores in the ledger's memory, rather than read the whole ledger.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, final

from podium.errors import ConfigError, UnknownName
from podium.sweeps.trial import GO, Evaluation, Status, Trial, Verdict

WORST = -math.inf
SLACK = 1e-9  # an epoch is steps divided by steps per epoch, and may be a rounding error short


class Entry(NamedTuple):
    """One report; a larger score is better."""

    step: int
    epoch: float
    score: float


@dataclass
class Page:
    """One trial's part of the ledger."""

    trial: Trial
    entries: list[Entry] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    status: Status | None = None
    """None while the trial runs."""

    @property
    def epoch(self) -> float:
        """The epoch of the last report."""
        return self.entries[-1].epoch if self.entries else 0.0

    @property
    def running(self) -> bool:
        return self.status is None

    def reached(self, epoch: float) -> bool:
        return bool(self.entries) and self.epoch >= epoch - SLACK

    def score_at(self, epoch: float) -> float | None:
        """The score of the first report at this epoch or later; None if there is none yet."""
        return next((entry.score for entry in self.entries if entry.epoch >= epoch - SLACK), None)


class Ledger:
    """The reports of all trials so far."""

    def __init__(self, *, maximize: bool, metric: str = "loss") -> None:
        self.maximize, self.metric = maximize, metric
        self.pages: dict[int, Page] = {}
        """By trial number, in the order in which trials began."""
        self.running: dict[int, Page] = {}
        """Pages of trials that are not over."""
        self.points: dict[int, list[Page]] = {}
        """The pages of each point's trials."""
        self.memory: dict[str, Any] = {}
        """State of the rules, by the name of the rule."""

    def __getitem__(self, number: int) -> Page:
        return self.pages[number]

    def __iter__(self) -> Iterator[Page]:
        return iter(self.pages.values())

    def begin(self, trial: Trial) -> Page:
        """A trial's page, new if the trial has none."""
        if trial.number not in self.pages:
            self.pages[trial.number] = self.running[trial.number] = page = Page(trial)
            self.points.setdefault(trial.point, []).append(page)
        return self.pages[trial.number]

    def record(self, trial: Trial, evaluation: Evaluation) -> float:
        """Add a report and return its score."""
        score = self.score_of(evaluation)
        page = self.begin(trial)
        page.entries.append(Entry(evaluation.step, evaluation.epoch, score))
        page.evaluations.append(evaluation)
        return score

    def close(self, trial: Trial, status: Status) -> None:
        self.begin(trial).status = status
        self.running.pop(trial.number, None)

    def value_of(self, evaluation: Evaluation) -> float:
        """The sweep's metric as it was measured."""
        if self.metric != "loss" and self.metric not in evaluation.metrics:
            raise UnknownName("metric", self.metric, ["loss", *evaluation.metrics])
        return evaluation.value_of(self.metric)

    def score_of(self, evaluation: Evaluation) -> float:
        """Larger is better; `-inf` where the metric is inf or nan."""
        value = self.value_of(evaluation)
        if not math.isfinite(value):
            return WORST
        return value if self.maximize else -value


class Stopping(ABC):
    """When a trial is stopped early. Subclasses are frozen, keyword-only dataclasses."""

    name: ClassVar[str]
    copies: ClassVar[bool] = False
    """Whether the rule returns `become` verdicts, which not every executor can follow."""

    def hear(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> None:
        """Called with each report, after it was added to the ledger.

        Trials that train side by side report together: all their reports are recorded before the first is judged, so
        that a rule which compares trials at the same epoch does not depend on their order.
        """

    @abstractmethod
    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        """The verdict on a trial that has just reported; the report is in the ledger already.

        Called once for each report. When a sweep is resumed, the reports of earlier sessions come first, trial by
        trial, and the verdicts on them are ignored.
        """

    @property
    def first_at(self) -> float:
        """No trial is stopped or changed before this many epochs."""
        return 0.0

    def check(self, *, epochs: int | None, eval_every: int, per_point: int) -> None:
        """Raise if the rule could never act in this sweep.

        `epochs` of a trial, None where they differ; `eval_every`: epochs between evaluations (0: only at the end,
        which is too late); `per_point`: trials of each point, over folds and seeds.
        """
        if type(self).skip is not Stopping.skip:  # the rule acts between trials, too
            return
        if eval_every == 0:
            raise ConfigError(f"stopping {self.name}: judges at evaluations, so eval_every must be at least 1, got 0")
        # A verdict on the last evaluation comes too late.
        last = None if epochs is None else (epochs - 1) // eval_every * eval_every
        if last is not None and last < self.first_at:
            raise ConfigError(
                f"stopping {self.name}: begins at epoch {self.first_at:g}, so trials must be evaluated then or later "
                f"and before their end, got {epochs} epochs and eval_every {eval_every}"
            )

    def skip(self, trial: Trial, ledger: Ledger) -> str:
        """Why this trial need not be trained; empty when it must. Called before the trial begins."""
        return ""


@final
@dataclass(frozen=True, kw_only=True)
class NoStopping(Stopping):
    """Every trial runs to its end."""

    name: ClassVar[str] = "none"

    def check(self, *, epochs: int | None, eval_every: int, per_point: int) -> None:
        """No sweep is refused."""

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        return GO
