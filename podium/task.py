"""A task: what is trained, and nothing about how replicas come to agree.

A task is made by a function, so that every rank can make its own and nothing needs to be sent:
`podium train my.py:make_task`. The same object may be handed to `podium.train` directly.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_type_hints

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from podium.config import convert
from podium.data.base import Data
from podium.errors import ConfigError, UnknownName
from podium.imports import folder_alone_names, load_named

Metric = Callable[[Tensor, Tensor], float]
"""(outputs, targets) of the whole validation set, on the CPU, to one number."""

BufferPolicy = Literal["mean", "broadcast", "local"]


@dataclass(frozen=True, kw_only=True)
class Task:
    """What is trained: model, data, loss, optimizer, schedule and metrics."""

    name: str
    model: Callable[[], nn.Module]
    """Makes the model. Called once per rank, after the seed is set."""
    data: Callable[[], Data]
    """Opens the data. Called once per rank; large sets are memory-mapped, not loaded."""
    loss: Callable[[Any, Any], Tensor]
    """(outputs, targets) to the mean loss over the samples of the batch."""
    weigh: Callable[[Any], float] | None = None
    """(targets) to the weight of a batch's mean loss: for a loss that is a mean over non-padding words, their number.
    A step's gradient is then that of the mean over all of its words, however its samples were divided. Without it, the
    weight is the number of samples. Rounds of local steps and asynchronous training always weigh by samples."""
    optimizer: Callable[[nn.Module], Optimizer]
    """Makes the optimizer for the model's trainable parameters."""
    schedule: Callable[[Optimizer, int], LRScheduler] | None = None
    """(optimizer, total global steps) to a scheduler, stepped once per global step."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    batch_size: int = 64
    """Samples per global step, over all workers together."""
    epochs: int = 10
    clip_norm: float | None = None
    """Largest global gradient norm; None leaves gradients alone."""
    accumulate: int = 1
    """Micro-batches per step on each worker."""
    autocast: Literal["off", "bf16"] = "off"
    buffers: BufferPolicy = "mean"
    """Buffers that training changes (BatchNorm's running statistics), when there are several workers.

    `mean`: each worker keeps its own; they are averaged before they are used (validation, checkpoint, end).
    `broadcast`: rank 0's are copied to all before every step, as DistributedDataParallel does.
    `local`: each worker keeps its own; rank 0's are validated and saved.
    """
    eval_batch_size: int = 1024

    def __post_init__(self) -> None:
        for name in ("batch_size", "epochs", "accumulate", "eval_batch_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"Task {self.name}: {name} must be a whole number of at least 1, got {value!r}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ConfigError(f"Task {self.name}: clip_norm must be above 0, got {self.clip_norm}")
        if self.autocast not in ("off", "bf16"):
            raise ConfigError(f"Task {self.name}: autocast must be 'off' or 'bf16', got {self.autocast!r}")
        if self.buffers not in ("mean", "broadcast", "local"):
            raise ConfigError(f"Task {self.name}: buffers must be 'mean', 'broadcast' or 'local', got {self.buffers!r}")


def load_task(spec: str | Task, options: Mapping[str, Any] | None = None, data_dir: str | None = None) -> Task:
    """Make the task named by `spec`: a built-in name, `file.py:function`, `package.module:function`, or a Task.

    `options` go to the function as keyword arguments; an option that it does not take is refused.
    `data_dir` is passed on where the function takes it.
    """
    if isinstance(spec, Task):
        if options:
            raise ConfigError(f"Task {spec.name}: options {sorted(options)} need a task function, got a Task object")
        return spec
    make = _find_function(spec)
    accepted = inspect.signature(make).parameters
    given = dict(options or {})
    hints = _annotations(make)
    if ":" in spec and folder_alone_names(spec) and not _makes_tasks(make, hints):
        # The folder brings the arguments, too: `subprocess:run` would be called with a command of its choice.
        raise ConfigError(
            f"the folder names {spec} as its task, but nothing shows that it makes a task: it is not annotated "
            "`-> podium.Task`, and its module imports nothing from podium. Calling it would run it with arguments "
            "from the folder, so it is not called unless you name it: give the task on the command line"
        )
    takes_any = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    for name in given:
        if name not in accepted and not takes_any:
            raise UnknownName(f"option of task {spec}", name, accepted)
        given[name] = convert(given[name], hints.get(name, Any), f"task {spec}: {name}")
    if data_dir is not None and ("data_dir" in accepted or takes_any):
        given["data_dir"] = data_dir
    task = make(**given)
    if not isinstance(task, Task):
        raise ConfigError(f"{spec} must return a podium.Task, got {type(task).__name__}")
    return task


def _find_function(spec: str) -> Callable[..., Any]:
    if ":" not in spec:
        from podium.tasks import find_task

        return find_task(spec)
    make = load_named(spec)
    if not callable(make):
        raise ConfigError(f"{spec} must be a function that returns a podium.Task, got {type(make).__name__}")
    return make  # type: ignore[no-any-return]  # load_task checks what it returns


def _makes_tasks(make: Callable[..., Any], hints: Mapping[str, Any]) -> bool:
    """Whether a function was written to make tasks, judged by its annotation or its module."""
    if "return" in hints:
        return hints["return"] is Task
    home = getattr(make, "__globals__", {})
    if str(home.get("__name__")).partition(".")[0] == "podium":  # all of Podium's own are annotated
        return False
    homes = (getattr(value, "__module__", getattr(value, "__name__", "")) for value in home.values())
    return any(str(name).partition(".")[0] == "podium" for name in homes)


def _annotations(make: Callable[..., Any]) -> dict[str, Any]:
    try:
        return get_type_hints(make)
    except (NameError, TypeError):  # type-checker-only names, or a callable object: leave values as they are
        return {}


def accuracy(outputs: Tensor, targets: Tensor) -> float:
    """Share of samples whose largest output is the target class."""
    return float((outputs.argmax(dim=-1) == targets).to(torch.float64).mean())
