"""Trials given out to processes in other processes, and what happens when one of them is lost.

A process that dies takes its trial with it, and nothing else: the trial is handed in as failed with the cause, and
another process takes its place. One that shows no progress for `deadline_s` is taken for dead. Processes are started
when there is a trial for them, so there are never more than are of use.

What a pool does not know is how its processes are started and spoken to: `processes.py` and `ray.py` do.
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
    Over,
    Page,
    ProcessSetup,
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
"""How often `on_event` hears how far the processes are."""
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
    """The same, until it has begun."""
    most_losses: int = 8
    """Processes lost one after the other, with no trial trained between, after which there is no sense in going on."""


class Heard(NamedTuple):
    """What came from a process: an answer, or the news that it is gone."""

    number: int
    answer: str | None
    loss: str = ""


class TrialProcesses(ABC):
    """Processes of one kind, wherever they live. Leaving the `with` ends them all, whatever happened in it."""

    @abstractmethod
    def start(self, setup: ProcessSetup) -> int | None:
        """Start one, and do not wait until it is ready; its process id where that is known."""

    @abstractmethod
    def send(self, number: int, text: str) -> None:
        """Give it a message; a process that is gone is heard of as lost."""

    @abstractmethod
    def hear(self, timeout_s: float) -> list[Heard]:
        """What has come by now, or within this time."""

    @abstractmethod
    def end(self, number: int) -> None:
        """End one that is of no use any more; it is not heard of again."""

    def __enter__(self) -> TrialProcesses:
        return self

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None: ...


@dataclass
class _Seat:
    """What is known here of one process."""

    number: int
    page: Page
    trial: Trial | None = None
    history: list[Evaluation] = field(default_factory=list)
    ticks: int = 0
    moved_at: float = field(default_factory=time.monotonic)


def run_pool(
    pool: ProcessPool, trial_processes: TrialProcesses, recipe: Recipe, spool: Path, queue: Queue, on_event: OnEvent
) -> None:
    """Train the queue's trials until it has no more, or wants to stop. All processes are gone at return."""
    plain = {**recipe.to_dict(), "device": recipe.torch_device.type}
    save_folds(spool, recipe.folds)
    with trial_processes:
        _Dispatcher(pool, trial_processes, plain, spool, queue, on_event).run()


