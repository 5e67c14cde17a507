"""The sweep's queue: gives out trials, hears reports, writes down what each trial came to.

A sweep's folder:

    trials.jsonl     every trial that was asked for, one per line, in the order of their numbers
    reports.jsonl    every evaluation, with what was decided on it
    results.jsonl    every trial that is over, in the order they ended
    models/          their parameters and buffers (safetensors)

A line outlives this process once the call that wrote it returns (and the machine, a little later); a model is written
before the line that names it. A sweep that was killed is taken up again in the same folder with the same source: trials
with a result are not trained again, their source and the stopping rule hear of them as if they had just ended; all
others begin anew, and so do those that failed: what went wrong may be past. Of two results of a trial the later one
counts. A half-written last line is cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, final

from podium.engine.files import save_tensors
from podium.errors import ConfigError, PodiumError, RecordError, UnknownName
from podium.records.recorder import read_records, to_json
from podium.sweeps.executors.base import Queue, QueueWrapper, State
from podium.sweeps.search.base import Source
from podium.sweeps.stopping.base import Ledger, NoStopping, Stopping
from podium.sweeps.trial import GO, Evaluation, Outcome, Trial, Verdict

Keep = Literal["all", "best", "none"]
KeyOf = Callable[[Trial], Hashable]

MOST_WAITING = 4096
"""Trials that are asked for before any of them is trained."""
LONGEST_FETCH_S = 10.0
"""Or as many as are made in this time."""
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
        keep_models: Keep = "all",
        done: Sequence[Outcome] | None = None,
        on_event: Callable[[Event], None] = lambda event: None,
        should_stop: Callable[[], bool] = lambda: False,
    ) -> None:
        """`done` are outcomes of the same sweep, begun earlier; by default those that the folder holds."""
        if keep_models not in ("all", "best", "none"):
            raise UnknownName("way to keep models", keep_models, ("all", "best", "none"))
        self.source, self.stopping = source, stopping or NoStopping()
        self.ledger = Ledger(maximize=maximize, metric=metric)
        self.folder, self.keep_models = None if folder is None else Path(folder), keep_models
        self.outcomes: list[Outcome] = []
        """Of all trials that are over, earlier ones first."""
        self._on_event, self._should_stop = on_event, should_stop
        self._key_of: KeyOf = lambda trial: None
        self._queues: dict[Hashable, deque[Trial]] = {}
        self._best: Outcome | None = None
        self._take_up(read_outcomes(self.folder) if done is None and self.folder is not None else done or ())
        self._trials, self._reports, self._results = (
            None if self.folder is None else _Lines(self.folder / name)
            for name in ("trials.jsonl", "reports.jsonl", "results.jsonl")
        )

    # What executors call.

    def take(self) -> Trial | None:
        """The next trial of any group; None when there is none now."""
        while (key := self._first_group()) is not _NO_KEY:
            trial = self._take(key)
            if trial is not None:
                return trial
        return None

    def expects_more(self) -> bool:
        """Whether any group may ever have another trial."""
        return not self.source.exhausted or any(self._queues.values())

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        """Tell how a trial does, and hear what is to happen to it."""
        self._record(trial, evaluation)
        return self._judge(trial, evaluation)

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        """The same for trials that came to this point together: none is judged before all have been heard."""
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
        """What was reported of this trial does not count: it is trained again, from its beginning."""
        page = self.ledger.begin(trial)
        page.entries.clear()
        page.evaluations.clear()
        if self._reports is not None:
            self._reports.write({"trial": trial.number, "begins": "again"})
        self._on_event({"kind": "again", "trial": trial.number})

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        """A trial is over: keep its model, write its result, tell the source."""
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

    # What the sweep calls.

    def sort_into(self, key_of: KeyOf) -> None:
        """From now on trials are sorted by this key; those that are ready now are asked for, as far as they may wait.

        A trial whose key cannot be had (`key_of` raises a PodiumError) is handed in as failed.
        """
        waiting = [trial for queue in self._queues.values() for trial in queue]
        self._key_of, self._queues = key_of, {}
        for trial in sorted(waiting, key=lambda trial: trial.number):
            self._sort(trial)
        self._fetch()

    def groups(self) -> list[Hashable]:
        """Keys that have trials waiting, in the order in which they first came; asks for more."""
        self._fetch()
        return [key for key, queue in self._queues.items() if queue]

    def waiting(self, key: Hashable) -> Sequence[Trial]:
        """A group's trials that have been asked for and not been taken."""
        return tuple(self._queues.get(key, ()))

    def count_waiting(self) -> int:
        """Trials of all groups that have been asked for and not been taken."""
        return sum(map(len, self._queues.values()))

    def group_queue(self, key: Hashable) -> Queue:
        """A queue that gives out trials of this group only."""
        return _GroupQueue(self, key)

    @property
    def best(self) -> Outcome | None:
        """The best of those that finished; the earlier of two equal ones."""
        return self._best

    def score_of(self, outcome: Outcome) -> float | None:
        """The sweep's metric as measured; None for a trial that came to nothing."""
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

    # How it is done.

    def _first_group(self) -> Hashable:
        """A group with trials; `_NO_KEY` when there are none now."""
        if not any(self._queues.values()):
            self._fetch(until=lambda key: True)
        return next((key for key, queue in self._queues.items() if queue), _NO_KEY)

    def _take(self, key: Hashable) -> Trial | None:
        """The next trial of a group that may begin."""
        while True:
            if not self._queues.get(key):
                self._fetch(until=lambda found: found == key)
            queue = self._queues.get(key)
            if not queue:
                return None
            trial = queue.popleft()
            why = self.stopping.skip(trial, self.ledger)
            if not why:
                self.ledger.begin(trial)
                self._on_event({"kind": "begin", **trial.to_dict()})
                return trial
            self.hand_in(Outcome(trial=trial, status="stopped", why=why), None)

    def _fetch(self, until: Callable[[Hashable], bool] = lambda key: False) -> None:
        """Ask for trials and sort them, until one has such a key or there are no more; or until enough wait.

        To sort a trial is to make its model, and a source need not end: those that wait train first.
        """
        waiting, began = self.count_waiting(), time.monotonic()
        while not self._should_stop() and (trial := self._ask()) is not None:
            key = self._sort(trial)
            if key is _NO_KEY:  # handed in as failed
                continue
            waiting += 1
            if until(key) or waiting >= MOST_WAITING or time.monotonic() - began > LONGEST_FETCH_S:
                return

    def _sort(self, trial: Trial) -> Hashable:
        try:
            key = self._key_of(trial)
        except PodiumError as error:
            self.hand_in(Outcome(trial=trial, status="failed", why=f"{type(error).__name__}: {error}"), None)
            return _NO_KEY
        self._queues.setdefault(key, deque()).append(trial)
        return key

    def _ask(self) -> Trial | None:
        """The next trial that must be trained; the source hears at once of those that need not."""
        while (trial := self.source.ask()) is not None:
            before = self._asked.get(trial.number)
            if before is None:
                self._asked[trial.number] = _plain(trial)
                if self._trials is not None:
                    self._trials.write(trial.to_dict())
            elif before != _plain(trial):
                raise ConfigError(
                    f"sweep: {self.folder or 'what is done'} holds another one: trial {trial.number} must be as "
                    f"before, {before}, got {_plain(trial)}; take another folder"
                )
            if trial.number not in self._done:
                return trial
            outcome = self._done.pop(trial.number)
            self.source.tell(outcome, self.score_of(outcome))
        return None

    def _take_up(self, done: Sequence[Outcome]) -> None:
        """Learn what an earlier sweep has done."""
        asked = [] if self.folder is None else _read(self.folder / "trials.jsonl")
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
        """Put an outcome with the others."""
        self.ledger.close(outcome.trial, outcome.status)
        self.outcomes.append(outcome)
        if self._is_best(outcome):
            before, self._best = self._best, outcome
            outcome = before or outcome
        if self.keep_models == "best" and self.folder is not None and outcome is not self._best and outcome.model:
            (self.folder / outcome.model).unlink(missing_ok=True)
            self.outcomes = [dataclasses.replace(o, model="") if o is outcome else o for o in self.outcomes]

    def _keep_model(self, outcome: Outcome, state: State | None) -> Outcome:
        """The outcome with where its model is, if it is kept."""
        if self.folder is None or state is None or self.keep_models == "none":
            return outcome
        if self.keep_models == "best" and not self._is_best(outcome):
            return outcome
        kept = dataclasses.replace(outcome, model=f"models/trial-{outcome.trial.number:05d}.safetensors")
        save_tensors(self.folder / kept.model, state)
        return kept

    def _is_best(self, outcome: Outcome) -> bool:
        """Whether it finished, and better than all before."""
        if outcome.status != "finished" or outcome.evaluation is None:
            return False
        best = self._best.evaluation if self._best is not None else None
        return best is None or self.ledger.score_of(outcome.evaluation) > self.ledger.score_of(best)


