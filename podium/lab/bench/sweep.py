"""Ways to train many models on one device, compared: microseconds per model-step and joules per trial.

    podium bench sweep --set data_dir=DATA --json

Every arm trains the same trials (same seeds, samples, precision; data on the device for all of them) and is timed in
steady state; start-up is reported separately. A row is one arm in one cell (task, number of trials, precision). Arms in
processes are timed with at most `most_processes` trials at a time; rows for more trials reuse that measurement and name
it in `same_as`. With `energy_s` (60 or more), each arm also runs that long after its warm-up in a window that reads
NVML's energy counter; joules per trial are for a trial of 10 epochs. Arms in this process come in random order.

A value that the device cannot measure is absent, with the reason. `auto_regret` is how much slower the arm that `auto`
would choose is than the fastest arm of the cell.
"""

from __future__ import annotations

import gc
import math
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from podium.errors import ConfigError, PodiumError
from podium.lab.bench.harness import check_names
from podium.records.manifest import hardware, versions
from podium.records.nvml import Gpu, open_gpu
from podium.records.window import ENERGY_WINDOW_S, Idle, Reading, Window, measure_idle
from podium.sweeps.executors.auto import Auto
from podium.sweeps.executors.base import Executor, State
from podium.sweeps.executors.candidate import describe
from podium.sweeps.executors.graphed import GraphedTrainer
from podium.sweeps.executors.timing import repeated, seconds_per_step
from podium.sweeps.fused.array import Array
from podium.sweeps.fused.captured_step import CapturedStep
from podium.sweeps.fused.widths import widest
from podium.sweeps.precision import precision_of, with_threads
from podium.sweeps.recipe import Recipe
from podium.sweeps.reference import ReferenceTrainer
from podium.sweeps.trial import GO, Evaluation, Outcome, Trial, Verdict
from podium.tasks import TASKS

IN_PROCESS = ("eager", "graph", "compiled", "streams", "fused", "fused-compiled")
APART = ("processes", "processes-graph", "mps", "mps-graph", "ray", "ray-mps")
"""Arms that start processes; `-graph`: each process captures its step in a CUDA graph."""
_EPOCHS = 10
_WARM_STEPS = 10
_FOR_EVER = 1_000_000


@dataclass(frozen=True)
class Cell:
    task: str
    trials: int
    precision: str


@dataclass(kw_only=True)
class Row:
    """One arm in one cell."""

    task: str
    trials: int
    precision: str
    executor: str
    us_per_model_step: float | None = None
    rounds_us: list[float] = field(default_factory=list)
    width: int = 0
    """How many models train at a time."""
    threads: int | None = None
    """Of each operation, on the CPU."""
    start_s: float | None = None
    """Seconds until the first step is done: captures, compilations, process starts."""
    joules_per_trial: float | None = None
    joules_per_trial_over_idle: float | None = None
    reading: dict[str, Any] = field(default_factory=dict)
    why_absent: str = ""
    same_as: str = ""