class _Dispatcher:
    def __init__(
        self,
        pool: ProcessPool,
        trial_processes: TrialProcesses,
        recipe: Mapping[str, Any],
        spool: Path,
        queue: Queue,
        on_event: OnEvent,
    ) -> None:
        self.pool, self.trial_processes, self.recipe, self.spool = pool, trial_processes, recipe, spool
        self.queue, self.on_event = queue, on_event
        self.seats: dict[int, _Seat] = {}
        self.started = 0
        self.any_began = False
        self.has_none = False
        """Whether the queue had no trial when it was last asked, and nothing was handed in since."""
        self.losses_in_a_row = 0
        self.told_at = time.monotonic()
        self.looked_at = time.monotonic()

    def run(self) -> None:
        try:
            while not self.queue.stop_requested():
                self._give_out()
                if not any(seat.trial for seat in self.seats.values()):
                    return
                for number, answer, loss in self.trial_processes.hear(_TURN_S):
                    if answer is None:
                        self._lost(self.seats[number], loss)
                    else:
                        self._answered(self.seats[number], json.loads(answer))
                self._look_for_silent()
                self._tell_progress()
        finally:
            for seat in self.seats.values():
                seat.page.ask_to_stop()

    def _tell_progress(self) -> None:
        """Now and then, how many steps of its trial each process has done."""
        now = time.monotonic()
        if now - self.told_at >= _TELL_S:
            self.told_at = now
            steps = [seat.page.steps for seat in self.seats.values() if seat.trial is not None]
            self.on_event({"event": "progress", "steps": steps})

    def _give_out(self) -> None:
        """A trial for everyone who has none, for as long as there are trials."""
        idle = [seat for seat in self.seats.values() if seat.trial is None]
        while not self.has_none and (idle or len(self.seats) < self.pool.count):
            trial = self.queue.take()
            if trial is None:
                self.has_none = True
                return
            seat = idle.pop() if idle else self._start()
            seat.trial, seat.history, seat.moved_at = trial, [], time.monotonic()
            self.on_event({"event": "trial", "trial": trial.number, "state": "begins", "row": seat.number})
            self.trial_processes.send(seat.number, to_json({"trial": vars(trial)}))

    def _start(self) -> _Seat:
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
        seat = self.seats[number] = _Seat(number, Page(page_path(self.spool, number)))
        pid = self.trial_processes.start(setup)
        self.on_event({"event": "process started", "process": number, "pid": pid})
        return seat

    def _answered(self, seat: _Seat, message: dict[str, Any]) -> None:
        assert seat.trial is not None, "an answer comes from one who was asked"
        seat.moved_at = time.monotonic()
        if "over" in message:
            self._over(seat, seat.trial, Over(**message["over"]))
            return
        evaluation = Evaluation(**message["evaluation"])
        seat.history.append(evaluation)
        verdict = self.queue.report(seat.trial, evaluation)
        if verdict.action == "become":
            raise ConfigError(
                f"executor {self.pool.executor}: population based training copies rows between trials: "
                "executor must be fused"
            )
        self.trial_processes.send(seat.number, to_json({"verdict": vars(verdict)}))

    def _over(self, seat: _Seat, trial: Trial, over: Over) -> None:
        if over.evaluation is not None:
            seat.history.append(Evaluation(**over.evaluation))
        if over.status == "failed":
            self.on_event({"event": "trial failed", "trial": trial.number, "traceback": over.traceback})
        self.losses_in_a_row = 0
        if over.status != "cut":
            state = self._fetch(over.state) if over.state else None
            self._hand_in(seat, trial, over, state)
        seat.trial = None
        if not over.is_fit:
            self.on_event({"event": "process replaced", "process": seat.number, "why": over.why})
            self._forget(seat)

    def _fetch(self, name: str) -> State:
        path = self.spool / name
        try:
            state: State = load_tree(path)
            return state
        finally:
            path.unlink(missing_ok=True)

    def _hand_in(self, seat: _Seat, trial: Trial, over: Over, state: State | None) -> None:
        assert over.status != "cut"
        outcome = Outcome(
            trial=trial,
            status=over.status,
            why=over.why,
            steps=over.steps,
            samples=over.samples,
            evaluation=seat.history[-1] if seat.history else None,
            history=tuple(seat.history),
            executor=self.pool.executor,
            seconds=over.seconds,
        )
        self.queue.hand_in(outcome, state)
        self.has_none = False

    def _lost(self, seat: _Seat, loss: str) -> None:
        """A process is gone: its trial has failed, and the next one starts another process."""
        why = loss + self._last_words(seat.number)
        self.on_event({"event": "process lost", "process": seat.number, "why": why})
        self._forget(seat)
        self.losses_in_a_row += 1
        if seat.trial is not None:
            self._hand_in(seat, seat.trial, Over("failed", why, steps=seat.page.steps), None)
        if self.losses_in_a_row > self.pool.most_losses:
            raise TrainingError(
                f"executor {self.pool.executor}: {self.losses_in_a_row} processes were lost one after the other with "
                f"no trial trained between; of the last one: {why}"
            )

    def _forget(self, seat: _Seat) -> None:
        seat.page.ask_to_stop()
        self.trial_processes.end(seat.number)
        del self.seats[seat.number]

    def _look_for_silent(self) -> None:
        now = time.monotonic()
        away_s = max(0.0, now - self.looked_at - _TURN_S)  # what the queue took is nobody's silence
        self.looked_at = now
        for seat in list(self.seats.values()):
            ticks = seat.page.ticks
            seat.moved_at += away_s
            self.any_began |= ticks > 0
            if ticks != seat.ticks or seat.trial is None:
                seat.ticks, seat.moved_at = ticks, now
            limit = self.pool.deadline_s if ticks else self.pool.start_deadline_s
            if now - seat.moved_at <= limit:
                continue
            if not self.any_began:
                words = self._last_words(seat.number)
                raise TrainingError(f"executor {self.pool.executor}: no process began within {limit:g} s{words}")
            self._lost(seat, f"its process {'showed no progress' if ticks else 'did not begin'} within {limit:g} s")

    def _last_words(self, number: int) -> str:
        """The last line that it wrote: what it said of an error that it could not report."""
        try:
            lines = log_path(self.spool, number).read_text(errors="replace").splitlines()
        except OSError:  # it did not come far enough to open one
            return ""
        said = [line.strip() for line in lines if line.strip()]
        return f" ({said[-1][:_LAST_WORDS]})" if said else ""
