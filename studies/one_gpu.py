"""Driver, runtime, framework: three levels at which many trainings share one GPU, in steady state.

    podium compare studies/one_gpu.py --data-dir DIR --budget-s 560     # a GPU; the same command continues
    podium compare studies/one_gpu.py --size small                      # digits, on a CPU

`DIR/mnist` and `DIR/cifar10` hold the data. A run times one arm in one cell (task, number of trials, precision) by
`podium.lab.bench.sweep`; whole sweeps are `one_gpu_sweeps.toml`. `--size full` has all arms.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from functools import cache
from itertools import product
from typing import Any

import torch

from podium import Study
from podium.errors import ConfigError, UnknownName
from podium.lab.bench.sweep import Bench, Cell, Recipes, arm_of, trials_of
from podium.sweeps.executors.auto import Auto
from podium.sweeps.executors.candidate import describe

ALONE = ("eager", "graph", "compiled")
"""One model at a time: the number of trials does not change a step."""
APART = ("processes", "processes-graph", "mps", "mps-graph", "ray", "ray-mps")
ARMS = (*ALONE, *APART, "streams", "fused", "fused-compiled", "auto")
MAIN = {"mnist-mlp": 64, "mnist-cnn": 64, "cifar10-resnet20": 16, "digits-mlp": 8, "digits-cnn": 8}
"""The number of trials at which all arms of a task are compared."""
MOST_PROCESSES, MOST_BRANCHES = 16, 32
"""Processes have one of the machine's 16 cores each: more would wait for each other. Branches are of one graph."""
CORE = """
energy mnist-mlp main tf32: fused-compiled mps-graph ray
energy mnist-cnn,cifar10-resnet20 main tf32: fused-compiled mps-graph
times mnist-mlp main tf32: fused streams mps graph eager processes ray-mps auto
times mnist-cnn,cifar10-resnet20 main tf32: fused streams graph mps ray processes eager
times mnist-mlp,mnist-cnn 4,16 tf32: fused streams
times mnist-mlp 256 tf32: fused fused-compiled
times mnist-cnn 256 tf32: fused
times cifar10-resnet20 64 tf32: fused
times mnist-cnn,cifar10-resnet20 main bf16: fused-compiled"""
"""What fits into 25 minutes of an H200. Energy first, of each level's best arm, which is timed in the same run."""
FULL = """
energy mnist-mlp main tf32: mps graph fused streams eager ray-mps processes processes-graph compiled
energy mnist-cnn,cifar10-resnet20 main tf32: mps graph ray eager
times mnist-cnn,cifar10-resnet20 main bf16: fused streams graph mps"""
SMALL = """
energy digits-mlp main fp32: fused
times digits-mlp,digits-cnn main fp32: fused eager processes
times digits-mlp,digits-cnn 2 fp32: fused
times digits-mlp main fp32: fused-compiled auto"""
Key = tuple[str, str, int, str, str]
"""Part, task, trials, precision, arm."""


def keys(table: str) -> Iterator[Key]:
    for line in table.strip().splitlines():
        where, _, arms = line.partition(":")
        part, tasks, counts, precision = where.split()
        for task, count, arm in product(tasks.split(","), counts.split(","), arms.split()):
            yield part, task, MAIN[task] if count == "main" else int(count), precision, arm


def rest() -> Iterator[Key]:
    """Whatever else the device may do, without measurements that would only repeat another one."""
    for task in ("mnist-mlp", "mnist-cnn", "cifar10-resnet20"):
        for trials in (4, 16, 64, 256):
            yield from (("times", task, trials, "tf32", arm) for arm in ARMS if not repeats(task, trials, arm))


def repeats(task: str, trials: int, arm: str) -> bool:
    if arm in ALONE:
        return trials != MAIN[task]
    if arm in APART:
        return trials != MAIN[task] and (trials > MOST_PROCESSES or (trials == MOST_PROCESSES and MAIN[task] > trials))
    return arm == "streams" and trials > max(MAIN[task], 256 if task == "mnist-mlp" else MOST_BRANCHES)