def bench_sweep(
    *,
    peers: Sequence[str] = (),
    rounds: int | None = None,
    tasks: str = "",
    trials: str = "4,16,64,256",
    arms: str = "",
    precisions: str = "tf32",
    data_dir: str = "",
    device: str = "auto",
    seconds: float = 1.0,
    energy_s: float = 0.0,
    most_processes: int = 0,
    auto: bool = True,
    seed: int = 1,
) -> dict[str, Any]:
    """Time the arms in every cell. `peers` are arms too; without `arms` and `peers`, all arms.

    `most_processes`: how many processes run at a time; 0 means 16 on a GPU and the number of cores on a CPU.
    """
    recipe_of = Recipes(data_dir, device)
    wanted = [*filter(None, arms.split(",")), *peers] or [*IN_PROCESS, *APART]
    check_names("arm of bench sweep", wanted, (*IN_PROCESS, *APART))
    if energy_s and energy_s < ENERGY_WINDOW_S:
        raise ConfigError(f"bench sweep: energy_s must be 0 or at least {ENERGY_WINDOW_S:.0f} seconds, got {energy_s}")
    named = [*filter(None, tasks.split(","))] or recipe_of.default_tasks()
    check_names("task of bench sweep", [name for name in named if ":" not in name], TASKS)
    counts = [int(n) for n in trials.split(",")]
    cells = [Cell(task, n, p) for task in named for p in precisions.split(",") for n in counts]
    bench = Bench(recipe_of, wanted, rounds or 3, seconds, energy_s, most_processes, random.Random(seed))
    rows = [row for cell in cells for row in bench.measure(cell)]
    chosen = [bench.judge(cell, rows) for cell in cells] if auto else []
    regrets = [cell["auto_regret"] for cell in chosen if cell["auto_regret"] is not None]
    return {
        "bench": "sweep",
        "device": bench.device_facts(),
        "versions": versions(),
        "hardware": hardware(),
        "rows": [asdict(row) for row in rows],
        "cells": chosen,
        "auto_within_10_percent": float(np.mean([r <= 0.1 for r in regrets])) if regrets else None,
        "ratios": _ratios(rows),
    }


class Recipes:
    def __init__(self, data_dir: str, device: str) -> None:
        self.data_dir, self.device = data_dir, device

    def default_tasks(self) -> list[str]:
        return ["mnist-mlp", "mnist-cnn", "cifar10-resnet20"] if self.data_dir else ["digits-mlp", "digits-cnn"]

    def __call__(self, task: str, precision: str, **settings: Any) -> Recipe:
        folder = None
        if self.data_dir and not task.startswith("digits"):
            folder = str(Path(self.data_dir) / task.partition("-")[0])
        return Recipe(task=task, data_dir=folder, device=self.device, precision=precision, **settings)  # type: ignore[arg-type]  # checked by Recipe


