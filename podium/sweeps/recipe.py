"""What all trials of a sweep share, and how one trial is made from it.

A trial is always built alone, on the CPU, under its own seed: model first, then optimizer and schedule, as in plain
PyTorch. Fused executors stack trials built here, so a trial starts from the same parameters under every executor.

The rules of a trial, the same for every executor:

- An epoch is one permutation of its training samples, fixed by (order seed, epoch). Every step takes a full batch; the
  rest of an epoch is not used. Fewer samples than a batch are one batch.
- Dropout masks are drawn from (seed, layer, step, element), not from a generator (`fused/dropout.py`).
- A gradient is clipped by its own trial's norm. Gradients are not accumulated: a step's batch is computed at once.
- The loss is checked at evaluations; inf or nan ends the trial.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from podium.data.base import Data
from podium.data.order import GlobalOrder
from podium.engine.device import device_of
from podium.engine.parts import check_parts
from podium.errors import ConfigError
from podium.sweeps.fused.device_data import DeviceData
from podium.sweeps.fused.dropout import set_dropout, with_counted_dropout
from podium.sweeps.fused.structure import callable_key
from podium.sweeps.parts import Parts, SpareParts
from podium.sweeps.search.sweep_folds import Folds
from podium.sweeps.seeds import seeded
from podium.sweeps.task_options import TaskOptions, number_of, seed_of
from podium.sweeps.trial import Trial
from podium.task import Task

Precision = Literal["fp32", "tf32", "bf16"]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """What all trials of a sweep share."""

    task: str | Task | Callable[..., Task]
    """A name, `file.py:function`, a function that makes a task from options, or a task (then options are few)."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For all trials; a trial's own options override them."""
    data_dir: str | None = None
    folds: Folds | None = None
    device: str = "auto"
    precision: Precision = "fp32"
    eval_every: int = 0
    """Epochs between evaluations; 0 evaluates at the end only."""
    steps: int | None = None
    """At most this many steps of each trial."""
    dtype: Literal["float32", "float64"] = "float32"
    """Of parameters and inputs; `probe` verifies in float64."""

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
    def _cache(self) -> _Cache:
        return _Cache(TaskOptions(self.task, self.data_dir))

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float64 if self.dtype == "float64" else torch.float32

    def varied(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed; it shares tasks and data that were opened, and known models."""
        other = dataclasses.replace(self, **changes)
        for shared in ("tasks", "data", "models"):
            setattr(other._cache, shared, getattr(self._cache, shared))
        return other

    def to_dict(self) -> dict[str, Any]:
        """Plain values, from which another process rebuilds the recipe; folds are sent separately."""
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
        key, tasks = repr(sorted(given.items())), self._cache.tasks
        if key not in tasks:
            tasks[key] = self._cache.options.make_task(given)
        return tasks[key]

    def make(self, trial: Trial) -> Parts:
        """Build the trial on the CPU, under its seed; returns the parts that were given back, if there are any."""
        return self._cache.spare.pop(trial) or self._build(trial)

    def give_back(self, parts: Parts) -> None:
        """Keep these parts, which were neither trained nor loaded, for the next `make` of their trial."""
        self._cache.spare.push(parts)

    def _build(self, trial: Trial) -> Parts:
        task, given = self.task_of(trial), {**self.options, **trial.options}
        model = self._build_model(task, trial, given)
        if isinstance(task.loss, nn.Module):  # it may have state that changes from step to step
            task = dataclasses.replace(task, loss=copy.deepcopy(task.loss))
        optimizer = self._build_optimizer(task, model, given)
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
            order=GlobalOrder(len(train), seed_of("order_seed", given.get("order_seed", trial.seed))),
        )

    def _build_model(self, task: Task, trial: Trial, given: Mapping[str, Any]) -> nn.Module:
        with seeded(seed_of("init_seed", given.get("init_seed", trial.seed))):
            model = task.model()
            # Once per sweep, before any trial is trained: a module that is given out again would be trained twice.
            is_same = not self._cache.models and task.model() is model
        if not isinstance(model, nn.Module):
            raise ConfigError(f"{task.name}: model must make a torch.nn.Module, got {type(model).__name__}")
        known = self._cache.models.get(id(model))
        if is_same or (known is not None and known() is model):
            raise ConfigError(f"{task.name}: model must make a new module at each call, got one that was given before")
        self._cache.models[id(model)] = weakref.ref(model)
        model = with_counted_dropout(model.to(self.torch_dtype) if self.dtype != "float32" else model, trial.seed)
        if "dropout" in self._cache.options.left_over(given):
            set_dropout(model, number_of("dropout", given["dropout"]), task.name)
        return model

    def _build_optimizer(self, task: Task, model: nn.Module, given: Mapping[str, Any]) -> Optimizer:
        optimizer = task.optimizer(model)
        check_parts(task.name, model, optimizer, None)
        optimizer = self._cache.options.with_options(optimizer, given, task.name)
        own = {id(p) for p in model.parameters()}
        if any(id(p) not in own for group in optimizer.param_groups for p in group["params"]):
            raise ConfigError(
                f"{task.name}: the optimizer of a trial must hold parameters of its model only; others would be shared "
                "by all trials"
            )
        return optimizer

    def data_of(self, task: Task) -> Data:
        """The task's data, opened once for all trials with the same data."""
        key = callable_key(task.data)
        if key not in self._cache.data:
            self._cache.data[key] = task.data()
        return self._cache.data[key]

    def wait(self) -> None:
        """Block until the GPU is idle."""
        if self.torch_device.type == "cuda":
            torch.cuda.synchronize(self.torch_device)

    def device_data_of(self, task: Task) -> DeviceData:
        """The task's data on the device: one copy for all trials with the same data."""
        key = callable_key(task.data)
        if key not in self._cache.device_data:
            self._cache.device_data[key] = DeviceData(self.data_of(task), self.torch_device, self.torch_dtype)
        return self._cache.device_data[key]

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


@dataclass
class _Cache:
    options: TaskOptions
    tasks: dict[str, Task] = field(default_factory=dict)
    data: dict[Any, Data] = field(default_factory=dict)
    device_data: dict[Any, DeviceData] = field(default_factory=dict)
    models: dict[int, weakref.ref[nn.Module]] = field(default_factory=dict)
    """Models that were built, by their `id`, as long as they live."""
    spare: SpareParts = field(default_factory=SpareParts)
