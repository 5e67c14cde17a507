"""A pool of processes that train trials, and replaces those that are lost.

When a process dies, only its trial fails: the pool hands it in as failed with the cause, and starts another process. A
process without progress for `deadline_s` counts as dead. A process is started only when there is a trial for it.

How processes are started and messages sent is the transport's part: `processes.py` and `ray.py`.
"""

from __future__ import annotations

import json
import os
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from podium.engine.files import load_tree
from podium.errors import ConfigError, TrainingError
from podium.sweeps.executors.base import OnEvent, Queue, State
from podium.sweeps.executors.trial_process import (
    Mode,
    ProcessSetup,
    ProgressPage,
    TrialEnd,
    log_path,
    page_path,
    save_folds,
    to_json,
)
from podium.sweeps.recipe import Recipe
from podium.sweeps.trial import Evaluation, Outcome, Trial

_TURN_S = 0.05
"""How long it may take to notice that the user wants to stop."""
_TELL_S = 0.25
"""How often `on_event` gets the progress of the processes."""
_LAST_WORDS = 300


@dataclass(frozen=True, kw_only=True)
class ProcessPool:
    """How many processes there are, and how they train."""

    executor: str
    count: int
    mode: Mode = "eager"
    threads: int = 1
    deadline_s: float = 300.0
    """Without progress for this long, a process counts as dead."""
    start_deadline_s: float = 120.0
    """The same, until the process has started."""
    most_losses: int = 8
    """After more losses in a row than this, with no trial trained between, the sweep fails."""


class ProcessMessage(NamedTuple):
    """An answer from a process, or how the process was lost."""

    number: int
    answer: str | None
    loss: str = ""


class ProcessTransport(ABC):
    """Starts processes and exchanges messages with them. Leaving the `with` ends all of them, also after an error."""

    @abstractmethod
    def start(self, setup: ProcessSetup) -> int | None:
        """Start a process without waiting until it is ready; returns its process id where that is known."""

    @abstractmethod
    def send(self, number: int, text: str) -> None:
        """Send a message; `hear` reports a process that is gone as lost."""

    @abstractmethod
    def hear(self, timeout_s: float) -> list[ProcessMessage]:
        """Messages that have arrived; waits up to `timeout_s` for the first."""

    @abstractmethod
    def end(self, number: int) -> None:
        """End a process that is no longer needed; `hear` does not report it."""

    def __enter__(self) -> ProcessTransport:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


@dataclass
class _Process:
    """The pool's view of one process."""

    number: int
    page: ProgressPage
    trial: Trial | None = None
    history: list[Evaluation] = field(default_factory=list)
    ticks: int = 0
    moved_at: float = field(default_factory=time.monotonic)


def run_pool(
    pool: ProcessPool, transport: ProcessTransport, recipe: Recipe, spool: Path, queue: Queue, on_event: OnEvent
) -> None:
    """Train the queue's trials until it has no more, or wants to stop. The caller closes the transport."""
    plain = {**recipe.to_dict(), "device": recipe.torch_device.type}
    save_folds(spool, recipe.folds)
    _Dispatcher(pool, transport, plain, spool, queue, on_event).run()


