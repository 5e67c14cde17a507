"""The built-in tasks, by name. A task's function is imported on first use, so that listing names needs no torch."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from podium.errors import UnknownName

if TYPE_CHECKING:
    from podium.task import Task

TASKS: dict[str, str] = {
    "digits-mlp": "podium.tasks.digits:digits_mlp",
    "digits-cnn": "podium.tasks.digits:digits_cnn",
    "mnist-lenet5": "podium.tasks.mnist:mnist_lenet5",
    "mnist-mlp": "podium.tasks.mnist:mnist_mlp",
    "mnist-cnn": "podium.tasks.mnist:mnist_cnn",
    "cifar10-resnet20": "podium.tasks.cifar10:cifar10_resnet20",
    "regression": "podium.tasks.regression:regression",
    "wide-mlp": "podium.tasks.wide_mlp:wide_mlp",
    "recommend": "podium.tasks.recommend:recommend",
    "tiny-imagenet-resnet50": "podium.tasks.images64:tiny_imagenet_resnet50",
    "tiny-imagenet-efficientnet-b0": "podium.tasks.images64:tiny_imagenet_efficientnet_b0",
}
"""Each task's name to `module:function`."""


def find_task(name: str) -> Callable[..., Task]:
    """The function that makes the task of this name; its keyword arguments are the task's options."""
    if name not in TASKS:
        raise UnknownName("task", name, TASKS)
    place, _, function = TASKS[name].partition(":")
    make: Callable[..., Task] = getattr(importlib.import_module(place), function)
    return make


def takes_data_dir(name: str) -> bool:
    """Whether the task of this name takes a `data_dir`; the others' data are installed or generated."""
    return "data_dir" in inspect.signature(find_task(name)).parameters


def describe_tasks() -> dict[str, str]:
    """Each task's name to the first line of its docstring, read without importing the task."""
    return {name: _first_line(place) for name, place in TASKS.items()}


def _first_line(place: str) -> str:
    module, _, function = place.partition(":")
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None, place
    for node in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef) and node.name == function:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""
