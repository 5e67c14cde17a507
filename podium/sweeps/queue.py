"""The sweep's queue: gives out trials, takes reports and outcomes, and records them.

A sweep's folder:

    trials.jsonl     every trial that the source gave, one per line, in the order of their numbers
    reports.jsonl    every evaluation, with the verdict on it
    results.jsonl    every trial that is over, in the order they ended
    models/          their parameters and buffers (safetensors)

A line survives a crash of this process once the call that wrote it returns (and of the machine, a little later); a
model is written before the line that names it. A killed sweep is resumed in the same folder with the same source:
trials with a result are not trained again, but replayed to source and stopping rule as if they had just ended. All
other trials start again, and so do failed ones, since the cause may be gone. Of two results of a trial the later one
counts. A half-written last line is cut off.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from podium.engine.files import save_tensors
from podium.errors import ConfigError, PodiumError, RecordError
from podium.records.journal import Journal, read_journal
from podium.records.recorder import to_json
from podium.sweeps.executors.base import Queue, QueueWrapper, State
from podium.sweeps.search.base import Source
from podium.sweeps.stopping.base import Ledger, NoStopping, Stopping
from podium.sweeps.trial import GO, Evaluation, Outcome, Trial, Verdict
from podium.sweeps.waiting import NO_KEY, WaitingTrials

Event = dict[str, Any]


@final
class TrialQueue:
    """Implements `Queue` for the whole sweep; `group_queue` does so for trials of one structure."""

    def __init__(
        self,
        source: Source,
        *,
        stopping: Stopping | None = None,
        metric: str = "loss",
        maximize: bool = False,
        folder: str | Path | None = None,
        keeps_models: bool = True,
        done: Sequence[Outcome] | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`done` are outcomes of the same sweep, begun earlier; by default those that the folder holds."""
        self.source, self.stopping = source, stopping or NoStopping()
        self.ledger = Ledger(maximize=maximize, metric=metric)
        self.folder, self._keeps_models = None if folder is None else Path(folder), keeps_models
        self.outcomes: list[Outcome] = []
        """Of all trials that are over, in the order they ended."""
        self._on_event, self._should_stop = on_event, should_stop
        self.waiting = WaitingTrials(self._ask, self._fail, should_stop)
        self._take_up(read_outcomes(self.folder) if done is None and self.folder is not None else done or ())
        self._trials, self._reports, self._results = (
            None if self.folder is None else Journal(self.folder / name)
            for name in ("trials.jsonl", "reports.jsonl", "results.jsonl")
        )

    # What executors call.

    def take(self) -> Trial | None:
        """The next trial of any group; None when there is none now."""
        while (key := self.waiting.first_group()) is not NO_KEY:
            trial = self.take_from(key)
            if trial is not None:
                return trial
        return None

    def expects_more(self) -> bool:
        """Whether any group may ever have another trial."""
        return not self.source.exhausted or len(self.waiting) > 0

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        """Record an evaluation, and return the verdict on its trial."""
        self._record(trial, evaluation)
        return self._judge(trial, evaluation)

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        """Report trials that were evaluated together: all are recorded before the first is judged."""
        found: list[Verdict | ConfigError] = []
        for trial, evaluation in rows:
            try:
                self._record(trial, evaluation)
                found.append(GO)
            except ConfigError as error:
                found.append(error)
        for place, (trial, evaluation) in enumerate(rows):
            if not isinstance(found[place], ConfigError):
                found[place] = self._judge(trial, evaluation)
        return found

    def _record(self, trial: Trial, evaluation: Evaluation) -> None:
        self.ledger.record(trial, evaluation)
        self.stopping.hear(trial, evaluation, self.ledger)

    def _judge(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        verdict = self.stopping.judge(trial, evaluation, self.ledger)
        row = {"trial": trial.number, **evaluation._asdict(), "verdict": verdict.action, "why": verdict.why}
        if verdict.action == "become":
            row |= {"source": verdict.source, "options": dict(verdict.options)}
        if self._reports is not None:
            self._reports.write(row)
        self._on_event({"kind": "report", **row})
        return verdict

    def begin_again(self, trial: Trial) -> None:
        """Forget the reports of this trial: it is trained again, from its beginning."""
        page = self.ledger.begin(trial)
        page.entries.clear()
        page.evaluations.clear()
        if self._reports is not None:
            self._reports.write({"trial": trial.number, "begins": "again"})
        self._on_event({"kind": "again", "trial": trial.number})

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        """A trial is over: save its model, write its result, tell the source."""
        page = self.ledger.begin(outcome.trial)
        assert page.running, f"trial {outcome.trial.number} was handed in before"
        history = tuple(outcome.history) or tuple(page.evaluations)
        last = outcome.evaluation or (history[-1] if history else None)
        outcome = dataclasses.replace(outcome, history=history, evaluation=last, model="")
        outcome = self._keep_model(outcome, state)
        if self._results is not None:
            self._results.write(outcome.to_dict())
        self._settle(outcome)
        self.source.tell(outcome, self.score_of(outcome))
        self._on_event({"kind": "outcome", **outcome.to_dict()})

    def stop_requested(self) -> bool:
        """Whether the user wants the sweep to end now."""
        return self._should_stop()

    # What the session calls.

    def group_queue(self, key: Hashable) -> Queue:
        """A queue that gives out trials of this group only."""
        return _GroupQueue(self, key)

    def score_of(self, outcome: Outcome) -> float | None:
        """The sweep's metric as measured; None for a trial that failed or diverged."""
        if outcome.evaluation is None or outcome.status in ("failed", "diverged"):
            return None
        return self.ledger.value_of(outcome.evaluation)

    def close(self) -> None:
        """Close the files; nothing can be handed in afterwards."""
        for lines in (self._trials, self._reports, self._results):
            if lines is not None:
                lines.close()

    def __enter__(self) -> TrialQueue:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # Internals.

    def take_from(self, key: Hashable) -> Trial | None:
        """The next trial of a group that the stopping rule does not skip."""
        while (trial := self.waiting.pop(key)) is not None:
            why = self.stopping.skip(trial, self.ledger)
            if not why:
                self.ledger.begin(trial)
                self._on_event({"kind": "begin", **trial.to_dict()})
                return trial
            self.hand_in(Outcome(trial=trial, status="stopped", why=why), None)
        return None

    def _fail(self, trial: Trial, error: PodiumError) -> None:
        self.hand_in(Outcome(trial=trial, status="failed", why=f"{type(error).__name__}: {error}"), None)

    def _ask(self) -> Trial | None:
        """The source's next trial without an outcome; outcomes of earlier sessions go back to the source."""
        while (trial := self.source.ask()) is not None:
            before = self._asked.get(trial.number)
            if before is None:
                self._asked[trial.number] = _plain(trial)
                if self._trials is not None:
                    self._trials.write(trial.to_dict())
            elif before != _plain(trial):
                raise ConfigError(
                    f"sweep: {self.folder or 'what is done'} holds another sweep: trial {trial.number} must be as "
                    f"before, {before}, got {_plain(trial)}; take another folder"
                )
            if trial.number not in self._done:
                return trial
            outcome = self._done.pop(trial.number)
            self.source.tell(outcome, self.score_of(outcome))
        return None

    def _take_up(self, done: Sequence[Outcome]) -> None:
        """Read the outcomes of earlier sessions, and replay them to source and stopping rule."""
        asked = [] if self.folder is None else read_journal(self.folder / "trials.jsonl")
        self._asked = {row["number"]: row for row in asked} | {o.trial.number: _plain(o.trial) for o in done}
        self._done = {outcome.trial.number: outcome for outcome in done if outcome.status != "failed"}
        points = {row["point"]: row["options"] for row in self._asked.values()}
        self.source.recall([points[point] for point in sorted(points)])
        for outcome in self._done.values():
            for evaluation in outcome.history:
                self._record(outcome.trial, evaluation)
                self.stopping.judge(outcome.trial, evaluation, self.ledger)
            self._settle(outcome)

    def _settle(self, outcome: Outcome) -> None:
        self.ledger.close(outcome.trial, outcome.status)
        self.outcomes.append(outcome)

    def _keep_model(self, outcome: Outcome, state: State | None) -> Outcome:
        """Save the model if models are kept; the outcome with the model's path."""
        if self.folder is None or state is None or not self._keeps_models:
            return outcome
        kept = dataclasses.replace(outcome, model=f"models/trial-{outcome.trial.number:05d}.safetensors")
        save_tensors(self.folder / kept.model, state)
        return kept


@final
class _GroupQueue(QueueWrapper):
    """A queue for one group."""

    def __init__(self, queue: TrialQueue, key: Hashable) -> None:
        super().__init__(queue)
        self._whole, self._key = queue, key

    def take(self) -> Trial | None:
        return self._whole.take_from(self._key)

    def expects_more(self) -> bool:
        return not self._whole.source.exhausted or bool(self._whole.waiting.of(self._key))


def read_outcomes(folder: str | Path) -> list[Outcome]:
    """The outcomes in a sweep's folder, in the order in which trials ended; a torn last line is left out.

    `model` is empty where the file is gone: where only the best model is kept, for all trials but one.
    """
    outcomes: dict[int, Outcome] = {}
    for number, row in enumerate(read_journal(Path(folder) / "results.jsonl"), 1):
        try:
            outcome = _outcome(row)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{folder}/results.jsonl:{number}: not a result: {error!r}") from error
        if outcome.model and not (Path(folder) / outcome.model).is_file():
            outcome = dataclasses.replace(outcome, model="")
        outcomes.pop(outcome.trial.number, None)  # it failed in an earlier session, and was trained again
        outcomes[outcome.trial.number] = outcome
    return list(outcomes.values())


def _outcome(row: Mapping[str, Any]) -> Outcome:
    values = {f.name: row[f.name] for f in dataclasses.fields(Outcome)}
    values["trial"] = Trial(**row["trial"])
    values["evaluation"] = None if row["evaluation"] is None else _evaluation(row["evaluation"])
    values["history"] = tuple(map(_evaluation, row["history"]))
    return Outcome(**values)


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    # inf and nan were written as text, since JSON has neither.
    metrics = {name: float(value) for name, value in row["metrics"].items()}
    return Evaluation(int(row["step"]), float(row["epoch"]), float(row["loss"]), metrics)


def _plain(trial: Trial) -> dict[str, Any]:
    """A trial as it is read back from JSON."""
    values: dict[str, Any] = json.loads(to_json(trial.to_dict()))
    return values
