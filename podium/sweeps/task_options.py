"""Sorts a trial's options: some belong to the task's function, some to every trial, the rest to the optimizer."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor
from torch.optim import Optimizer

from podium.engine.optim import has_step_hooks
from podium.errors import ConfigError, UnknownName
from podium.imports import load_named
from podium.sweeps.fused.losses import smoothed
from podium.task import Task, load_task

OWN_OPTIONS = ("batch_size", "epochs", "clip_norm", "init_seed", "order_seed", "dropout", "label_smoothing")
"""Options of a trial under every task, besides the task's own and its optimizer's."""


@dataclass(frozen=True)
class TaskOptions:
    """Finds the options that the task's function takes, and makes the task from them."""

    task: str | Task | Callable[..., Task]
    data_dir: str | None

    @functools.cached_property
    def accepted(self) -> Mapping[str, Any] | None:
        """Options that the task's function takes; None when it takes any."""
        function = self._function()
        if function is None:
            return {}
        parameters = inspect.signature(function).parameters
        return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters

    def left_over(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that the task's function does not take."""
        return {} if self.accepted is None else {k: v for k, v in given.items() if k not in self.accepted}

    def make_task(self, given: Mapping[str, Any]) -> Task:
        left = self.left_over(given)
        task = self._call({k: v for k, v in given.items() if k not in left})
        # A function that takes any option may have ignored these.
        changed: dict[str, Any] = {
            name: given[name]
            for name in ("batch_size", "epochs")
            if name in given and getattr(task, name) != given[name]
        }
        if left.get("clip_norm") is not None:
            changed["clip_norm"] = number_of("clip_norm", left["clip_norm"])
        if "label_smoothing" in left:
            changed["loss"] = smoothed(task.loss, number_of("label_smoothing", left["label_smoothing"]), task.name)
        return dataclasses.replace(task, **changed) if changed else task

    def with_options(self, optimizer: Optimizer, given: Mapping[str, Any], who: str) -> Optimizer:
        """The optimizer with the options that are neither the task's nor every trial's."""
        own: dict[str, Any] = {}
        for name, value in self.left_over(given).items():
            if name in OWN_OPTIONS:
                continue
            if name not in optimizer.defaults:
                known = {*(self.accepted or ()), *OWN_OPTIONS, *optimizer.defaults} - {"data_dir"}
                raise UnknownName(f"option of a trial of {who}", name, known)
            own[name] = _like_default(name, value, optimizer.defaults[name])
        return _made_again(optimizer, own, who) if own else optimizer

    def _function(self) -> Callable[..., Any] | None:
        """The function that makes the task from options; None for a `Task` instance."""
        if isinstance(self.task, Task):
            return None
        if callable(self.task):
            return self.task
        if ":" in self.task:
            return load_named(self.task)  # type: ignore[no-any-return]  # called and checked by `load_task`
        from podium.tasks import find_task

        return find_task(self.task)

    def _call(self, own: Mapping[str, Any]) -> Task:
        if isinstance(self.task, str):
            return load_task(self.task, own, self.data_dir)
        if isinstance(self.task, Task):
            return self.task
        task = self.task(**own)
        if not isinstance(task, Task):
            raise ConfigError(f"sweep: the task function must return a podium.Task, got {type(task).__name__}")
        return task


def _like_default(name: str, value: Any, default: Any) -> Any:
    """An optimizer's option, checked against the type and length of its default."""
    if isinstance(default, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(default):
            raise ConfigError(f"trial: {name} must be {len(default)} numbers, got {value!r}")
        return tuple(number_of(name, v) for v in value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"trial: {name} must be true or false, got {value!r}")
        return value
    return number_of(name, value) if isinstance(default, int | float | Tensor) else value


def number_of(name: str, value: Any) -> float:
    plain = value.item() if isinstance(value, np.generic | Tensor) and np.ndim(value) == 0 else value
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not math.isfinite(plain):
        raise ConfigError(f"trial: {name} must be a finite number, got {value!r}")
    return plain


def seed_of(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**63:
        raise ConfigError(f"trial: {name} must be a whole number between 0 and 2**63 - 1, got {value!r}")
    return int(value)


def _made_again(optimizer: Optimizer, options: Mapping[str, Any], who: str) -> Optimizer:
    """The same optimizer with other options.

    torch's own optimizers are constructed again, so that they check the options and act on those that only the
    constructor reads. For other optimizers the constructor's arguments are unknown: their groups are changed in place.
    """
    for name in options:
        held = [group.get(name) for group in optimizer.param_groups]
        if any(value != held[0] for value in held):
            raise ConfigError(
                f"trial of {who}: {name} differs between the optimizer's groups ({', '.join(map(str, held))}), so one "
                "number cannot take its place; make it an option of the task's function, which knows what each gets"
            )
    if type(optimizer).__module__.startswith("torch.optim") and not has_step_hooks(optimizer):
        groups = [{**group, **options} for group in optimizer.param_groups]
        taken = inspect.signature(type(optimizer)).parameters
        named = {name: value for name, value in {**optimizer.defaults, **options}.items() if name in taken}
        try:
            return type(optimizer)(groups, **named)
        except Exception as error:
            raise ConfigError(f"trial of {who}: {type(optimizer).__name__} refuses {dict(options)}: {error}") from error
    for group in optimizer.param_groups:
        group.update(options)
    return optimizer
