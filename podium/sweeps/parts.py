"""One trial, built: its model, optimizer and samples, and the structure by which trials are grouped."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.data.order import GlobalOrder
from podium.engine.optim import has_step_hooks
from podium.engine.parts import check_parts
from podium.sweeps.fused.dropout import CountedDropout
from podium.sweeps.fused.losses import lifted
from podium.sweeps.fused.structure import MAY_BE_ABSENT, callable_key, module_key, optimizer_key
from podium.sweeps.trial import Evaluation, Trial
from podium.task import Task


class Structure(NamedTuple):
    """Trials share an array if all of this is equal."""

    model: Any
    optimizer: Any
    loss: Any
    data: Any
    batch_size: int
    clipped: bool
    scheduled: bool
    dropped: bool
    """Whether any layer may use dropout."""
    autocast: str
    hooked: bool
    """Whether there are hooks on parameters or on the optimizer."""


@dataclass(kw_only=True)
class Parts:
    """One trial, built."""

    trial: Trial
    task: Task
    model: nn.Module
    optimizer: Optimizer
    batch_size: int
    steps_per_epoch: int
    steps: int
    train: np.ndarray
    """The training samples, as indices into the task's training data."""
    valid: np.ndarray | None
    """The validation samples, as indices into the training data; None: the task's test data."""
    order: GlobalOrder

    @functools.cached_property
    def structure(self) -> Structure:
        """The structure of the trial as it was built: a schedule adds numbers to the optimizer later."""
        names = {id(p): name for name, p in self.model.named_parameters()}
        task = self.task
        return Structure(
            model=module_key(self.model),
            optimizer=optimizer_key(self.optimizer, names, self.may_vary),
            loss=lifted(task.loss, varies="label_smoothing" in self.varies).key,
            data=callable_key(task.data),
            batch_size=self.batch_size,
            clipped=task.clip_norm is not None,
            scheduled=task.schedule is not None,
            dropped="dropout" in self.varies or _drops(self.model),
            autocast=task.autocast,
            hooked=_hooked(self),
        )

    @property
    def varies(self) -> frozenset[str]:
        """Options that may differ between trials, even where this trial's value is 0 and would need no layer."""
        return frozenset(self.trial.options)

    @property
    def may_vary(self) -> frozenset[str]:
        """`varies`, and the optimizer's numbers that a schedule may move away from 0 at a later step."""
        return self.varies | (frozenset(MAY_BE_ABSENT) if self.task.schedule is not None else frozenset())

    def schedule(self) -> LRScheduler | None:
        if self.task.schedule is None:
            return None
        schedule = self.task.schedule(self.optimizer, self.steps)
        check_parts(self.task.name, self.model, self.optimizer, schedule)
        return schedule

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """The samples of an epoch's full batches, in order, and their keys for augmentation."""
        piece = self.order.slice_at(number * self.order.samples, self.steps_per_epoch * self.batch_size)
        return self.train[self.order.indices(piece)], self.order.keys(piece)

    def evaluate(self, step: int, outputs: Tensor, targets: Tensor) -> Evaluation:
        """Loss and metrics, from the model's outputs for all validation samples and their targets, both on the CPU."""
        loss = float(self.task.loss(outputs, targets))
        metrics = {name: float(metric(outputs, targets)) for name, metric in self.task.metrics.items()}
        return Evaluation(step, step / self.steps_per_epoch, loss, metrics)

    def is_due(self, step: int, every: int) -> bool:
        """Whether the trial is evaluated after this step."""
        return step >= self.steps or (every > 0 and step > 0 and step % (every * self.steps_per_epoch) == 0)


class SpareParts:
    """Parts of trials that wait to be trained, up to `most_bytes` of parameters; other trials are built a second time.

    A trial's model is built to find its structure, long before the trial gets a row. Thousands of trials may wait, so
    not all of their models can stay in memory.
    """

    def __init__(self, most_bytes: int = 512 << 20) -> None:
        self._most_bytes, self._bytes = most_bytes, 0
        self._parts: dict[int, tuple[Parts, int]] = {}

    def push(self, parts: Parts) -> None:
        self._drop(parts.trial.number)
        nbytes = sum(tensor.nbytes for tensor in parts.model.state_dict().values() if isinstance(tensor, Tensor))
        if self._bytes + nbytes <= self._most_bytes:
            self._parts[parts.trial.number] = parts, nbytes
            self._bytes += nbytes

    def pop(self, trial: Trial) -> Parts | None:
        """The parts of exactly this trial: one of the same number with other options is another model."""
        found = self._drop(trial.number)
        return found if found is not None and found.trial == trial else None

    def _drop(self, number: int) -> Parts | None:
        parts, nbytes = self._parts.pop(number, (None, 0))
        self._bytes -= nbytes
        return parts


def _hooked(parts: Parts) -> bool:
    owners: list[Any] = list(parts.model.parameters())
    return has_step_hooks(parts.optimizer) or any(p._backward_hooks or p._post_accumulate_grad_hooks for p in owners)


def _drops(model: nn.Module) -> bool:
    return any(isinstance(m, CountedDropout) and float(m.rate) > 0 for m in model.modules())
