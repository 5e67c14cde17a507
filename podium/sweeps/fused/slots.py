"""Slots: rows of running arrays, which trials enter and leave.

The host knows in advance at which step a row needs it: its samples run out, it must be evaluated, it ends. So the host
lets all arrays run until the next such step without synchronising with the device. Then it gives rows new samples,
evaluates due rows together, gets verdicts from the queue, frees rows and fills them from the queue. The graph stays the
same while rows are needed; a trial that starts later starts at its own step 0.

Towards a sweep's end rows stay empty, and an empty row costs as much as any other. Once half of the rows are empty, and
the rest of the sweep is long enough to pay for new arrays, the trials move into narrower ones.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from podium.errors import ConfigError, PodiumError, TrainingError
from podium.sweeps.executors.base import OnEvent, Queue, Requeued
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.parts import Parts
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import outcome_of
from podium.sweeps.trial import Evaluation, Trial, Verdict, failed

_LONGEST_RUN = 2000
"""Steps after which the host checks whether the user wants to stop."""
_LOOK_UP_S = 0.5
"""The same on the CPU, in seconds."""
_PER_ROW = 0.5
"""The share of a step's time that grows with the rows, at least; the rest is the same for any number of rows."""
_NARROW_S = 0.1
"""Seconds that new arrays cost, besides capture and compilation."""


class ArrayGroup(NamedTuple):
    """An array, the queue of its trials, and the trials that were taken from the queue already."""

    array: Array
    queue: Queue
    first: list[Parts]


@dataclass(frozen=True, kw_only=True)
class SlotOptions:
    """How trials are trained in rows, and what is called with events."""

    executor: str
    """The executor's name in outcomes."""
    on_event: OnEvent
    captured: bool | None = None
    """Whether a step is captured in a CUDA graph; None: where possible."""
    narrows: bool = True
    """Whether arrays may be made narrower."""


class Slot:
    """A row of an array with a trial in it."""

    def __init__(self, array: Array, row: int, parts: Parts) -> None:
        self.array, self.row, self.parts = array, row, parts
        self.steps, self.filled_to = 0, 0
        self.history: list[Evaluation] = []
        self.began = time.perf_counter()

    @property
    def trial(self) -> Trial:
        return self.parts.trial

    def until_event(self, every: int) -> int:
        """Steps until this row needs samples, an evaluation, or ends."""
        ahead = min(self.parts.steps, self.filled_to) - self.steps
        if every > 0:
            period = every * self.parts.steps_per_epoch
            ahead = min(ahead, period - self.steps % period)
        return ahead