SIZES = {None: [*keys(CORE)], "full": [*keys(CORE), *keys(FULL), *rest()], "small": [*keys(SMALL)]}


def study(size: str | None = None) -> Study:
    if size not in SIZES:
        raise UnknownName("size", str(size), ["full", "small"])
    wanted = SIZES[size]
    parts, tasks, counts, precisions = (list(dict.fromkeys(key[at] for key in wanted)) for at in range(4))
    quick = {"device": "cpu", "seconds": 0.1, "energy_s": 1.0, "reading_s": 1.0, "most_processes": 2}
    long = {"device": "cuda", "seconds": 0.4, "energy_s": 60.0, "reading_s": 3.0, "most_processes": MOST_PROCESSES}
    return Study(
        name="one-gpu",
        question="At which level should many trainings share one GPU: driver, runtime or framework?",
        settings={"rounds": 3, "data_dir": "", **(quick if size == "small" else long)},
        factors={"arm": ARMS, "part": parts, "task": tasks, "trials": sorted(counts), "precision": precisions},
        keep=lambda at: tuple(at[name] for name in ("part", "task", "trials", "precision", "arm")) in wanted,
        runs=measure,
        replications=1,
        retries=0,
        maximize=False,
        responses=["start_s", "j", "reading.sm_util", "reading.dram_bw_util", "reading.power_w"],
    )


@cache
def open_bench(data_dir: str, device: str, rounds: int, seconds: float, most_processes: int) -> Bench:
    """One for all runs: it reads memory before this process has a context, and that can be read but once."""
    if device == "cuda" and not (torch.cuda.is_available() and data_dir):
        raise ConfigError("one_gpu: needs a GPU and --data-dir with mnist and cifar10; --size small runs on a CPU")
    return Bench(Recipes(data_dir, device), (), rounds, seconds, 0.0, most_processes, random.Random(1))


def measure(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """One arm in one cell: microseconds per model-step by round, start-up, what the device's counters read."""
    numbers = int(settings["rounds"]), float(settings["seconds"]), int(settings["most_processes"])
    bench = open_bench(str(settings["data_dir"] or ""), str(settings["device"]), *numbers)
    task, trials, arm = settings["task"], int(settings["trials"]), settings["arm"]
    recipe = bench.recipe_of(task, settings["precision"], **({"options": {"epochs": 10**6}} if arm == "auto" else {}))
    try:
        if arm == "auto":
            return choice(recipe, trials)
        window = "energy_s" if settings["part"] == "energy" else "reading_s"
        bench.arms, bench.energy_s = (arm,), float(settings[window]) * (trials == MAIN[task])
        bench.apart.clear()
        (row,) = bench.measure(Cell(task, trials, settings["precision"]))
    finally:
        torch.compiler.reset()  # so that no arm finds another one's code, nor runs into a limit on how often
    if row.us_per_model_step is None:
        raise ConfigError(row.why_absent)
    # Joules are those of a trial of ten epochs, as `podium bench sweep` has them.
    steps = 10 * recipe.make(trials_of(1)[0]).steps_per_epoch
    return {
        "metrics": {"us": row.us_per_model_step}, "us_low": min(row.rounds_us), "us_high": max(row.rounds_us),
        "rounds_us": row.rounds_us, "width": row.width, "start_s": row.start_s, "steps_per_trial": steps,
        "j": row.joules_per_trial, "j_over_idle": row.joules_per_trial_over_idle, "reading": row.reading,
        "device": bench.device_facts(),
    }  # fmt: skip


def choice(recipe: Any, trials: int) -> dict[str, Any]:
    """What `auto` would choose for trials so long that starting counts for nothing."""
    began = time.perf_counter()
    chosen = Auto().choose(recipe, [recipe.make(trial) for trial in trials_of(trials)])
    facts = {"chosen": describe(chosen.executor), "chosen_arm": arm_of(chosen.executor), "said": chosen.why}
    return {**facts, "calibration_s": time.perf_counter() - began}


if __name__ == "__main__":
    raise SystemExit("podium compare studies/one_gpu.py")