class Bench:
    def __init__(
        self,
        recipe_of: Recipes,
        arms: Sequence[str],
        rounds: int,
        seconds: float,
        energy_s: float,
        most_processes: int,
        shuffle: random.Random,
    ) -> None:
        self.recipe_of, self.arms, self.rounds, self.seconds, self.energy_s = recipe_of, arms, rounds, seconds, energy_s
        self.shuffle = shuffle
        self.gpu: Gpu | None = None
        self.idle: Idle | None = None
        on_gpu = recipe_of("digits-mlp", "fp32").torch_device.type == "cuda"
        self.most_processes = most_processes or (16 if on_gpu else len(os.sched_getaffinity(0)))
        if on_gpu:
            self.gpu = open_gpu(0)
            self.idle = None if self.gpu is None else _idle(self.gpu, 5.0 if energy_s else 0.5)
        self.apart: dict[tuple[str, str, str, int], Row] = {}

    def device_facts(self) -> dict[str, Any]:
        if self.gpu is None:
            return {"type": "cpu"}
        return {
            "type": "cuda", "name": self.gpu.name, "driver": self.gpu.driver,
            "power_limit_w": self.gpu.power_limit_w,
            "idle_w": None if self.idle is None else self.idle.power_w,
        }  # fmt: skip

    def measure(self, cell: Cell) -> list[Row]:
        """Measure all arms of a cell; those in this process in random order."""
        rows = {
            arm: Row(task=cell.task, trials=cell.trials, precision=cell.precision, executor=arm) for arm in self.arms
        }
        recipe = self.recipe_of(cell.task, cell.precision, options={"epochs": _FOR_EVER})
        trials = trials_of(cell.trials)
        with precision_of(recipe):
            order = [arm for arm in self.arms if arm in IN_PROCESS]
            self.shuffle.shuffle(order)
            for arm in order:
                self._in_process(arm, rows[arm], recipe, trials)
        for arm in self.arms:
            if arm in APART:
                rows[arm] = self._apart_row(arm, cell, rows[arm])
        return list(rows.values())

    def _in_process(self, arm: str, row: Row, recipe: Recipe, trials: Sequence[Trial]) -> None:
        began = time.perf_counter()
        try:
            runner = _Runner(arm, recipe, trials)
            runner.run(1)
            recipe.wait()
            row.start_s, row.width = time.perf_counter() - began, runner.width
            row.threads = self._threads(recipe, runner)
            with with_threads(row.threads):
                row.rounds_us = [runner.step_us(self.seconds) for _ in range(self.rounds)]
                row.us_per_model_step = float(np.median(row.rounds_us))
                self._read(row, runner.parts, lambda: runner.run_for(max(self.energy_s, 1.0)))
        except (PodiumError, RuntimeError) as error:
            row.why_absent = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        finally:
            runner = None  # type: ignore[assignment]  # frees its arrays and graphs
            gc.collect()
            if recipe.torch_device.type == "cuda":
                torch.cuda.empty_cache()

    def _threads(self, recipe: Recipe, runner: _Runner) -> int | None:
        """On the CPU, one thread or all, whichever is faster: threads cost small models more than they gain."""

        if recipe.torch_device.type == "cuda":
            return None
        found = {}
        for count in {1, torch.get_num_threads()}:
            with with_threads(count):
                found[count] = runner.step_us(0.1)
        return min(found, key=lambda count: found[count])

    def _read(self, row: Row, parts: Any, work: Callable[[], int]) -> None:
        """Run `work` in a measured window; it returns how many model-steps it did."""
        with Window(self.gpu, idle=self.idle) as window:
            done = work()
        assert window.reading is not None
        self._note(row, parts, window.reading, done)

    def _note(self, row: Row, parts: Any, reading: Reading, done: int) -> None:
        row.reading = asdict(reading)
        if self.energy_s and reading.energy_j is not None and done:
            steps = _EPOCHS * parts.steps_per_epoch
            row.joules_per_trial = reading.energy_j / done * steps
            if reading.energy_over_idle_j is not None:
                row.joules_per_trial_over_idle = reading.energy_over_idle_j / done * steps

    # Arms in processes of their own.

    def _apart_row(self, arm: str, cell: Cell, row: Row) -> Row:
        count = min(cell.trials, self.most_processes)
        key = (arm, cell.task, cell.precision, count)
        if key in self.apart:
            known = self.apart[key]
            return Row(**{**asdict(known), "trials": cell.trials, "same_as": f"{known.trials} trials"})
        row.width = count
        recipe = self.recipe_of(cell.task, cell.precision, options={"epochs": _FOR_EVER})
        try:
            executor = _executor(arm, count)
            watch = _Watch(
                trials_of(count), count, self.rounds, max(self.seconds, 2.0), self.energy_s, self.gpu, self.idle
            )
            began = time.perf_counter()
            executor.run(recipe, watch, watch.on_event)
            if watch.ready_at is None or not watch.rounds_us:
                raise PodiumError(
                    f"it took no measurable step in {time.perf_counter() - began:.0f} s: {watch.troubles}"
                )
            row.start_s = watch.ready_at - began
            row.rounds_us = watch.rounds_us
            row.us_per_model_step = float(np.median(watch.rounds_us))
            if watch.reading is not None:
                self._note(row, recipe.make(trials_of(1)[0]), watch.reading, watch.read_steps)
        except (PodiumError, RuntimeError, OSError) as error:
            row.why_absent = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        self.apart[key] = row
        return row

    # What `auto` would have done.

    def judge(self, cell: Cell, rows: Sequence[Row]) -> dict[str, Any]:
        mine = [r for r in rows if (r.task, r.trials, r.precision) == (cell.task, cell.trials, cell.precision)]
        timed = [r for r in mine if r.us_per_model_step is not None]
        best = min(timed, key=lambda r: r.us_per_model_step or math.inf)
        compiled = any(r.executor == "fused-compiled" and r.us_per_model_step is not None for r in mine)
        # Arms are timed in steady state: if a compiled arm was timed, trials are long enough for compilation to pay.
        epochs = _EPOCHS if not compiled else _FOR_EVER
        recipe = self.recipe_of(cell.task, cell.precision, options={"epochs": epochs})
        began = time.perf_counter()
        choice = Auto(compiled=compiled).choose(recipe, [recipe.make(trial) for trial in trials_of(cell.trials)])
        took = time.perf_counter() - began
        arm = arm_of(choice.executor)
        chosen = next((r for r in timed if r.executor == arm), None)
        regret = None
        if chosen is not None and best.us_per_model_step and chosen.us_per_model_step:
            regret = chosen.us_per_model_step / best.us_per_model_step - 1
        return {
            "task": cell.task, "trials": cell.trials, "precision": cell.precision, "best": best.executor,
            "best_us_per_model_step": best.us_per_model_step, "auto": describe(choice.executor), "auto_arm": arm,
            "auto_regret": regret, "why": choice.why, "calibration_s": took,
        }  # fmt: skip