class _Dispatcher:
    def __init__(
        self,
        pool: ProcessPool,
        transport: ProcessTransport,
        recipe: Mapping[str, Any],
        spool: Path,
        queue: Queue,
        on_event: OnEvent,
    ) -> None:
        self.pool, self.transport, self.recipe, self.spool = pool, transport, recipe, spool
        self.queue, self.on_event = queue, on_event
        self.processes: dict[int, _Process] = {}
        self.started = 0
        self.any_began = False
        self.has_none = False
        """Whether the last `take` returned None, and nothing was handed in since."""
        self.losses_in_a_row = 0
        self.reported_at = time.monotonic()
        self.looked_at = time.monotonic()

    def run(self) -> None:
        try:
            while not self.queue.stop_requested():
                self._give_out()
                if not any(process.trial for process in self.processes.values()):
                    return
                for number, answer, loss in self.transport.hear(_TURN_S):
                    if answer is None:
                        self._lost(self.processes[number], loss)
                    else:
                        self._answered(self.processes[number], json.loads(answer))
                self._look_for_silent()
                self._tell_progress()
        finally:
            for process in self.processes.values():
                process.page.ask_to_stop()

    def _tell_progress(self) -> None:
        """Every `_TELL_S`, send an event with the steps done in each process."""
        now = time.monotonic()
        if now - self.reported_at >= _TELL_S:
            self.reported_at = now
            steps = [process.page.steps for process in self.processes.values() if process.trial is not None]
            self.on_event({"event": "progress", "steps": steps})

    def _give_out(self) -> None:
        """Give a trial to each idle process, and start processes while there are trials."""
        idle = [process for process in self.processes.values() if process.trial is None]
        while not self.has_none and (idle or len(self.processes) < self.pool.count):
            trial = self.queue.take()
            if trial is None:
                self.has_none = True
                return
            process = idle.pop() if idle else self._start()
            process.trial, process.history, process.moved_at = trial, [], time.monotonic()
            self.on_event({"event": "trial", "trial": trial.number, "state": "begins", "row": process.number})
            self.transport.send(process.number, to_json({"trial": vars(trial)}))

    def _start(self) -> _Process:
        number, pool = self.started, self.pool
        self.started += 1
        setup = ProcessSetup(
            number=number,
            recipe=self.recipe,
            spool=str(self.spool),
            mode=pool.mode,
            threads=pool.threads,
            deadline_s=pool.deadline_s,
            cwd=os.getcwd(),
            path=tuple(sys.path),
        )
        process = self.processes[number] = _Process(number, ProgressPage(page_path(self.spool, number)))
        pid = self.transport.start(setup)
        self.on_event({"event": "process started", "process": number, "pid": pid})
        return process

    def _answered(self, process: _Process, message: dict[str, Any]) -> None:
        assert process.trial is not None, "only a process with a trial answers"
        process.moved_at = time.monotonic()
        if "over" in message:
            self._over(process, process.trial, TrialEnd(**message["over"]))
            return
        evaluation = Evaluation(**message["evaluation"])
        process.history.append(evaluation)
        verdict = self.queue.report(process.trial, evaluation)
        if verdict.action == "become":
            raise ConfigError(
                f"executor {self.pool.executor}: population based training copies rows between trials: "
                "executor must be fused"
            )
        self.transport.send(process.number, to_json({"verdict": vars(verdict)}))

    def _over(self, process: _Process, trial: Trial, over: TrialEnd) -> None:
        if over.evaluation is not None:
            process.history.append(Evaluation(**over.evaluation))
        if over.status == "failed":
            self.on_event({"event": "trial failed", "trial": trial.number, "traceback": over.traceback})
        self.losses_in_a_row = 0
        if over.status != "cut":
            state = self._fetch(over.state) if over.state else None
            self._hand_in(process, trial, over, state)
        process.trial = None
        if not over.is_fit:
            self.on_event({"event": "process replaced", "process": process.number, "why": over.why})
            self._forget(process)

    def _fetch(self, name: str) -> State:
        path = self.spool / name
        try:
            state: State = load_tree(path)
            return state
        finally:
            path.unlink(missing_ok=True)

    def _hand_in(self, process: _Process, trial: Trial, over: TrialEnd, state: State | None) -> None:
        assert over.status != "cut"
        outcome = Outcome(
            trial=trial,
            status=over.status,
            why=over.why,
            steps=over.steps,
            samples=over.samples,
            evaluation=process.history[-1] if process.history else None,
            history=tuple(process.history),
            executor=self.pool.executor,
            seconds=over.seconds,
        )
        self.queue.hand_in(outcome, state)
        self.has_none = False

    def _lost(self, process: _Process, loss: str) -> None:
        """A process is gone: hand in its trial as failed. The next trial starts another process."""
        why = loss + self._last_words(process.number)
        self.on_event({"event": "process lost", "process": process.number, "why": why})
        self._forget(process)
        self.losses_in_a_row += 1
        if process.trial is not None:
            self._hand_in(process, process.trial, TrialEnd("failed", why, steps=process.page.steps), None)
        if self.losses_in_a_row > self.pool.most_losses:
            raise TrainingError(
                f"executor {self.pool.executor}: {self.losses_in_a_row} processes were lost one after the other with "
                f"no trial trained between; of the last one: {why}"
            )

    def _forget(self, process: _Process) -> None:
        process.page.ask_to_stop()
        self.transport.end(process.number)
        del self.processes[process.number]

    def _look_for_silent(self) -> None:
        now = time.monotonic()
        away_s = max(0.0, now - self.looked_at - _TURN_S)  # time spent in the queue is not a process's silence
        self.looked_at = now
        for process in list(self.processes.values()):
            ticks = process.page.ticks
            process.moved_at += away_s
            self.any_began |= ticks > 0
            if ticks != process.ticks or process.trial is None:
                process.ticks, process.moved_at = ticks, now
            limit = self.pool.deadline_s if ticks else self.pool.start_deadline_s
            if now - process.moved_at <= limit:
                continue
            if not self.any_began:
                words = self._last_words(process.number)
                raise TrainingError(f"executor {self.pool.executor}: no process began within {limit:g} s{words}")
            self._lost(process, f"its process {'showed no progress' if ticks else 'did not begin'} within {limit:g} s")

    def _last_words(self, number: int) -> str:
        """The last line of a process's log: an error that it could not report itself."""
        try:
            lines = log_path(self.spool, number).read_text(errors="replace").splitlines()
        except OSError:  # the process died before it opened its log
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:_LAST_WORDS]})" if said else ""
