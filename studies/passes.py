"""What a forward and backward pass takes on one core: fixed + per sample × samples. Cluster files are made of it.

    podium compare studies/passes.py                (an idle machine)
    podium compare studies/passes.py --size small

Time is the processor's, of one thread: what a pass takes on a node that has nothing else to do. The wall's is recorded
beside it; where the two differ, another process was at work. Processes that share caches and memory slow each other
all the same, so the second level measures while another process does the same, as nodes on one machine will. Gradients
are copied to a buffer as they come, as Podium does. The first pass at each size is left out.
"""

from __future__ import annotations

import select
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

import podium

BATCHES, REPEATS = (8, 16, 32, 64, 100), 6
START_S = 120.0
SMALL = {"batches": (4, 8, 12), "repeats": 3}


def study(size: str | None) -> podium.Study:
    if size not in (None, "small"):
        raise podium.PodiumError(f"passes has one size, small, got {size}")
    return podium.Study(
        name="passes",
        question="How long does a pass over so many samples take on one core?",
        runs=profile,
        settings=SMALL if size else {"batches": BATCHES, "repeats": REPEATS},
        factors={
            "model": {
                "resnet50": {"task": "tiny-imagenet-resnet50", "options": {"width": 8} if size else {}},
                "efficientnet-b0": {"task": "tiny-imagenet-efficientnet-b0", "options": {}},
            },
            "where": {"alone": {"beside": 0}, "beside": {"beside": 1}},
        },
        replications=1,
        maximize=False,
    )


def profile(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Time passes of a task's model at these sizes, in turns, with as many others doing the same."""
    batches, repeats = list(settings["batches"]), int(settings["repeats"])
    command = [sys.executable, __file__, settings["task"], str(min(max(batches), 32))]
    others = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(settings["beside"])]
    try:
        for other in others:
            assert other.stdout is not None
            began = select.select([other.stdout], [], [], START_S)[0] and other.stdout.readline()
            if not began:
                raise podium.PodiumError(f"the process beside must make its first pass within {START_S} s, and has not")
        runner = _Runner(settings["task"], {**settings["options"], "samples": max(batches)})
        taken = [runner.go(batch) for _ in range(repeats + 1) for batch in batches][len(batches) :]
    finally:
        for other in others:
            other.kill()
            other.communicate()
    passes = [(batch, round(cpu, 5), round(wall, 5)) for batch, cpu, wall, _ in taken]
    update_s = float(np.median([update for *_, update in taken]))
    return {**summary(passes), "update_s": update_s, "bytes": runner.bytes, "beside": settings["beside"]}


def summary(passes: Sequence[tuple[int, float, float]]) -> dict[str, Any]:
    """Least squares of relative residuals with 95 % intervals; a fixed part below zero is held at zero."""
    from statsmodels.regression.linear_model import OLS

    batch, took = np.array([one[0] for one in passes], float), np.array([one[1] for one in passes])
    columns = np.column_stack([1 / took, batch / took])
    found = OLS(np.ones(len(took)), columns).fit()
    held = found.params[0] < 0
    if held:
        found = OLS(np.ones(len(took)), columns[:, 1:]).fit()
    each = [[float(x), *map(float, ends)] for x, ends in zip(found.params, found.conf_int(), strict=True)]
    fixed, per_sample = ([0.0, None, None], each[0]) if held else each
    groups = [took[batch == size] for size in np.unique(batch)]
    cv = float(np.sqrt(np.mean([group.var(ddof=1) / group.mean() ** 2 for group in groups])))
    numbers = {"per_sample_ms": 1e3 * per_sample[0], "per_pass_ms": 1e3 * fixed[0], "cv": cv}
    fit = {"per_sample_s": per_sample, "per_pass_s": fixed, "cv": cv, "passes": [list(one) for one in passes]}
    wall = sum(one[2] for one in passes) / sum(one[1] for one in passes)
    return {"metrics": {**numbers, "wall_over_cpu": wall}, "seconds": sum(one[2] for one in passes), **fit}


class _Runner:
    """A model in training on one thread, a pass at a time."""

    def __init__(self, task: str, options: Mapping[str, Any]) -> None:
        import torch

        from podium.task import load_task

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.task = load_task(task, dict(options))
        self.model, self.train = self.task.model(), self.task.data().train
        self.optimizer = self.task.optimizer(self.model)
        self.bytes = sum(p.nbytes for p in self.model.parameters())
        places = {p: torch.zeros_like(p) for p in self.model.parameters()}

        def land(p: torch.Tensor) -> None:
            places[p].copy_(p.grad)

        for p in places:
            p.register_post_accumulate_grad_hook(land)

    def go(self, batch: int) -> tuple[int, float, float, float]:
        """Samples, processor and wall seconds of a pass, processor seconds of an update."""
        inputs, targets = self.train.gather(np.arange(batch))
        self.optimizer.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        self.task.loss(self.model(inputs), targets).backward()
        passed, at = time.process_time() - cpu, time.perf_counter() - wall
        cpu = time.process_time()
        self.optimizer.step()
        return batch, passed, at, time.process_time() - cpu


if __name__ == "__main__":  # the process beside
    _runner = _Runner(sys.argv[1], {"samples": int(sys.argv[2])})
    _runner.go(int(sys.argv[2]))
    print(flush=True)
    while True:
        _runner.go(int(sys.argv[2]))
