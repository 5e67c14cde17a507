"""What a forward and backward pass takes on one core, measured: fixed + per sample × samples.

Time is the processor's, of one thread: what a pass takes on a node that has nothing else to do, also where this machine
has. The wall's is recorded beside it; where the two differ, somebody else was at work. Processor time does know of
neighbours that share caches and memory with it, so a profile can be measured with other processes doing the same
beside it, as nodes on one machine will.

Gradients are copied to a buffer as they come, as Podium does. The first pass at each size is left out.
"""

from __future__ import annotations

import importlib
import multiprocessing
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from podium.errors import ConfigError, MissingExtra, PodiumError

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess
    from multiprocessing.synchronize import Event

    from podium.task import Task

_START_S = 60.0
_END_S = 30.0


class Estimate(NamedTuple):
    """A number and its 95 % interval; none where it is held at zero."""

    value: float
    low: float | None = None
    high: float | None = None


class Pass(NamedTuple):
    """One measured pass."""

    batch: int
    cpu_s: float
    wall_s: float


@dataclass(frozen=True, kw_only=True)
class Profile:
    """How fast one core trains one model."""

    per_sample_s: Estimate
    per_pass_s: Estimate
    cv: float
    """Coefficient of variation of passes over the same number of samples."""
    update_s: float
    """Median of an optimizer's step."""
    bytes: int
    """Of the gradients."""
    beside: int
    """How many other processes did the same meanwhile."""
    passes: tuple[Pass, ...]

    @property
    def memory_gbs(self) -> float:
        """What a cluster file calls the rate at which an optimizer passes over parameters."""
        return self.bytes / self.update_s / 1e9

    def seconds(self, samples: float) -> float:
        return self.per_pass_s.value + self.per_sample_s.value * samples

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        found["per_sample_s"], found["per_pass_s"] = list(self.per_sample_s), list(self.per_pass_s)
        found["passes"] = [[batch, round(cpu, 5), round(wall, 5)] for batch, cpu, wall in self.passes]
        return found

    @staticmethod
    def of(row: Mapping[str, Any]) -> Profile:
        """From what `to_dict` made."""
        return Profile(
            per_sample_s=Estimate(*row["per_sample_s"]),
            per_pass_s=Estimate(*row["per_pass_s"]),
            cv=row["cv"],
            update_s=row["update_s"],
            bytes=row["bytes"],
            beside=row["beside"],
            passes=tuple(Pass(*one) for one in row["passes"]),
        )


def measure_profile(
    task: str,
    options: Mapping[str, Any] | None = None,
    *,
    batches: Sequence[int] = (8, 16, 32, 64, 100),
    repeats: int = 6,
    beside: int = 0,
) -> Profile:
    """Time passes of a task's model over its own data at these sizes, in turns, with so many others doing the same."""
    from podium.task import load_task

    if repeats < 2 or len(set(batches)) < 2:
        raise ConfigError(f"profile: needs at least 2 repeats and 2 batch sizes, got {repeats} and {len(set(batches))}")
    given = {**(options or {}), "samples": max(batches)}
    with _others(task, given, max(batches), beside), _one_thread():
        runner = _Runner(load_task(task, given))
        found, updates = list[Pass](), list[float]()
        for turn in range(repeats + 1):
            for batch in batches:
                one, update_s = runner.go(batch)
                if turn:
                    found.append(one)
                    updates.append(update_s)
    return summarise(found, bytes=runner.bytes, update_s=float(np.median(updates)), beside=beside)


def summarise(passes: Sequence[Pass], *, bytes: int, update_s: float, beside: int) -> Profile:
    """Least squares of relative residuals; a fixed part below zero is held at zero."""
    batch = np.array([one.batch for one in passes], dtype=np.float64)
    took = np.array([one.cpu_s for one in passes])
    fixed, per_sample = _fit(batch, took)
    groups = [took[batch == size] for size in np.unique(batch)]
    variances = [float(group.var(ddof=1)) / float(group.mean()) ** 2 for group in groups if len(group) > 1]
    return Profile(
        per_sample_s=per_sample,
        per_pass_s=fixed,
        cv=float(np.sqrt(np.mean(variances))),
        update_s=update_s,
        bytes=bytes,
        beside=beside,
        passes=tuple(passes),
    )


def _fit(batch: np.ndarray, took: np.ndarray) -> tuple[Estimate, Estimate]:
    both = np.column_stack([1 / took, batch / took])
    result = _ols(both)
    if result.params[0] >= 0:
        (fixed, per_sample), ends = result.params, np.asarray(result.conf_int())
        return Estimate(float(fixed), *map(float, ends[0])), Estimate(float(per_sample), *map(float, ends[1]))
    result = _ols(both[:, 1:])
    return Estimate(0.0), Estimate(float(result.params[0]), *map(float, np.asarray(result.conf_int())[0]))


def _ols(columns: np.ndarray) -> Any:
    try:
        module = importlib.import_module("statsmodels.regression.linear_model")
    except ImportError:
        raise MissingExtra("statsmodels", "study", "a profile") from None
    return module.OLS(np.ones(len(columns)), columns).fit()


class _Runner:
    """A model in training, a pass at a time."""

    def __init__(self, task: Task) -> None:
        import torch

        torch.manual_seed(0)
        self.task, self.model = task, task.model()
        self.optimizer, self.train = task.optimizer(self.model), task.data().train
        params = list(self.model.parameters())
        self.bytes = sum(p.nbytes for p in params)
        for p in params:
            p.register_post_accumulate_grad_hook(_Land(p))

    def go(self, batch: int) -> tuple[Pass, float]:
        inputs, targets = self.train.gather(np.arange(batch))
        self.optimizer.zero_grad()
        wall, cpu = time.perf_counter(), time.process_time()
        self.task.loss(self.model(inputs), targets).backward()
        done = Pass(batch, time.process_time() - cpu, time.perf_counter() - wall)
        cpu = time.process_time()
        self.optimizer.step()
        return done, time.process_time() - cpu


class _Land:
    """Copies a parameter's gradient to a place of its own."""

    def __init__(self, parameter: Any) -> None:
        import torch

        self.place = torch.zeros_like(parameter)

    def __call__(self, parameter: Any) -> None:
        self.place.copy_(parameter.grad)


@contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _others(task: str, options: Mapping[str, Any], batch: int, count: int) -> Iterator[None]:
    """So many processes that train the same model for as long as the `with` block lasts."""
    if not count:
        yield
        return
    context = multiprocessing.get_context("spawn")
    over, ready = context.Event(), [context.Event() for _ in range(count)]
    crowd: list[BaseProcess] = [
        context.Process(target=_keep_busy, args=(task, dict(options), batch, over, one), daemon=True) for one in ready
    ]
    for process in crowd:
        process.start()
    try:
        for one in ready:
            if not one.wait(_START_S):
                raise PodiumError(f"profile: a process beside it must begin within {_START_S:g} s, and has not")
        yield
    finally:
        over.set()
        for process in crowd:
            process.join(_END_S)
            if process.is_alive():
                process.kill()
                process.join(_END_S)


def _keep_busy(task: str, options: Mapping[str, Any], batch: int, over: Event, ready: Event) -> None:
    from podium.task import load_task

    with _one_thread():
        runner = _Runner(load_task(task, options))
        while not over.is_set():
            runner.go(min(batch, 32))
            ready.set()