_NO_KEY = object()  # None may be a group's key


@final
class _GroupQueue(QueueWrapper):
    """A queue for one group."""

    def __init__(self, queue: TrialQueue, key: Hashable) -> None:
        super().__init__(queue)
        self._whole, self._key = queue, key

    def take(self) -> Trial | None:
        return self._whole._take(self._key)

    def expects_more(self) -> bool:
        return not self._whole.source.exhausted or bool(self._whole.waiting(self._key))


def read_outcomes(folder: str | Path) -> list[Outcome]:
    """What a sweep's folder says of trials that are over, in the order they ended; a torn last line is left out.

    `model` is empty where the file is gone, as it is of all but the best where only the best is kept.
    """
    outcomes: dict[int, Outcome] = {}
    for number, row in enumerate(_read(Path(folder) / "results.jsonl"), 1):
        try:
            outcome = _outcome(row)
        except (KeyError, TypeError, ValueError) as error:
            raise RecordError(f"{folder}/results.jsonl:{number}: not a result: {error!r}") from error
        if outcome.model and not (Path(folder) / outcome.model).is_file():
            outcome = dataclasses.replace(outcome, model="")
        outcomes.pop(outcome.trial.number, None)  # it failed in an earlier session, and was trained again
        outcomes[outcome.trial.number] = outcome
    return list(outcomes.values())