class Slots:
    """Trains the trials of the queues in rows of these arrays, until none is left."""

    def __init__(
        self, recipe: Recipe, groups: Sequence[ArrayGroup], options: SlotOptions, step: CapturedStep | None = None
    ) -> None:
        """`step`: the captured step of these arrays, if there is one already."""
        self.recipe, self.executor, self.on_event = recipe, options.executor, options.on_event
        self.arrays = {place: (group.array, group.queue) for place, group in enumerate(groups)}
        """By place in `groups`; arrays that no trial needs any more are dropped."""
        self.captured = options.captured
        self.captured_step = step or CapturedStep([group.array for group in groups], captured=options.captured)
        self.narrows = options.narrows
        """Whether arrays may be made narrower."""
        self.slots: dict[tuple[int, int], Slot] = {}
        self.copied = False
        """Whether any row was copied over another: then no trial can be trained again alone."""
        self.steps = 0
        """Steps that all arrays have taken."""
        self._timed: tuple[int, float] = (0, 0.0)
        """Timed steps of this captured step, and their seconds without evaluations."""
        self._since: tuple[int, float] | None = None
        """The step and the time at which the current timing began."""

    def run(self, first: Sequence[Sequence[Parts]] = ()) -> None:
        """Train until no trial is left; `first`: for each array, trials that were taken from its queue already."""
        for place, waiting in enumerate(first):
            for parts in waiting:
                self._begin(place, parts.trial, lambda parts=parts: parts)  # type: ignore[misc]  # bound now, not later
        self._fill()
        self._refill()
        longest = 1 if self.captured_step.device.type == "cpu" else _LONGEST_RUN
        while self.slots:
            steps = min(slot.until_event(self.recipe.eval_every) for slot in self.slots.values())
            steps = min(steps, longest)
            if self.captured_step.captured:
                self.captured_step.run(0)  # captures, without a step
            began = time.perf_counter()
            if self.captured_step.start_s is not None:  # the first step of all may take far longer
                self._since = self._since or (self.steps, began)
            self.captured_step.run(steps)
            if self.captured_step.device.type == "cpu":  # on a GPU steps are only launched by now
                longest = max(1, min(_LONGEST_RUN, int(steps * _LOOK_UP_S / (time.perf_counter() - began + 1e-9))))
            self.steps += steps
            for slot in self.slots.values():
                slot.steps += steps
            if any(slot.parts.is_due(slot.steps, self.recipe.eval_every) for slot in self.slots.values()):
                self._note_time()
            if any(queue.stop_requested() for _, queue in self.arrays.values()):
                return
            for place in self.arrays:
                self._judge(place)
            self._fill()
            self._narrow()
            self._refill()

    def _note_time(self) -> None:
        """Add the time of the steps since `_since`, before rows are evaluated."""
        self.recipe.wait()  # the evaluation would wait, too
        if self._since is not None:
            steps, at = self._since
            done, seconds = self._timed
            self._timed = (done + self.steps - steps, seconds + time.perf_counter() - at)
        self._since = None

    # Rows.

    def _fill(self) -> None:
        for place, (array, queue) in self.arrays.items():
            while len([key for key in self.slots if key[0] == place]) < array.rows:
                trial = queue.take()
                if trial is None:
                    break
                self._begin(place, trial, lambda trial=trial: self.recipe.make(trial))  # type: ignore[misc]  # as above

    def _begin(self, place: int, trial: Trial, make: Callable[[], Parts]) -> None:
        try:
            self._put(place, self._free_row(place), make())
        except Exception as error:  # this trial's, not the sweep's
            self.arrays[place][1].hand_in(failed(trial, error, self.executor), None)

    def _put(self, place: int, row: int, parts: Parts) -> None:
        array, _ = self.arrays[place]
        array.load(row, parts)
        self.slots[place, row] = Slot(array, row, parts)
        self.on_event({"event": "trial", "trial": parts.trial.number, "state": "begins", "row": row})

    def _free_row(self, place: int) -> int:
        return next(row for row in range(self.arrays[place][0].rows) if (place, row) not in self.slots)

    def _refill(self) -> None:
        """Give the next samples to rows whose samples are used up."""
        for place, (array, _) in self.arrays.items():
            slots = {row: slot for (at, row), slot in self.slots.items() if at == place}
            due = {row: slot for row, slot in slots.items() if slot.steps >= slot.filled_to}
            if not due:
                continue
            array.refill([due[row].steps if row in due else None for row in range(array.rows)])
            for slot in due.values():
                slot.filled_to = slot.steps + array.window

    def _narrow(self) -> None:
        """Drop rows and arrays that no trial will need again, if that saves time."""
        wanted = {place: self._rows_wanted(place) for place in self.arrays}
        if not self.narrows or not self.slots or not self._pays(sum(wanted.values())):
            return
        try:
            moved = {at: self._narrower(at) for at, rows in wanted.items() if 0 < rows < self.arrays[at][0].rows}
        except Exception as error:  # the user's own code, or memory: keep the wide arrays
            self.narrows = False
            self.on_event({"event": "not narrowed", "why": f"{type(error).__name__}: {error}"[:500]})
            return
        for place, (array, slots) in moved.items():
            self.arrays[place] = (array, self.arrays[place][1])
            for row, slot in enumerate(slots):
                del self.slots[place, slot.row]
                slot.array, slot.row, slot.filled_to = array, row, slot.steps
            self.slots.update({(place, slot.row): slot for slot in slots})
        self.arrays = {place: seat for place, seat in self.arrays.items() if wanted[place]}
        before = sum(array.rows for array in self.captured_step.arrays)
        self.captured_step.close()
        self.captured_step = CapturedStep([array for array, _ in self.arrays.values()], captured=self.captured)
        self._timed = (0, 0.0)
        self.on_event({"event": "narrowed", "rows": sum(wanted.values()), "before": before})

    def _pays(self, rows: int) -> bool:
        """Whether arrays of `rows` rows in all would save more time until the end than they cost to make."""
        before, (steps, seconds) = sum(array.rows for array in self.captured_step.arrays), self._timed
        if 2 * rows > before or not steps:
            return False
        ahead = max(slot.parts.steps - slot.steps for slot in self.slots.values())
        saved = _PER_ROW * (1 - rows / before) * ahead * seconds / steps
        return saved > _NARROW_S + max(
            self.captured_step.start_s or 0.0, sum(array.compile_s for array in self.captured_step.arrays)
        )

    def _rows_wanted(self, place: int) -> int:
        """How many rows the array still needs."""
        array, queue = self.arrays[place]
        live = sum(at == place for at, _ in self.slots)
        if queue.expects_more():
            return array.rows
        if array.rows <= 2 or not array.optimizer.capturable:
            return array.rows if live else 0
        return min(array.rows, max(2, live)) if live else 0

    def _narrower(self, place: int) -> tuple[Array, list[Slot]]:
        """A new array of the rows with trials only, and their slots in its order."""
        array, _ = self.arrays[place]
        slots = [slot for (at, _), slot in sorted(self.slots.items()) if at == place]
        rows = [slot.row for slot in slots]
        if len(rows) < 2:  # an array has at least two rows: the results of the second are ignored
            rows.append(next(row for row in range(array.rows) if row not in rows))
        return array.narrower(rows, [slot.steps for slot in slots]), slots

    def _judge(self, place: int) -> None:
        array, queue = self.arrays[place]
        due = [
            slot
            for (at, _), slot in sorted(self.slots.items())
            if at == place and slot.parts.is_due(slot.steps, self.recipe.eval_every)
        ]
        if not due:
            return
        found = array.evaluate([slot.row for slot in due], [slot.steps for slot in due])
        sound: list[tuple[Slot, Evaluation]] = []
        for slot, evaluation in zip(due, found, strict=True):
            if isinstance(evaluation, Exception):  # a metric that raises ends its own trial
                self._end(place, slot, "failed", f"{type(evaluation).__name__}: {evaluation}")
                continue
            slot.history.append(evaluation)
            if not math.isfinite(evaluation.loss):
                self._end(place, slot, "diverged", f"its loss is {evaluation.loss} after {slot.steps} steps")
                continue
            sound.append((slot, evaluation))
        becoming: list[tuple[Slot, Verdict]] = []
        verdicts = queue.report_all([(slot.trial, evaluation) for slot, evaluation in sound])
        for (slot, _), verdict in zip(sound, verdicts, strict=True):
            if isinstance(verdict, ConfigError):  # the trial lacks the sweep's metric
                self._end(place, slot, "failed", f"{type(verdict).__name__}: {verdict}")
            elif slot.steps >= slot.parts.steps:
                self._end(place, slot, "finished", "")
            elif verdict.action == "stop":
                self._end(place, slot, "stopped", verdict.why)
            elif verdict.action == "become":
                becoming.append((slot, verdict))
        for slot, verdict in becoming:
            self._become(place, slot, verdict)

    def unfinished(self, place: int) -> list[Trial]:
        """The trials in rows of this array."""
        return [slot.trial for (at, _), slot in sorted(self.slots.items()) if at == place]

    def _end(self, place: int, slot: Slot, status: str, why: str) -> None:
        _, queue = self.arrays[place]
        seconds = time.perf_counter() - slot.began
        state = slot.array.save(slot.row)
        slot.array.release(slot.row)
        del self.slots[place, slot.row]
        queue.hand_in(outcome_of(slot.parts, status, why, slot.steps, slot.history, self.executor, seconds), state)

    def _become(self, place: int, slot: Slot, verdict: Verdict) -> None:
        """Copy another row's parameters and moments over this one, and continue with changed numbers."""
        others = [s for (at, _), s in self.slots.items() if at == place and s.trial.number == verdict.source]
        if not others:  # the source ended at this evaluation
            self.on_event({"event": "not copied", "trial": slot.trial.number, "source": verdict.source})
            return
        parts = self._changed(slot, verdict.options)
        self.copied = True
        slot.array.copy_row(others[0].row, slot.row)
        slot.parts = parts
        slot.array.change_numbers(slot.row, slot.parts, slot.steps)
        slot.filled_to = slot.steps  # refill: the samples stay the same, the numbers are read again

    def _changed(self, slot: Slot, options: Mapping[str, Any]) -> Parts:
        """The trial with these options changed, except those that would change its structure."""
        parts = self._with_options(slot, options)
        if parts.structure == slot.array.structure:
            return parts
        possible: dict[str, Any] = {}
        for name, value in options.items():
            if self._with_options(slot, {**possible, name: value}).structure == slot.array.structure:
                possible[name] = value
            else:
                self.on_event({"event": "not changed", "trial": slot.trial.number, "option": name})
        return self._with_options(slot, possible)

    def _with_options(self, slot: Slot, options: Mapping[str, Any]) -> Parts:
        return self.recipe.make(dataclasses.replace(slot.trial, options={**slot.trial.options, **options}))


def train_in_slots(
    recipe: Recipe, groups: list[ArrayGroup], options: SlotOptions, step: CapturedStep | None = None
) -> list[Queue]:
    """Train in these arrays. If a step raises, returns queues of the unfinished trials, to train otherwise from step 0.

    The list of groups is emptied, so that an array is freed when a narrower one replaces it.
    """
    slots, first = Slots(recipe, groups, options, step), [group.first for group in groups]
    groups.clear()
    try:
        slots.run(first)
    except PodiumError:
        raise
    except Exception as error:  # the user's own code at a later step, or out of memory
        if slots.copied:
            raise TrainingError(f"fused: a step raised {type(error).__name__}: {error}") from error
        options.on_event({"event": "fell back", "why": f"{type(error).__name__}: {error}"[:500]})
        left: list[Queue] = []
        for place, (_, queue) in slots.arrays.items():
            for trial in slots.unfinished(place):
                queue.begin_again(trial)
            left.append(Requeued(queue, slots.unfinished(place)))
        return left
    return []
