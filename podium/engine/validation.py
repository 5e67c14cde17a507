"""Validation inside a run, on the first worker: at the end of every `eval_every`-th epoch, and of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from podium.data.base import Dataset, read_pair
from podium.engine.device import to_device
from podium.engine.modes import evaluating
from podium.engine.pytree import join_rows, map_tensors

if TYPE_CHECKING:
    from podium.engine.recovery import Control
    from podium.engine.segment import SegmentLoop
    from podium.task import Task


class Validation:
    """When one worker last validated, and the result."""

    def __init__(self, task: Task, test: Dataset, every: int) -> None:
        """`every`: epochs between two validations; 0: only at the end."""
        self._task, self._test, self._every = task, test, every
        self.at = -1
        """The position of the last validation."""
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self._began_ns = self._took_ns = 0

    def begin(self, now_ns: int) -> None:
        """Training time is counted from here, without validations."""
        self._began_ns = now_ns

    def is_due(self, position: int, samples: int) -> bool:
        """Whether an epoch has ended that was not validated; `position` may be beyond its end, as under leases."""
        if self._every == 0:
            return False
        due = position // samples // self._every * self._every * samples
        return due > 0 and self.at < due

    def run_when_due(self, loop: SegmentLoop) -> None:
        """Validate if that is due. Collective where workers go through steps together."""
        course, position = loop.phases.course, loop.worker.position
        if position >= course.end or not self.is_due(position, course.samples):
            return
        together = not loop.strategy.cadence.by_leases
        if together:
            loop.sync_buffers()
        self.run(loop)
        if together and loop.comm.size > 1 and loop.phases.is_led:
            loop.phases.share()
        elif together and loop.comm.size > 1:
            loop.comm.barrier()  # here, so that the wait for the first worker does not count as part of a step

    def run(self, loop: SegmentLoop) -> None:
        """Validate now."""
        worker, clock = loop.worker, loop.comm.clock
        self.at = worker.position
        if loop.comm.index != 0:
            return
        began = clock.now_ns()
        with busy(loop.control, "validation"), worker.generators.computing():
            self._measure(worker.model, worker.replica.device)
            worker.replica.step_check.after_validation()
        now, course = clock.now_ns(), loop.phases.course
        facts: dict[str, Any] = {
            "step": course.step_at(worker.position),
            "epoch": worker.position / course.samples,
            "position": worker.position,
            "loss": self.loss,
            "metrics": self.metrics,
        }
        waited = not loop.strategy.cadence.by_leases
        loop.recorder.write("eval", now, **facts, eval_ns=now - began, waited=waited)
        assert self.loss is not None
        loop.phases.saw_validation(self.loss, self.metrics)
        self._took_ns += now - began if waited else 0
        loop.control.progress({"event": "eval", **facts, "seconds": (now - self._began_ns - self._took_ns) / 1e9})

    def _measure(self, model: nn.Module, device: torch.device) -> None:
        task = self._task
        outputs, targets = predict(model, self._test, task.eval_batch_size, device)
        self.loss = float(task.loss(outputs, targets))
        self.metrics = {name: float(metric(outputs, targets)) for name, metric in task.metrics.items()}

    def done_before(self, position: int) -> None:
        """Validations up to here were done, in this run or in the one that it resumes."""
        self.at = position

    def regrouped(self, at: int, position: int, first_is_gone: bool) -> None:
        """The workers regrouped: the most advanced of them last validated `at`."""
        # If the first worker is gone and no step was done since, it may not have finished validating.
        self.at = -1 if first_is_gone and at == position else at

    def share(self, loop: SegmentLoop) -> None:
        """Take the first worker's position: asynchronous workers pass the end of an epoch at different times."""
        at = torch.tensor([self.at], dtype=torch.int64)
        loop.comm.wait(loop.comm.broadcast(at, loop.comm.workers[0]))
        self.at = int(at.item())


@contextmanager
def busy(control: Control, what: str) -> Iterator[None]:
    """Report why this worker makes the other workers wait."""
    control.busy(what)
    try:
        yield
    finally:
        control.busy(None)


@torch.no_grad()
def predict(model: nn.Module, dataset: Dataset, batch_size: int, device: torch.device) -> tuple[Any, Any]:
    """The model's outputs and the targets over a whole data set, on the CPU; leaves the model unchanged."""
    outputs, targets = [], []
    with evaluating(model):
        for start in range(0, len(dataset), batch_size):
            x, y = read_pair(dataset, np.arange(start, min(start + batch_size, len(dataset))))
            outputs.append(map_tensors(_to_cpu, model(to_device(x, device))))
            targets.append(y)
    return join_rows(outputs), join_rows(targets)


def _to_cpu(output: Tensor) -> Tensor:
    """On the CPU, and not in half precision: metrics add up many of them."""
    return output.cpu().float() if output.dtype in (torch.float16, torch.bfloat16) else output.cpu()
