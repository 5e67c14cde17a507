"""One session of a sweep: trains all trials that earlier sessions left untrained, and sends events."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from threading import Event
from typing import Any, Literal

from podium.errors import ConfigError, PodiumError, RecordError, TrainingError
from podium.records.window import Reading, Window
from podium.sweeps.best_models import BestModelKeeper
from podium.sweeps.executors.base import Executor
from podium.sweeps.plan import Plan
from podium.sweeps.queue import TrialQueue
from podium.sweeps.session_log import SessionLog
from podium.sweeps.sweep_folder import gpu_of, outcomes_before
from podium.sweeps.trial import Trial

OnEvent = Callable[[dict[str, Any]], None]


class Session:
    def __init__(self, plan: Plan, folder: Path, on_event: OnEvent, stop: Event) -> None:
        self._plan, self._recipe, self._config = plan, plan.recipe, plan.config
        self._folder, self._on_event, self._stop, self._log = folder, on_event, stop, SessionLog(folder)
        self._groups: dict[Hashable, int] = {}
        """The number of each structure, in order of first appearance."""
        self._group_of: dict[int, int] = {}
        """The group of each trial, by the trial's number."""
        self._in_this_round: list[int] = []
        self._probes: list[dict[str, Any]] = []
        """Probe results that were recorded: equal results are recorded once."""
        self._trained, self._samples = 0, 0
        self._keeper: BestModelKeeper | None = None

    def run(self, shown: Path) -> None:
        """Train; `shown` is the folder's path as events show it."""
        with TrialQueue(
            self._plan.source,
            stopping=self._plan.stopping,
            metric=self._config["metric"],
            maximize=self._config["maximize"],
            folder=self._folder,
            keeps_models=self._config["keep"] != "none",
            done=outcomes_before(self._folder),
            on_event=self._on_queue_event,
            should_stop=self._stop.is_set,
        ) as self._queue:
            done, total = self._queue.outcomes, self._plan.source.total
            if self._config["keep"] == "best":
                self._keeper = BestModelKeeper(self._folder, self._config, done)
            self._on_event({"event": "sweep", "folder": str(shown), "total": total, "done": len(done)})
            if self._plan.why:
                self._record({"event": "chose", "group": None, "executor": "fused", "why": self._plan.why, "table": []})
            self._measure_and_train(total)

    def _measure_and_train(self, total: int | None) -> None:
        window, complete = None, False
        try:
            with gpu_of(self._recipe.torch_device) as gpu, Window(gpu) as window:
                self._log.restart_clock()
                self._train()
            complete = not self._stop.is_set() or (total is not None and len(self._queue.outcomes) >= total)
        except BaseException:
            with contextlib.suppress(RecordError):  # on a full disk, the first error is the one to raise
                self._end("stopped", window)
            raise
        self._end("finished" if complete else "stopped", window)

    def _train(self) -> None:
        queue, executor = self._queue, self._plan.executor
        # An executor that trains each trial by itself needs no groups, and would only wait between them.
        groups = type(executor).run_groups is not Executor.run_groups
        queue.waiting.sort_into(self._structure_of if groups else lambda trial: None)
        while (keys := queue.waiting.groups()) and not self._stop.is_set():
            self._check_copies(keys)
            before = len(queue.outcomes)
            self._in_this_round = [self._groups.setdefault(key, len(self._groups)) for key in keys]
            executor.run_groups(self._recipe, [queue.group_queue(key) for key in keys], self._on_executor_event)
            if len(queue.outcomes) == before and not self._stop.is_set():
                raise TrainingError(f"executor {executor.name}: returned without training a trial")

    def _structure_of(self, trial: Trial) -> Hashable:
        try:
            parts = self._recipe.make(trial)
            structure = parts.structure
        except PodiumError:
            raise
        except Exception as error:  # the user's own code may raise anything: this trial fails, the sweep does not
            raise TrainingError(f"{type(error).__name__}: {error}") from error
        self._recipe.give_back(parts)  # the executor that trains the trial does not build it again
        self._group_of[trial.number] = self._groups.setdefault(structure, len(self._groups))
        return structure

    # Rules that copy trials onto each other.

    def _check_copies(self, keys: Sequence[Hashable]) -> None:
        if self._plan.stopping.copies and len(keys) > 1:
            raise ConfigError(
                f"stopping {self._plan.stopping.name}: copies trials onto each other, so all must have one structure, "
                f"got {len(keys)}: leave options that change the model's shapes or the batch size out of the search"
            )

    def _check_population(self) -> None:
        """All trials of a population must have rows: one that waits can neither copy nor be copied."""
        if self._plan.stopping.copies and (waiting := len(self._queue.waiting)):
            raise ConfigError(
                f"stopping {self._plan.stopping.name}: all trials must train side by side, got {waiting} that wait for "
                "a row: ask for fewer trials, or for more rows (`fused:width=N`)"
            )

    def _check_probe(self, event: dict[str, Any]) -> None:
        if not event["fuses"] and self._plan.stopping.copies:
            raise ConfigError(
                f"stopping {self._plan.stopping.name}: copies rows of a fused array, but these trials cannot be fused: "
                f"{event['why']}"
            )

    # Events of the executor and of the queue.

    def _record(self, event: dict[str, Any]) -> None:
        self._log.event(event)
        self._on_event(event)

    def _on_executor_event(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind == "trial":
            self._log.trial_began(event["trial"], event.get("row"))
        if kind in ("trial", "progress"):
            self._on_event(event)
            return
        if kind == "chose" and event.get("group") is not None:
            event = {**event, "group": self._in_this_round[event["group"]]}
        if kind == "probe":
            self._check_probe(event)
            facts = {name: event.get(name) for name in ("fuses", "mode", "why", "looped")}
            if facts in self._probes:
                return
            self._probes.append(facts)
        self._record(event)

    def _on_queue_event(self, event: dict[str, Any]) -> None:
        if event["kind"] == "begin":
            self._log.trial_began(event["number"])
        elif event["kind"] == "outcome":
            self._on_outcome(event)
        else:
            self._check_population()
            self._on_event({"event": "report", **{k: v for k, v in event.items() if k != "kind"}})

    def _on_outcome(self, event: dict[str, Any]) -> None:
        trial = event["trial"]
        self._log.trial_ended(trial["number"], self._group_of.get(trial["number"], 0), event["status"])
        self._trained += event["steps"] > 0  # not a trial that could not be built, nor one that a rule skipped
        self._samples += event["samples"]
        if self._keeper is not None:
            self._keeper.add(self._queue.outcomes[-1])
        facts = {name: event[name] for name in ("status", "why", "seconds", "samples")}
        evaluation = event["evaluation"] or {"loss": None, "metrics": {}}
        value = evaluation["metrics"].get(self._config["metric"], evaluation["loss"])
        counts = {"done": len(self._queue.outcomes), "total": self._plan.source.total}
        self._on_event({"event": "outcome", "trial": trial, "value": value, **facts, **counts})

    def _end(self, status: Literal["finished", "stopped"], window: Window | None) -> None:
        reading: Reading | None = None
        if window is not None:
            with contextlib.suppress(ConfigError):  # the window never ended: a failed device cannot be waited for
                reading = window.reading
        if self._keeper is not None and status == "finished":
            self._keeper.end()
        facts = {
            "status": status, "executor": self._config["executor"], "device": str(self._recipe.torch_device),
            "trained": self._trained, "samples": self._samples,
        }  # fmt: skip
        self._log.session_ended(facts, reading)
