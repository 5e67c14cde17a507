"""What all trials of a sweep share, and how one trial is made from it.

A trial is always made alone, on the CPU, under its own seed: model first, then optimizer and schedule, as plain PyTorch
would. Fused executors stack what they get from here, so nobody can tell from a trial's start how it will be trained.

The rules of a trial, the same for every executor:

- An epoch is one permutation of its training samples, fixed by (order seed, epoch). Every step takes a full batch; what
  is left at an epoch's end is not used in that epoch. Fewer samples than a batch are one batch.
- Dropout masks are drawn from (seed, layer, step, element), not from a generator (`fused/dropout.py`).
- A gradient is clipped by its own trial's norm. Gradients are not accumulated: a step's batch is computed at once.
- Its loss is looked at when it is evaluated; one that is no number ends it.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import math
import random
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.data.base import Data
from podium.data.order import GlobalOrder
from podium.engine.build import check_parts, device_of
from podium.engine.optim import has_step_hooks
from podium.errors import ConfigError, UnknownName
from podium.imports import load_named
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.dropout import set_dropout, with_counted_dropout
from podium.sweeps.fused.losses import smoothed
from podium.sweeps.fused.structure import MAY_BE_ABSENT, callable_key
from podium.sweeps.trial import Evaluation, Trial
from podium.task import Task, load_task

Precision = Literal["fp32", "tf32", "bf16"]
Folds = Sequence[tuple[np.ndarray, np.ndarray]]
"""For each fold the training and the validation samples, as indices into the task's training data."""

