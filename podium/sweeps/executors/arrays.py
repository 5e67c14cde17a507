"""Executors that train groups of trials in arrays: the common part of `fused` and `streams`.

All arrays step together, on a GPU as branches of one captured step. A group whose trials give other results in an array
than alone is trained after the other groups, one trial after another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence

from podium.sweeps.executors.base import Executor, OnEvent, Queue, Requeued
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.probe import ProbeResult, probe
from podium.sweeps.fused.slots import ArrayGroup, SlotOptions, train_in_slots
from podium.sweeps.parts import Parts
from podium.sweeps.precision import precision_of, with_threads
from podium.sweeps.recipe import Recipe
from podium.sweeps.trial import failed


class ArrayExecutor(Executor):
    """Takes trials of each group, verifies that they can share arrays, makes the arrays and trains in them."""

    threads: int | None
    captured: bool = True
    narrows: bool = True
    rows_probed = 2
    """Rows of the array that is compared with trials alone."""

    @abstractmethod
    def rows_at_a_time(self, recipe: Recipe) -> int:
        """How many trials of a group are taken from its queue before its arrays are made."""

    @abstractmethod
    def groups_of(
        self, recipe: Recipe, queue: Queue, taken: Sequence[Parts], data: DeviceData, found: ProbeResult, share: float
    ) -> Iterator[ArrayGroup]:
        """The arrays of one group of trials; `share` is the part of the free memory that they may take."""

    def verify(
        self, recipe: Recipe, queue: Queue, taken: Sequence[Parts], data: DeviceData, on_event: OnEvent
    ) -> ProbeResult:
        """Whether these trials give the same results in arrays as alone."""
        trials = [parts.trial for parts in taken]
        found = probe(recipe, trials, data, rows=self.rows_probed, stop=queue.stop_requested)
        on_event(found.to_event(len(taken)))
        return found

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        self.run_groups(recipe, [queue], on_event)

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        groups: list[ArrayGroup] = []
        left: list[Queue] = []
        with precision_of(recipe), with_threads(self.threads):
            for queue in queues:
                if queue.stop_requested():
                    return
                taken = take_parts(recipe, queue, self.rows_at_a_time(recipe), self.name)
                if not taken:
                    continue
                data = recipe.device_data_of(taken[0].task)
                found = self.verify(recipe, queue, taken, data, on_event)
                if found.fuses:
                    groups += self.groups_of(recipe, queue, taken, data, found, 1 / len(queues))
                else:
                    left.append(requeue(recipe, queue, taken))
        self.train(recipe, groups, on_event, left=left)

    def train(
        self,
        recipe: Recipe,
        groups: list[ArrayGroup],
        on_event: OnEvent,
        *,
        left: Sequence[Queue] = (),
        step: CapturedStep | None = None,
    ) -> None:
        """Train in these arrays; then train `left`, and the trials that the arrays returned, one by one."""
        returned: list[Queue] = []
        options = SlotOptions(executor=self.name, on_event=on_event, captured=self.captured, narrows=self.narrows)
        if groups:
            with precision_of(recipe), with_threads(self.threads):
                returned = train_in_slots(recipe, groups, options, step)
        for queue in (*left, *returned):
            Sequential(threads=self.threads).run(recipe, queue, on_event)


def take_parts(recipe: Recipe, queue: Queue, most: int, executor: str) -> list[Parts]:
    """At most this many trials from the queue, built; a trial that cannot be built is handed in as failed."""
    taken: list[Parts] = []
    while len(taken) < most and (trial := queue.take()) is not None:
        try:
            taken.append(recipe.make(trial))
        except Exception as error:  # this trial's, not the sweep's
            queue.hand_in(failed(trial, error, executor), None)
    return taken


def requeue(recipe: Recipe, queue: Queue, taken: Sequence[Parts]) -> Requeued:
    """The queue with these trials in front again; their models are not built a second time."""
    for parts in taken:
        recipe.give_back(parts)
    return Requeued(queue, [parts.trial for parts in taken])