class _Runner:
    """An arm in this process, stepping."""

    def __init__(self, arm: str, recipe: Recipe, trials: Sequence[Trial]) -> None:
        self.recipe = recipe
        made = [recipe.make(trial) for trial in trials]
        self.parts = made[0]
        device_data = recipe.device_data_of(self.parts.task)
        self.width = 1
        if arm == "eager":
            self._step = repeated(ReferenceTrainer(recipe, trials[0], device_data, made[0]).step)
            return
        if recipe.torch_device.type != "cuda" and arm not in ("streams", "fused"):
            raise ConfigError(f"{arm}: needs a GPU")
        if arm in ("graph", "compiled"):
            self._step = repeated(
                GraphedTrainer(recipe, trials[0], device_data, made[0], compiled=arm == "compiled").step
            )
            return
        if arm == "streams":
            self.width = min(32, len(trials))
            arrays = [Array(recipe, parts, device_data, 1).fill([parts]) for parts in made[: self.width]]
        else:
            self.width = widest(recipe, made[0], device_data, len(trials))
            array = Array(recipe, made[0], device_data, self.width, compiled=arm == "fused-compiled")
            arrays = [array.fill(made[: self.width])]
        self._step = CapturedStep(arrays).run  # samples repeat: the window is as long as an order

    def run(self, steps: int) -> None:
        self._step(steps)

    def step_us(self, seconds: float) -> float:
        """Microseconds per model-step."""
        return seconds_per_step(self.run, self.recipe.wait, seconds) / self.width * 1e6

    def run_for(self, seconds: float) -> int:
        """Make steps for `seconds`; returns how many model-steps it did."""
        at_a_time = max(1, int(0.05 / (self.step_us(0.05) * self.width / 1e6)))
        end, done = time.perf_counter() + seconds, 0
        while time.perf_counter() < end:
            self.run(at_a_time)
            self.recipe.wait()
            done += at_a_time
        return done * self.width