def _read(path: Path) -> list[dict[str, Any]]:
    return list(read_records(path)) if path.is_file() else []


def _outcome(row: Mapping[str, Any]) -> Outcome:
    values = {f.name: row[f.name] for f in dataclasses.fields(Outcome)}
    values["trial"] = Trial(**row["trial"])
    values["evaluation"] = None if row["evaluation"] is None else _evaluation(row["evaluation"])
    values["history"] = tuple(map(_evaluation, row["history"]))
    return Outcome(**values)


def _evaluation(row: Mapping[str, Any]) -> Evaluation:
    # What is no finite number was written as text, since JSON has none.
    metrics = {name: float(value) for name, value in row["metrics"].items()}
    return Evaluation(int(row["step"]), float(row["epoch"]), float(row["loss"]), metrics)


def _plain(trial: Trial) -> dict[str, Any]:
    """A trial as it reads from its line."""
    values: dict[str, Any] = json.loads(to_json(trial.to_dict()))
    return values


class _Lines:
    """A file of JSON lines that are only ever added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab")
            self._mend_last_line()
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {error}") from error

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(to_json(dict(row)).encode() + b"\n")
            self._file.flush()
        except OSError as error:
            raise RecordError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        # Every line was flushed when it was written, or that raised: the disk is full, and still is.
        with contextlib.suppress(OSError):
            self._file.close()

    def _mend_last_line(self) -> None:
        """Cut off a line that is torn, and end one that lacks its end only."""
        data = self.path.read_bytes()
        whole = data.rfind(b"\n") + 1
        if whole == len(data):
            return
        try:
            json.loads(data[whole:])
        except ValueError:
            self._file.truncate(whole)
        else:
            self._file.write(b"\n")
            self._file.flush()
