"""`auto`: time a few steps with every executor that may be the fastest, and train with the fastest.

For each group of trials the candidates are timed on the trials' own model, data and batch, a fraction of a second each
in three parts, and the time to train the whole group is predicted:

    start + trials × steps × seconds per model-step

`start` is the time before the first step: a capture, a compilation, starting processes. The most promising candidates
come first: on a GPU all trials in one array, since no narrower array was ever faster there. Timing ends when it has
taken a quarter of the best predicted time, and sooner where the next candidate is unlikely to be the fastest. Timed
steps do not count as training: rows are loaded again afterwards, into the timed array itself where it still exists. A
candidate that raises, for lack of memory or because its step cannot be captured, is left out, and the reason is
recorded.

Compiling takes from a quarter of a minute to minutes, so it is tried only where the group trains long enough to save
that time. Processes are predicted from one trial on one thread, and are considered on the CPU only: starting them on a
GPU, to time them, would take longer than most groups train.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

from podium.errors import ConfigError
from podium.sweeps.executors.arrays import requeue, take_parts
from podium.sweeps.executors.base import Executor, OnEvent, Queue
from podium.sweeps.executors.candidate import Candidate, describe
from podium.sweeps.executors.choice import Choice, decide
from podium.sweeps.executors.fused import WIDTH, Fused
from podium.sweeps.executors.sequential import Sequential
from podium.sweeps.executors.timing import Timing
from podium.sweeps.fused.compiling import seconds_to_compile
from podium.sweeps.fused.probe import probe
from podium.sweeps.parts import Parts
from podium.sweeps.precision import precision_of
from podium.sweeps.recipe import Recipe

MEASURE_S = 0.3
"""How long each candidate is timed at most, after its warm-up; the first is timed for a tenth of it."""
SHARE_OF_ONE = 0.004
"""The same, as a share of the time that the trials would take one after another."""
COMPILED_GAIN = 1.6
"""The expected gain of compiled steps, by which it is decided whether to time them."""
TOO_FEW_STEPS = 100
"""Verifying and timing take some dozens of steps themselves."""
SHARE_OF_TOTAL = 0.25
"""Timing ends when it has taken this share of the best candidate's predicted time for all trials …"""
SHARE_IF_UNLIKELY = 0.05
"""… or this share, where the next candidate is of a kind that was never the fastest so far."""


@final
@dataclass(frozen=True, kw_only=True)
class Auto(Executor):
    """Times the executors on each group of trials and takes the fastest."""

    seconds: float = MEASURE_S
    """How long each candidate is timed, at most."""
    compiled: bool | None = None
    """Whether compiled steps are timed; None: where they can save time."""

    name = "auto"
    copies_rows = True

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ConfigError(f"auto: seconds must be above 0, got {self.seconds}")

    def run(self, recipe: Recipe, queue: Queue, on_event: OnEvent) -> None:
        self.run_groups(recipe, [queue], on_event)

    def run_groups(self, recipe: Recipe, queues: Sequence[Queue], on_event: OnEvent) -> None:
        """Choose for each group; groups with the same choice are trained together."""
        chosen: dict[Executor, list[Queue]] = {}
        several = len(queues) > 1  # then arrays run side by side, in one graph
        for number, queue in enumerate(queues):
            taken = take_parts(recipe, queue, WIDTH[recipe.torch_device.type], self.name)
            if not taken:
                continue
            choice = self.choose(recipe, taken, on_event, queue.stop_requested)
            if several:
                choice = choice._replace(made=None)  # free its memory for the next group
            if queue.stop_requested():
                return
            on_event({
                "event": "chose", "group": number, "executor": describe(choice.executor), "why": choice.why,
                "table": [candidate.to_dict() for candidate in choice.candidates],
            })  # fmt: skip
            if choice.made is not None and isinstance(choice.executor, Fused):
                return choice.executor.run_in(choice.made, recipe, queue, taken, on_event)
            chosen.setdefault(choice.executor, []).append(requeue(recipe, queue, taken))
        for executor, group in chosen.items():
            executor.run_groups(recipe, group, on_event)

    def choose(
        self,
        recipe: Recipe,
        taken: Sequence[Parts],
        on_event: OnEvent = lambda event: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Choice:
        """Time the candidates for these trials (all of one structure); `stop` is checked between candidates."""
        steps = sum(parts.steps for parts in taken)
        if steps < TOO_FEW_STEPS:
            why = f"one after another: {steps} steps in all are done before anything could be timed"
            return Choice(Sequential(), why, [])
        with precision_of(recipe):
            device_data = recipe.device_data_of(taken[0].task)
            found = probe(recipe, [parts.trial for parts in taken], device_data, stop=stop)
            on_event(found.to_event(len(taken)))
            timing = Timing(recipe, taken, device_data, found, self.seconds / 10)
            timed = self._time_all(timing, stop)
        choice = decide(timed, found, len(taken))
        return choice._replace(made=timing.made_for(choice.executor))

    def _time_all(self, timing: Timing, stop: Callable[[], bool]) -> list[Candidate]:
        timed: list[Candidate] = []
        began = time.perf_counter()
        for share, candidate in self._candidates(timing):
            left = min((c.total_s for c in timed), default=math.inf)
            if stop() or time.perf_counter() - began > share * left:
                break  # training is nearly as short as the search for a faster candidate
            timed.append(candidate())
            longest = max((c.total_s for c in timed if not c.why_not), default=0.0)
            timing.seconds = max(self.seconds / 10, min(self.seconds, SHARE_OF_ONE * longest))
        if timing.on_cpu and timed and not timed[0].why_not:
            timed.append(timing.processes(timed[0]))
        fused = [c for c in timed if c.executor.name == "fused" and not c.why_not]
        if fused and self._may_compile(timing, timed):
            timed.append(timing.fused(min(fused, key=lambda c: c.total_s).width, compiled=True))
        return timed

    def _candidates(self, timing: Timing) -> Iterator[tuple[float, Callable[[], Candidate]]]:
        """Candidates, the most promising first, each with the share of the predicted time at which timing ends.

        On the CPU `sequential` comes first: there it may be the fastest, and takes no time to start.
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

    def _may_compile(self, timing: Timing, timed: Sequence[Candidate]) -> bool:
        if self.compiled is not None:
            return self.compiled and timing.found.mode == "forward"
        if timing.on_cpu or timing.found.mode != "forward":
            return False
        left = min((c.total_s for c in timed if not c.why_not), default=0.0)
        return left * (1 - 1 / COMPILED_GAIN) > seconds_to_compile(timing.taken[0].model)
