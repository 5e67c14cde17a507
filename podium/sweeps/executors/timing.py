"""Times ways to train one group of trials, on the trials' own model, data and batch."""

from __future__ import annotations

import dataclasses
import os
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from podium.sweeps.executors.base import Executor
from podium.sweeps.executors.candidate import REPEATS, Candidate
from podium.sweeps.executors.fused import Fused
from podium.sweeps.executors.graphed import GraphedTrainer
from podium.sweeps.executors.processes import Processes
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.executors.streams import Streams
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.probe import ProbeResult, probe
from podium.sweeps.fused.widths import widest
from podium.sweeps.parts import Parts
from podium.sweeps.precision import with_threads
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import ReferenceTrainer

PROCESS_START_S = 5.0
_WIDTHS = (4, 8, 16, 32, 64, 128, 256)


class Timing:
    def __init__(
        self, recipe: Recipe, taken: Sequence[Parts], device_data: DeviceData, found: ProbeResult, seconds: float
    ) -> None:
        self.recipe, self.taken, self.device_data, self.found, self.seconds = recipe, taken, device_data, found, seconds
        self.steps = sum(parts.steps for parts in taken)
        self.captures = found.fuses or probe(recipe, [parts.trial for parts in taken], device_data, rows=1).fuses
        """Whether a captured step gives the same results; trials that fuse always do."""
        self.on_cpu = recipe.torch_device.type == "cpu"
        several = self.on_cpu and torch.get_num_threads() > 1
        self.threads: tuple[int | None, ...] = (1, None) if several else (None,)
        self.on_one_thread: dict[str, list[float]] = {}
        """Microseconds per model-step, by executor."""
        self._made: tuple[Executor, CapturedStep] | None = None
        """The array that was timed last; only one, since each may fill the memory."""

    @property
    def widths(self) -> list[int]:
        """Widths of arrays that are worth timing, the widest first."""
        if not self.found.fuses or len(self.taken) < 2:
            return []
        most = widest(self.recipe, self.taken[0], self.device_data, len(self.taken), self.found.mode)
        return sorted({w for w in _WIDTHS if w < most} | {most})[:-5:-1]

    def made_for(self, executor: Executor) -> CapturedStep | None:
        """The array that this executor was timed with, if it still exists."""
        return self._made[1] if self._made is not None and self._made[0] == executor else None

    def sequential(self) -> Candidate:
        on_gpu = not self.on_cpu and self.captures

        def begin() -> Callable[[int], None]:
            again = self.recipe.make(self.taken[0].trial)
            trainer: Any = (GraphedTrainer if on_gpu else ReferenceTrainer)(
                self.recipe, again.trial, self.device_data, again
            )
            return repeated(trainer.step)

        return self._timed(Sequential(mode="graph" if on_gpu else "eager"), 1, begin)

    def processes(self, one: Candidate) -> Candidate:
        """Predicted from one trial on one thread: as many processes of one thread run as there are cores."""
        cores = len(os.sched_getaffinity(0))
        width = min(cores, len(self.taken))
        if cores < 2 or not isinstance(self.recipe.task, str):
            reason = "one core" if cores < 2 else "the task has no name by which another process could make it"
            return one._replace(executor=Processes(), why_not=reason)
        times = [us / width for us in self.on_one_thread["sequential"]]
        return self._candidate(Processes(count=width), width, PROCESS_START_S, times, 1.0)

    def streams(self, width: int) -> Candidate:
        rows = min(width, len(self.taken))
        self._made = None

        def begin() -> Callable[[int], None]:
            taken = self.taken[:rows]
            arrays = [Array(self.recipe, parts, self.device_data, 1) for parts in taken]
            for array, parts in zip(arrays, taken, strict=True):
                array.fill([self.recipe.make(parts.trial)])
            return CapturedStep(arrays).run

        return self._timed(Streams(width=width), rows, begin)

    def fused(self, width: int, *, compiled: bool = False) -> Candidate:
        self._made = None
        made: list[CapturedStep] = []

        def begin() -> Callable[[int], None]:
            array = Array(self.recipe, self.taken[0], self.device_data, width, mode=self.found.mode, compiled=compiled)
            again = self.recipe.make(self.taken[0].trial)  # in all rows: values do not change how long a step takes
            own = not array.optimizer.capturable  # then each row needs an optimizer
            array.fill([self.recipe.make(again.trial) if own else again for _ in range(width)])
            made.append(CapturedStep([array]))
            return made[0].run

        executor = Fused(width=width, compiled=compiled, probed=False, mode=self.found.mode)
        found = self._timed(executor, width, begin)
        if not found.why_not:
            self._made = found.executor, made[0]
        return found

    def _timed(self, executor: Any, width: int, begin: Callable[[], Callable[[int], None]]) -> Candidate:
        """Time an executor; on the CPU with one thread and with all threads, and take the faster."""
        began = time.perf_counter()
        try:
            with with_threads(self.threads[0]):
                run = begin()
                run(1)
                self.recipe.wait()
                start_s = time.perf_counter() - began
            took = {}
            for count in self.threads:
                with with_threads(count):
                    timings = step_timings(run, self.recipe.wait, self.seconds)
                    took[count] = [seconds / width * 1e6 for seconds in timings]
            best = min(took, key=lambda count: statistics.median(took[count]))
            executor = dataclasses.replace(executor, threads=best)
            self.on_one_thread[executor.name] = took[self.threads[0]]
        except Exception as error:  # the user's own code raised, or memory ran out: this executor is left out
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            return Candidate(executor, width, float("inf"), 0.0, float("inf"), why)
        finally:
            if self.recipe.torch_device.type == "cuda":
                torch.cuda.empty_cache()
        # The array trains `width` trials at a time; during the last trials it may be half empty.
        waves = -(-len(self.taken) // width) * width / len(self.taken)
        return self._candidate(executor, width, start_s, took[best], waves)

    def _candidate(
        self, executor: Executor, width: int, start_s: float, times: Sequence[float], waves: float
    ) -> Candidate:
        """The candidate with its predicted times, from timings in microseconds per model-step."""

        def total(step_us: float) -> float:
            return start_s + self.steps * step_us * waves / 1e6

        step_us, fastest, slowest = statistics.median(times), min(times), max(times)
        ends = total(fastest), total(slowest)
        return Candidate(executor, width, step_us, start_s, total(step_us), "", slowest / fastest, *ends)


def seconds_per_step(run: Callable[[int], None], wait: Callable[[], None], seconds: float) -> float:
    """The mean of `step_timings`."""
    return statistics.fmean(step_timings(run, wait, seconds))


def step_timings(run: Callable[[int], None], wait: Callable[[], None], seconds: float) -> list[float]:
    """Seconds per step, timed `REPEATS` times; the number of steps grows until they take `seconds` together."""
    steps = 1
    while True:
        took = []
        for _ in range(REPEATS):
            began = time.perf_counter()
            run(steps)
            wait()
            took.append(time.perf_counter() - began)
        if sum(took) >= seconds:
            return [one / steps for one in took]
        # By the fastest: a delayed timing says nothing about how many steps are enough.
        wanted = int(steps * 1.2 * seconds / max(REPEATS * min(took), 1e-6))
        steps = max(2 * steps, min(wanted, 64 * steps))


def repeated(step: Callable[[], None]) -> Callable[[int], None]:
    """A function that calls `step` the given number of times."""

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    return run
