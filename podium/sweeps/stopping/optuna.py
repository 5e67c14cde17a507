"""Any of Optuna's pruners, over the ledger.

The ledger's memory has a study per fold, with one Optuna trial per trial of the sweep; each report is an intermediate
value, on which the pruner decides. Optuna's steps are a trial's reports, counted from 1: with one evaluation per epoch
they are epochs. Most pruners compare with finished trials, and do nothing before there are some: of trials that all
train side by side they stop none. Successive halving does, from the first report on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, final

from podium.errors import ConfigError
from podium.sweeps.search.optuna import import_optuna, make_part
from podium.sweeps.stopping.base import Entry, Ledger, Page, Stopping
from podium.sweeps.trial import GO, Evaluation, Trial, Verdict


@final
@dataclass(frozen=True, kw_only=True)
class OptunaPruner(Stopping):
    """One of Optuna's pruners, by name or as an instance."""

    name: ClassVar[str] = "optuna"
    pruner: Any = "median"
    """`median`, `hyperband`, `successivehalving` … (a class of `optuna.pruners`), or an instance."""

    def __post_init__(self) -> None:
        pruner = self._make()
        if type(pruner).__name__ == "WilcoxonPruner":
            raise ConfigError(
                "stopping optuna: its Wilcoxon pruner must see folds as steps of one trial; use `wilcoxon`"
            )

    def judge(self, trial: Trial, evaluation: Evaluation, ledger: Ledger) -> Verdict:
        studies: dict[int | None, _Study] = ledger.memory.setdefault(self.name, {})
        study = studies.get(trial.fold)
        if study is None:
            study = studies[trial.fold] = _Study(self._make())
        if study.should_stop(ledger, trial):
            return Verdict(action="stop", why=f"{type(study.pruner).__name__} at report {study.reports(trial)}")
        return GO

    def _make(self) -> Any:
        return make_part(
            self.pruner, import_optuna("stopping by Optuna's pruners").pruners, "Pruner", {"min_resource": 1}
        )


class _Study:
    """An Optuna study that follows the ledger."""

    def __init__(self, pruner: Any) -> None:
        optuna = import_optuna("stopping by Optuna's pruners")
        self.pruner = pruner
        self._states = optuna.trial.TrialState
        self._study = optuna.create_study(pruner=pruner, direction="maximize")
        self._trials: dict[int, Any] = {}
        self._shown: dict[int, int] = {}  # how many reports of each trial Optuna has
        self._closed: set[int] = set()

    def reports(self, trial: Trial) -> int:
        return self._shown[trial.number]

    def should_stop(self, ledger: Ledger, trial: Trial) -> bool:
        for page in ledger:
            if page.trial.fold == trial.fold:
                self._follow(page)
        return bool(self._trials[trial.number].should_prune())

    def _follow(self, page: Page) -> None:
        number = page.trial.number
        if number in self._closed:
            return
        if number not in self._trials:
            self._trials[number], self._shown[number] = self._study.ask(), 0
        for entry in page.entries[self._shown[number] :]:
            self._shown[number] += 1
            # numpy's percentiles warn of nan, and fail on infinities.
            self._trials[number].report(max(entry.score, -1e300), step=self._shown[number])
        if not page.running:
            self._close(page, number)

    def _close(self, page: Page, number: int) -> None:
        self._closed.add(number)
        last: Entry | None = page.entries[-1] if page.entries else None
        if page.status == "finished" and last is not None and math.isfinite(last.score):
            self._study.tell(self._trials[number], last.score)
        else:
            state = self._states.PRUNED if page.status == "stopped" else self._states.FAIL
            self._study.tell(self._trials[number], state=state)
