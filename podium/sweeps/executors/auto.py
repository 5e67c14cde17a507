"""`auto`: take a few steps in every way that comes into question, and train in the fastest.

For each group of trials the candidates are timed on the trials' own model, data and batch, a fraction of a second each
in three parts, and the time to train the whole group is predicted:

    start + trials × steps × seconds per model-step

`start` is what has to happen before the first step (a capture, a compilation, starting processes) as far as it is still
to come. The most promising candidates come first: on a GPU all trials in one array, since no narrower one was ever
faster there. Timing ends when it has cost a quarter of what is left to gain from, and sooner where the next candidate
is unlikely to be the fastest. Nothing that was timed counts as training: rows are loaded anew afterwards, into the very
array that was timed where it can be had. A candidate that raises, for lack of memory or because its step cannot be
captured, is left out and the reason kept.

Compiling takes from a quarter of a minute to minutes, so it is tried only where the group would train for long enough
to get that back. Processes are timed by what one trial costs on one thread, and are considered on the CPU only:
starting them on a GPU, to time them, would take longer than most groups train.
"""

from __future__ import annotations

import dataclasses
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, final

import torch

from podium.errors import ConfigError
from podium.sweeps.executors.base import Executor, OnEvent, Queue, Requeued
from podium.sweeps.executors.fused import WIDTH, Fused, take_parts
from podium.sweeps.executors.graphed import GraphedTrainer
from podium.sweeps.executors.processes import Processes
from podium.sweeps.executors.reference import ReferenceTrainer
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.executors.streams import Streams
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.bundle import Bundle
from podium.sweeps.fused.compiling import seconds_to_compile
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.probe import Verified, probe
from podium.sweeps.fused.widths import widest
from podium.sweeps.recipe import Parts, Recipe, precision_of, with_threads

MEASURE_S = 0.3
"""How long each candidate is timed at most, after its warm-up; the first, of which nothing is known, a tenth of it."""
SHARE_OF_ONE = 0.004
"""The same, as a share of what the trials would take one after another."""
COMPILED_GAIN = 1.6
"""How much faster compiled steps are expected to be, before it is tried."""
PROCESS_START_S = 5.0
TOO_FEW_STEPS = 100
"""Verifying and timing take some dozens of steps themselves."""
WORTH_FUSING = 1.1
SHARE_OF_TOTAL = 0.25
"""Timing ends when it has taken this share of what the best candidate so far would take for all trials …"""
SHARE_IF_UNLIKELY = 0.05
"""… or this one, where the next candidate was the fastest nowhere yet."""
_WIDTHS = (4, 8, 16, 32, 64, 128, 256)
REPEATS = 3
"""Timings of each candidate, one after the other, from which a ratio gets its range."""
UNSTEADY = 1.5
"""Where the slowest of these takes more than this many times the fastest, no ratio is told: other work is going on."""


class Candidate(NamedTuple):
    """One way to train a group, and how long it would take."""

    executor: Executor
    width: int
    step_us: float  # of one model
    start_s: float
    total_s: float
    why_not: str = ""
    unsteady: float = 1.0
    """The slowest timing over the fastest."""
    fastest_s: float | None = None
    slowest_s: float | None = None
    """What `total_s` would be by the fastest timing, and by the slowest; None where they were not told apart."""

    @property
    def ends(self) -> tuple[float, float]:
        """The range of `total_s` by the timings."""
        return self.fastest_s or self.total_s, self.slowest_s or self.total_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "executor": describe(self.executor),
            "width": self.width,
            "us_per_model_step": round(self.step_us, 3),
            "start_s": round(self.start_s, 2),
            "predicted_s": round(self.total_s, 3),
            "predicted_range_s": [round(end, 3) for end in self.ends],
            "why_not": self.why_not,
        }


class Choice(NamedTuple):
    """What was chosen, why, and from what."""

    executor: Executor
    why: str
    candidates: list[Candidate]
    made: Bundle | None = None
    """The chosen array, as it was timed; None where it is gone, or another way was chosen."""