class _Watch:
    """A trial queue that hands out endless trials, times their steps, and requests a stop when done."""

    def __init__(
        self,
        trials: Sequence[Trial],
        count: int,
        rounds: int,
        seconds: float,
        energy_s: float,
        gpu: Gpu | None,
        idle: Idle | None,
    ) -> None:
        self.waiting, self.count, self.rounds = list(trials), count, rounds
        self.seconds, self.energy_s = seconds, energy_s
        self.gpu, self.idle = gpu, idle
        self.ready_at: float | None = None
        self.rounds_us: list[float] = []
        self.reading: Reading | None = None
        self.read_steps = 0
        self.troubles: list[str] = []
        self._mark: tuple[float, int] | None = None
        self._window: Window | None = None
        self._window_from = 0
        self._stop = False

    def take(self) -> Trial | None:
        return self.waiting.pop(0) if self.waiting else None

    def expects_more(self) -> bool:
        return bool(self.waiting)

    def report(self, trial: Trial, evaluation: Evaluation) -> Verdict:
        return GO

    def report_all(self, rows: Sequence[tuple[Trial, Evaluation]]) -> list[Verdict | ConfigError]:
        return [self.report(trial, evaluation) for trial, evaluation in rows]

    def begin_again(self, trial: Trial) -> None:
        pass

    def hand_in(self, outcome: Outcome, state: State | None) -> None:
        if outcome.status != "finished":
            self.troubles.append(outcome.why)
            self._stop = True

    def stop_requested(self) -> bool:
        return self._stop

    def on_event(self, event: dict[str, Any]) -> None:
        if event["event"] != "progress":
            return
        steps, now = event["steps"], time.perf_counter()
        if self.ready_at is None:
            if len(steps) == self.count and min(steps) >= _WARM_STEPS:
                self.ready_at, self._mark = now, (now, sum(steps))
            return
        assert self._mark is not None
        if len(self.rounds_us) < self.rounds:
            since, before = self._mark
            if now - since >= self.seconds:
                self.rounds_us.append((now - since) / max(1, sum(steps) - before) * 1e6)
                self._mark = (now, sum(steps))
            return
        if self._window is None:
            self._window, self._window_from, self._mark = Window(self.gpu, idle=self.idle), sum(steps), (now, 0)
            self._window.begin()
        elif now - self._mark[0] >= max(self.energy_s, 1.0):
            self.reading, self.read_steps = self._window.end(), sum(steps) - self._window_from
            self._stop = True


def _idle(gpu: Gpu, seconds: float) -> Idle:
    """Memory before this process has a CUDA context; power with one, since every arm has one."""
    before = measure_idle(gpu, 0.2)
    torch.zeros(1, device="cuda")
    return measure_idle(gpu, seconds)._replace(memory_bytes=before.memory_bytes)


def trials_of(count: int) -> list[Trial]:
    """`count` trials of different learning rates, small enough that none of them ever diverges."""
    return [Trial(number=i, seed=i, options={"lr": 0.001 * (1 + i % 16)}) for i in range(count)]


def _executor(arm: str, count: int) -> Executor:
    from podium.sweeps.executors.mps import Mps
    from podium.sweeps.executors.processes import Processes
    from podium.sweeps.executors.ray import RayActors

    mode: Any = "graph" if arm.endswith("-graph") else "eager"
    if arm.startswith("processes"):
        return Processes(count=count, mode=mode)
    if arm.startswith("mps"):
        return Mps(count=count, mode=mode)
    return RayActors(count=count, mps=arm == "ray-mps")


def arm_of(executor: Any) -> str:
    """The arm that times this executor."""
    if executor.name == "sequential":
        return str(executor.mode)
    if executor.name == "fused":
        return "fused-compiled" if executor.compiled else "fused"
    return str(executor.name)


def _ratios(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Time and energy of each other arm over those of the fastest fused arm."""

    found = []
    for cell in sorted({(r.task, r.trials, r.precision) for r in rows}):
        mine = {r.executor: r for r in rows if (r.task, r.trials, r.precision) == cell and r.us_per_model_step}
        fused = [mine[name] for name in ("fused", "fused-compiled") if name in mine]
        if not fused:
            continue
        best = min(fused, key=lambda r: r.us_per_model_step or math.inf)
        ratios = {
            name: {
                "time": (row.us_per_model_step or math.nan) / (best.us_per_model_step or math.nan),
                "energy": (
                    row.joules_per_trial / best.joules_per_trial
                    if row.joules_per_trial and best.joules_per_trial
                    else None
                ),
            }
            for name, row in mine.items()
            if row is not best
        }
        found.append({"task": cell[0], "trials": cell[1], "precision": cell[2], "fused": best.executor, "over": ratios})
    return found