OWN_OPTIONS = ("batch_size", "epochs", "clip_norm", "init_seed", "order_seed", "dropout", "label_smoothing")
"""Options of a trial that any task has, besides its own and its optimizer's."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """What all trials of a sweep share."""

    task: str | Task | Callable[..., Task]
    """A name, `file.py:function`, a function that makes a task from options, or a task (then options are few)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For all trials; a trial's own come over them."""
    data_dir: str | None = None
    folds: Folds | None = None
    device: str = "auto"
    precision: Precision = "fp32"
    eval_every: int = 0
    """Epochs between evaluations; 0 evaluates at the end only."""
    steps: int | None = None
    """At most this many steps of each trial."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of parameters and inputs; float64 is for verifying."""

    def __post_init__(self) -> None:
        if self.precision not in ("fp32", "tf32", "bf16"):
            raise ConfigError(f"sweep: precision must be fp32, tf32 or bf16, got {self.precision!r}")
        if self.eval_every < 0:
            raise ConfigError(f"sweep: eval_every must be 0 or more epochs, got {self.eval_every}")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"sweep: steps must be at least 1, got {self.steps}")

    @functools.cached_property
    def torch_device(self) -> torch.device:
        return device_of(self.device, 0)

    @functools.cached_property
    def _tasks(self) -> dict[str, Task]:
        return {}

    @functools.cached_property
    def _made(self) -> dict[int, weakref.ref[nn.Module]]:
        """The models that were made and are still there."""
        return {}

    @functools.cached_property
    def _data(self) -> dict[Any, Data]:
        return {}

    @functools.cached_property
    def _residents(self) -> dict[Any, DeviceData]:
        return {}

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def varied(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed; tasks and data that were opened are not opened again."""
        other = dataclasses.replace(self, **changes)
        other.__dict__.update(_tasks=self._tasks, _data=self._data)
        return other

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which another process makes the recipe again; folds travel by themselves."""
        if not isinstance(self.task, str):
            raise ConfigError(
                "sweep: this executor starts processes, which make the task for themselves; name it "
                f"(`file.py:function`), got {type(self.task).__name__}"
            )
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "folds"}

    # From a trial to its parts.

    def task_of(self, trial: Trial) -> Task:
        """The task with this trial's options."""
        given = {**self.options, **trial.options}
        key = repr(sorted(given.items()))
        if key not in self._tasks:
            self._tasks[key] = self._make_task(given)
        return self._tasks[key]

    def make(self, trial: Trial) -> Parts:
        """Build the trial, alone, on the CPU, under its seed."""
        task = self.task_of(trial)
        given = {**self.options, **trial.options}
        with seeded(_seed("init_seed", given.get("init_seed", trial.seed))):
            model = task.model()
        if id(model) in self._made and self._made[id(model)]() is model:
            raise ConfigError(f"{task.name}: model must make a new module at each call, got one that was given before")
        if isinstance(model, nn.Module):
            self._made[id(model)] = weakref.ref(model)
        if isinstance(task.loss, nn.Module):  # it may keep something from step to step
            task = dataclasses.replace(task, loss=copy.deepcopy(task.loss))
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{task.name}: model must make a torch.nn.Module, got {type(model).__name__}")
        model = model.to(self.torch_dtype) if self.dtype != "float32" else model
        model = with_counted_dropout(model, trial.seed)
        if "dropout" in self._left_over(given):
            set_dropout(model, _number("dropout", given["dropout"]), task.name)
        optimizer = task.optimizer(model)
        check_parts(task.name, model, optimizer, None)
        optimizer = self._with_options(optimizer, given, task.name)
        own = {id(p) for p in model.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"{task.name}: the optimizer of a trial must hold parameters of its model only; others would be shared "
                "by all trials"
            )
        train, valid = self._samples(task, trial)
        batch_size = min(task.batch_size, len(train))
        steps_per_epoch = len(train) // batch_size
        steps = task.epochs * steps_per_epoch
        return Parts(
            trial=trial,
            task=task,
            model=model,
            optimizer=optimizer,
            batch_size=batch_size,
            steps_per_epoch=steps_per_epoch,
            steps=min(steps, self.steps or steps),
            train=train,
            valid=valid,
            order=GlobalOrder(len(train), _seed("order_seed", given.get("order_seed", trial.seed))),
        )

    def data_of(self, task: Task) -> Data:
        """What the task trains and validates on, opened once for all trials that open the same."""
        key = callable_key(task.data)
        if key not in self._data:
            self._data[key] = task.data()
        return self._data[key]

    def wait(self) -> None:
        """Until the device has done what it was asked for."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def resident_of(self, task: Task) -> DeviceData:
        """The task's data on the device: one copy for all trials that open the same."""
        key = callable_key(task.data)
        if key not in self._residents:
            self._residents[key] = DeviceData(self.data_of(task), self.torch_device, self.torch_dtype)
        return self._residents[key]

    def autocast_of(self, task: Task) -> bool:
        return self.precision == "bf16" or task.autocast == "bf16"

    def _samples(self, task: Task, trial: Trial) -> tuple[np.ndarray, np.ndarray | None]:
        data = self.data_of(task)
        if trial.fold is None:
            return np.arange(len(data.train)), None
        if self.folds is None or trial.fold >= len(self.folds):
            count = 0 if self.folds is None else len(self.folds)
            raise ConfigError(f"trial {trial.number}: fold {trial.fold} must be one of the sweep's {count}")
        train, valid = self.folds[trial.fold]
        if max(train.max(), valid.max()) >= len(data.train):
            raise ConfigError(f"fold {trial.fold}: indices must be below {len(data.train)}, the training samples")
        return train, valid

    def _function(self) -> Callable[..., Any] | None:
        """What makes the task, where options can be given to it."""
        if isinstance(self.task, Task):
            return None
        if callable(self.task):
            return self.task
        if ":" in self.task:
            return load_named(self.task)  # type: ignore[no-any-return]  # called and checked by `load_task`
        from podium.tasks import find_task

        return find_task(self.task)

    def _accepted(self) -> Mapping[str, Any] | None:
        """Options that the task's function takes; None when it takes any."""
        function = self._function()
        if function is None:
            return {}
        parameters = inspect.signature(function).parameters
        return None if any(p.kind is p.VAR_KEYWORD for p in parameters.values()) else parameters

    def _left_over(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Options that the task's function does not take."""
        accepted = self._accepted()
        return {} if accepted is None else {k: v for k, v in given.items() if k not in accepted}

    def _make_task(self, given: Mapping[str, Any]) -> Task:
        left = self._left_over(given)
        own = {k: v for k, v in given.items() if k not in left}
        if isinstance(self.task, str):
            task = load_task(self.task, own, self.data_dir)
        elif isinstance(self.task, Task):
            task = self.task
        else:
            task = self.task(**own)
            if not isinstance(task, Task):
                raise ConfigError(f"sweep: the task function must return a podium.Task, got {type(task).__name__}")
        # A function that takes any option may have left these lie.
        changed: dict[str, Any] = {
            name: given[name]
            for name in ("batch_size", "epochs")
            if name in given and getattr(task, name) != given[name]
        }
        if left.get("clip_norm") is not None:
            changed["clip_norm"] = _number("clip_norm", left["clip_norm"])
        if "label_smoothing" in left:
            changed["loss"] = smoothed(task.loss, _number("label_smoothing", left["label_smoothing"]), task.name)
        return dataclasses.replace(task, **changed) if changed else task

    def _with_options(self, optimizer: Optimizer, given: Mapping[str, Any], who: str) -> Optimizer:
        """Options that neither the task nor a sweep knows are the optimizer's."""
        own: dict[str, Any] = {}
        for name, value in self._left_over(given).items():
            if name in OWN_OPTIONS:
                continue
            if name not in optimizer.defaults:
                known = {*(self._accepted() or ()), *OWN_OPTIONS, *optimizer.defaults} - {"data_dir"}
                raise UnknownName(f"option of a trial of {who}", name, known)
            own[name] = _like_default(name, value, optimizer.defaults[name])
        return _made_again(optimizer, own, who) if own else optimizer


@dataclass(kw_only=True)
class Parts:
    """One trial, made: what it is trained from."""

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
    """Those it is validated on, of the training data; None: the task's test data."""
    order: GlobalOrder

    @property
    def varies(self) -> frozenset[str]:
        """What may differ between this trial and others, even where here it is 0 and would need nothing."""
        return frozenset(self.trial.options)

    @property
    def may_vary(self) -> frozenset[str]:
        """The same, and what a schedule may move away from 0 at a later step."""
        return self.varies | (frozenset(MAY_BE_ABSENT) if self.task.schedule is not None else frozenset())

    def schedule(self) -> LRScheduler | None:
        if self.task.schedule is None:
            return None
        schedule = self.task.schedule(self.optimizer, self.steps)
        check_parts(self.task.name, self.model, self.optimizer, schedule)
        return schedule

    def epoch(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        """An epoch's samples in order, as many as full batches take, and their keys for augmentation."""
        piece = self.order.slice_at(number * self.order.samples, self.steps_per_epoch * self.batch_size)
        return self.train[self.order.indices(piece)], self.order.keys(piece)

    def evaluate(self, step: int, outputs: Tensor, targets: Tensor) -> Evaluation:
        """Loss and metrics, from what the model says of all validation samples (both on the CPU)."""
        loss = float(self.task.loss(outputs, targets))
        metrics = {name: float(metric(outputs, targets)) for name, metric in self.task.metrics.items()}
        return Evaluation(step, step / self.steps_per_epoch, loss, metrics)

    def is_due(self, step: int, every: int) -> bool:
        """Whether the trial is evaluated after this step."""
        return step >= self.steps or (every > 0 and step > 0 and step % (every * self.steps_per_epoch) == 0)


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Let torch, Python and numpy draw from this seed inside, and leave their generators as they were."""
    kept: Any = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device is not None and device.type == "cuda":
            torch.cuda.manual_seed(seed)
        seed_others(seed)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


def seed_others(seed: int) -> None:
    """The generators of Python and numpy, which models now and then draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


@contextmanager
def precision_of(recipe: Recipe) -> Iterator[None]:
    """The sweep's way to multiply single precision numbers on a GPU; what was set before comes back."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    short = recipe.precision != "fp32"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = short
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@contextmanager
def with_threads(count: int | None) -> Iterator[None]:
    """So many threads for each operation inside; None leaves them as they are."""
    before = torch.get_num_threads()
    if count is not None:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def computing(recipe: Recipe, task: Task) -> torch.autocast:
    """What a forward pass of this recipe runs in: autocast, switched on where it is asked for."""
    # Its cache of converted parameters would outlive a captured graph's memory.
    wanted = recipe.autocast_of(task)
    return torch.autocast(recipe.torch_device.type, torch.bfloat16, enabled=wanted, cache_enabled=False)


def _like_default(name: str, value: Any, default: Any) -> Any:
    """An optimizer's option as it wants it: numbers for numbers, as many as there are."""
    if isinstance(default, tuple | list):
        if not isinstance(value, tuple | list) or len(value) != len(default):
            raise ConfigError(f"trial: {name} must be {len(default)} numbers, got {value!r}")
        return tuple(_number(name, v) for v in value)
    if isinstance(default, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"trial: {name} must be true or false, got {value!r}")
        return value
    return _number(name, value) if isinstance(default, int | float | Tensor) else value


def _number(name: str, value: Any) -> float:
    plain = value.item() if isinstance(value, np.generic | Tensor) and np.ndim(value) == 0 else value
    if isinstance(plain, bool) or not isinstance(plain, int | float) or not math.isfinite(plain):
        raise ConfigError(f"trial: {name} must be a finite number, got {value!r}")
    return plain


def _seed(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or not 0 <= int(value) < 2**63:
        raise ConfigError(f"trial: {name} must be a whole number between 0 and 2**63 - 1, got {value!r}")
    return int(value)


def _made_again(optimizer: Optimizer, options: Mapping[str, Any], who: str) -> Optimizer:
    """The same optimizer with other options.

    torch's own are made anew, so that they check them and act on those that they read only then. Of anybody else's it
    is not known what else they were given.
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