@final
@dataclass(frozen=True, kw_only=True)
class Auto(Executor):
    """Times the executors on each group of trials and takes the fastest."""

    seconds: float = MEASURE_S
    """How long each candidate is timed, at most."""
    compiled: bool | None = None
    """Whether compiled steps are tried; None tries them where they can pay."""

    name = "auto"
    copies_rows = True

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"auto: seconds must be above 0, got {self.seconds}")

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        self.run_groups(recipe, [queue], on_event)

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        """Choose for each group; groups that chose the same way are trained together."""
        chosen: dict[Executor, list[Queue]] = {}
        several = len(queues) > 1  # then arrays run side by side, in one graph
        for number, queue in enumerate(queues):
            taken = take_parts(recipe, queue, WIDTH[recipe.torch_device.type], self.name)
            if not taken:
                continue
            choice = self.choose(recipe, taken, on_event, queue.stop_requested)
            if several:
                choice = choice._replace(made=None)  # memory that the next group is to find free
            if queue.stop_requested():
                return
            on_event({
                "event": "chose", "group": number, "executor": describe(choice.executor), "why": choice.why,
                "table": [candidate.to_dict() for candidate in choice.candidates],
            })  # fmt: skip
            if choice.made is not None and isinstance(choice.executor, Fused):
                return choice.executor.run_made(recipe, queue, on_event, taken, choice.made)
            chosen.setdefault(choice.executor, []).append(Requeued(queue, [parts.trial for parts in taken]))
        for executor, group in chosen.items():
            executor.run_groups(recipe, group, on_event)

    def choose(
        self,
        recipe: Recipe,
        taken: Sequence[Parts],
        on_event: OnEvent = lambda event: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Choice:
        """Time the candidates for these trials (all of one structure); `stop` ends it between two of them."""
        steps = sum(parts.steps for parts in taken)
        if steps < TOO_FEW_STEPS:
            why = f"one after another: {steps} steps in all are done before anything could be timed"
            return Choice(Sequential(), why, [])
        with precision_of(recipe):
            resident = recipe.resident_of(taken[0].task)
            found = probe(recipe, [parts.trial for parts in taken], resident, stop=stop)
            on_event(found.to_event(len(taken)))
            timing = _Timing(recipe, taken, resident, found, self.seconds / 10)
            timed = self._time_all(timing, stop)
        choice = _decide(timed, found, len(taken))
        return choice._replace(made=timing.made_for(choice.executor))

    def _time_all(self, timing: _Timing, stop: Callable[[], bool]) -> list[Candidate]:
        timed: list[Candidate] = []
        began = time.perf_counter()
        for share, candidate in self._candidates(timing):
            left = min((c.total_s for c in timed), default=math.inf)
            if stop() or time.perf_counter() - began > share * left:
                break  # what is left takes no longer than looking for something faster would
            timed.append(candidate())
            longest = max((c.total_s for c in timed if not c.why_not), default=0.0)
            timing.seconds = max(self.seconds / 10, min(self.seconds, SHARE_OF_ONE * longest))
        if timing.on_cpu and timed and not timed[0].why_not:
            timed.append(timing.processes(timed[0]))
        fused = [c for c in timed if c.executor.name == "fused" and not c.why_not]
        if fused and self._may_compile(timing, timed):
            timed.append(timing.fused(min(fused, key=lambda c: c.total_s).width, compiled=True))
        return timed

    def _candidates(self, timing: _Timing) -> Iterator[tuple[float, Callable[[], Candidate]]]:
        """Whatever is most likely to be fast first; with the share of what is left that timing may have taken by then.

        On the CPU one after another comes first: there it may be the fastest, and takes no time to begin.
        """
        unlikely = SHARE_OF_TOTAL if timing.on_cpu or not timing.found.fuses else SHARE_IF_UNLIKELY
        one = (math.inf if timing.on_cpu else SHARE_OF_TOTAL, timing.sequential)
        ways: list[tuple[float, Callable[[], Candidate]]] = [
            (unlikely if place else math.inf, partial(timing.fused, width)) for place, width in enumerate(timing.widths)
        ]
        ways.insert(0 if timing.on_cpu else 1, one)
        yield from ways
        for width in (16, 32, 8) if timing.captures and not timing.on_cpu else ():
            if width <= 2 * len(timing.taken):
                yield unlikely, partial(timing.streams, width)

    def _may_compile(self, timing: _Timing, timed: Sequence[Candidate]) -> bool:
        if self.compiled is not None:
            return self.compiled and timing.found.mode == "forward"
        if timing.on_cpu or timing.found.mode != "forward":
            return False
        left = min((c.total_s for c in timed if not c.why_not), default=0.0)
        return left * (1 - 1 / COMPILED_GAIN) > seconds_to_compile(timing.taken[0].model)


class _Timing:
    """Times ways to train one group of trials."""

    def __init__(
        self, recipe: Recipe, taken: Sequence[Parts], resident: DeviceData, found: Verified, seconds: float
    ) -> None:
        self.recipe, self.taken, self.resident, self.found, self.seconds = recipe, taken, resident, found, seconds
        self.steps = sum(parts.steps for parts in taken)
        self.captures = found.fuses or probe(recipe, [parts.trial for parts in taken], resident, rows=1).fuses
        """Whether a step is the same step when it is captured: what fuses, can be."""
        self.on_cpu = recipe.torch_device.type == "cpu"
        several = self.on_cpu and torch.get_num_threads() > 1
        self.threads: tuple[int | None, ...] = (1, None) if several else (None,)
        self.on_one_thread: dict[str, list[float]] = {}
        """Microseconds per model-step, by executor."""
        self._made: tuple[Executor, Bundle] | None = None
        """The array that was timed last; one at a time, since each may fill the memory."""

    @property
    def widths(self) -> list[int]:
        """Of arrays that are worth timing, the widest first."""
        if not self.found.fuses or len(self.taken) < 2:
            return []
        most = widest(self.recipe, self.taken[0], self.resident, len(self.taken), self.found.mode)
        return sorted({w for w in _WIDTHS if w < most} | {most})[:-5:-1]

    def made_for(self, executor: Executor) -> Bundle | None:
        """The array that this executor was timed with, if it is still there."""
        return self._made[1] if self._made is not None and self._made[0] == executor else None

    def sequential(self) -> Candidate:
        on_gpu = not self.on_cpu and self.captures

        def begin() -> Callable[[int], None]:
            again = self.recipe.make(self.taken[0].trial)
            alone: Any = (GraphedTrainer if on_gpu else ReferenceTrainer)(
                self.recipe, again.trial, self.resident, again
            )
            return repeated(alone.step)

        return self._timed(Sequential(mode="graph" if on_gpu else "eager"), 1, begin)

    def processes(self, one: Candidate) -> Candidate:
        """From one trial on one thread: each process has one, and as many run as there are cores."""
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
            arrays = []
            for parts in self.taken[:rows]:
                arrays.append(Array(self.recipe, parts, self.resident, 1))
                arrays[-1].load(0, self.recipe.make(parts.trial))
                arrays[-1].refill([0])
            return Bundle(arrays).run

        return self._timed(Streams(width=width), rows, begin)

    def fused(self, width: int, *, compiled: bool = False) -> Candidate:
        self._made = None
        made: list[Bundle] = []

        def begin() -> Callable[[int], None]:
            array = Array(self.recipe, self.taken[0], self.resident, width, mode=self.found.mode, compiled=compiled)
            for row in range(width):
                array.load(row, self.recipe.make(self.taken[row % len(self.taken)].trial))
            array.refill([0] * width)
            made.append(Bundle([array]))
            return made[0].run

        executor = Fused(width=width, compiled=compiled, probed=False, mode=self.found.mode)
        found = self._timed(executor, width, begin)
        if not found.why_not:
            self._made = found.executor, made[0]
        return found

    def _timed(self, executor: Any, width: int, begin: Callable[[], Callable[[int], None]]) -> Candidate:
        """Time an executor; on the CPU with one thread and with all, and keep the faster."""
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
        except Exception as error:  # the user's own code, or memory: this way is not open
            why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
            return Candidate(executor, width, float("inf"), 0.0, float("inf"), why)
        finally:
            if self.recipe.torch_device.type == "cuda":
                torch.cuda.empty_cache()
        # An array of many rows trains them all in the steps of one; the last ones may find it half empty.
        waves = -(-len(self.taken) // width) * width / len(self.taken)
        return self._candidate(executor, width, start_s, took[best], waves)

    def _candidate(
        self, executor: Executor, width: int, start_s: float, times: Sequence[float], waves: float
    ) -> Candidate:
        """What all trials take by these timings, in microseconds per model-step."""

        def total(step_us: float) -> float:
            return start_s + self.steps * step_us * waves / 1e6

        step_us, fastest, slowest = statistics.median(times), min(times), max(times)
        ends = total(fastest), total(slowest)
        return Candidate(executor, width, step_us, start_s, total(step_us), "", slowest / fastest, *ends)


def seconds_per_step(run: Callable[[int], None], wait: Callable[[], None], seconds: float) -> float:
    """What a step takes, by the mean of its timings."""
    return statistics.fmean(step_timings(run, wait, seconds))


def step_timings(run: Callable[[int], None], wait: Callable[[], None], seconds: float) -> list[float]:
    """What a step takes, timed `REPEATS` times: more and more steps until they take long enough, and the last count."""
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
        # By the fastest: one that was held up says nothing of how many steps are enough.
        wanted = int(steps * 1.2 * seconds / max(REPEATS * min(took), 1e-6))
        steps = max(2 * steps, min(wanted, 64 * steps))


def repeated(step: Callable[[], None]) -> Callable[[int], None]:
    """So many steps, from one that takes one."""

    def run(steps: int) -> None:
        for _ in range(steps):
            step()

    return run


def _decide(timed: list[Candidate], found: Verified, trials: int) -> Choice:
    possible = [c for c in timed if not c.why_not]
    if not possible:
        reasons = "; ".join(f"{describe(c.executor)}: {c.why_not}" for c in timed)
        # Trials that cannot take a step are handed in as failed, each with its reason, by whoever trains them.
        return Choice(Sequential(), f"no executor could take a step: {reasons}", timed)
    best = min(possible, key=lambda c: c.total_s)
    one = next((c for c in timed if c.executor.name == "sequential"), None)
    if one is None:
        why = f"{describe(best.executor)}: all {trials} trials take some {best.total_s:.2g} s; nothing else was timed"
        return Choice(best.executor, why, timed)
    gain = one.total_s / best.total_s if not one.why_not else float("inf")
    if best.executor.name != "sequential" and gain < WORTH_FUSING:
        only = "hardly faster than" if _is_unsteady(one, best) else f"only {gain:.2f}× as fast as"
        why = f"do not share: {describe(best.executor)} is predicted {only} one after another"
        return Choice(one.executor, why, timed)
    fused = [c for c in possible if c.executor.name == "fused"]
    why = f"{describe(best.executor)}: {best.step_us:.3g} µs per model-step"
    if best is not one:
        why += f", {_told(one, best)} over the {trials} trials"
    if not found.fuses:
        why += f"; cannot be fused: {found.why}"
    elif fused and best.executor.name != "fused":
        rows = min(fused, key=lambda c: c.total_s)
        slower = "to be slower" if _is_unsteady(one, rows) else f"{one.total_s / rows.total_s:.2f}×"
        why += f"; do not fuse: predicted {slower}"
    return Choice(best.executor, why, timed)


def _told(one: Candidate, best: Candidate) -> str:
    """How much faster the best is predicted to be, with its range; where timings are no good, that they are not."""
    if one.why_not:
        return "where one after another cannot take a step"
    if _is_unsteady(one, best):
        apart = max(one.unsteady, best.unsteady)
        return (
            f"predicted to be faster than one after another (no ratio: timings differed by up to {apart:.1f}×, so this "
            "machine is busy)"
        )
    low, high = one.ends[0] / best.ends[1], one.ends[1] / best.ends[0]
    return (
        f"predicted {one.total_s / best.total_s:.1f}× ({low:.1f} to {high:.1f} by {REPEATS} short timings of each) as "
        "fast as one after another"
    )


def _is_unsteady(*timed: Candidate) -> bool:
    """Whether timings are too far apart for a ratio."""
    return max(candidate.unsteady for candidate in timed) > UNSTEADY


def describe(executor: Executor) -> str:
    """An executor as it would be asked for."""
    changed = {}
    for field in dataclasses.fields(executor):  # type: ignore[arg-type]  # executors are dataclasses
        value = getattr(executor, field.name)
        if value != field.default and field.name not in ("probed", "env"):
            changed[field.name] = value
    return executor.name + (":" + ",".join(f"{k}={str(v).lower()}" for k, v in changed.items()) if changed else "")
