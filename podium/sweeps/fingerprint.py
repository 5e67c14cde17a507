"""Fingerprints of the task's code and data: a sweep is resumed only with the same code and data.

A sweep may be resumed days later, when the task's file has been edited or its data were downloaded again. Trials from
before and after then train different things, and no table should rank them together. A fingerprint covers the file that
holds the task's function, and of the data the number of samples, types, shapes, first and last sample. It does not
cover files that this file imports, nor samples in between.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from podium.data.base import Data, Dataset
from podium.imports import load_named
from podium.sweeps.seeds import seeded
from podium.task import Task

TaskLike = str | Task | Callable[..., Task]
_DIGITS = 16


def describe_source(task: TaskLike) -> dict[str, Any] | None:
    """The name and a digest of the file that makes the task; None where there is none, as in a notebook.

    The digest ignores comments, docstrings, spaces and code under `if __name__ == "__main__"`.
    """
    path = _file_of(task)
    try:
        content = None if path is None else path.read_bytes()
    except OSError:
        return None
    if path is None or content is None:
        return None
    return {"file": path.name, "digest": hashlib.sha256(_code(content)).hexdigest()[:_DIGITS]}


def describe_data(data: Data) -> dict[str, Any]:
    """Of training and test data: the number of samples, their types and shapes, a digest of the first and the last.

    The digest is None where reading a sample twice gives different values.
    """
    return {name: _describe(part) for name, part in (("train", data.train), ("test", data.test))}


def function_of(task: TaskLike) -> Any:
    """The function that makes the task; of a `Task` instance, the function that makes its model."""
    from podium.tasks import TASKS

    if isinstance(task, Task):
        return task.model
    return load_named(TASKS.get(task, task)) if isinstance(task, str) else task


def _file_of(task: TaskLike) -> Path | None:
    if isinstance(task, str) and task.rpartition(":")[0].endswith(".py"):
        return Path(task.rpartition(":")[0])
    function = function_of(task)
    while isinstance(function, functools.partial):
        function = function.func
    try:
        found = inspect.getsourcefile(inspect.unwrap(function))
    except TypeError:  # a callable object: its class has a source file
        try:
            found = inspect.getsourcefile(type(function))
        except TypeError:
            found = None
    return None if found is None else Path(found)


def _code(content: bytes) -> bytes:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):
        return content
    tree.body = [node for node in tree.body if not _is_script(node)]
    for node in ast.walk(tree):
        if isinstance(body := getattr(node, "body", None), list):
            node.body = [line for line in body if not _is_text(line)]  # type: ignore[attr-defined]  # it has one
    return ast.unparse(tree).encode()


def _is_text(node: ast.stmt) -> bool:
    """Whether this is a docstring, or text on a line of its own."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_script(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("__name__ == '__main__'", "'__main__' == __name__")


def _describe(part: Dataset) -> dict[str, Any]:
    count = len(part)
    if not count:
        return {"samples": 0}
    ends = np.array([0, count - 1])
    with seeded(0):
        first, second = part.gather(ends), part.gather(ends)
    digest, again = (hashlib.sha256(b"/".join(_bytes(found))).hexdigest()[:_DIGITS] for found in (first, second))
    one = " ".join(_kinds(first))
    return {"samples": count, "each": one, "ends": digest if digest == again else None}


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for name in sorted(value, key=str):
            yield str(name)
            yield from _leaves(value[name])
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _leaves(one)
    else:
        yield value.numpy(force=True) if isinstance(value, torch.Tensor) and value.dtype != torch.bfloat16 else value


def _bytes(value: Any) -> Iterator[bytes]:
    for leaf in _leaves(value):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.float().numpy(force=True)
        if isinstance(leaf, np.ndarray) and leaf.dtype != object:
            yield np.ascontiguousarray(leaf).tobytes()
        elif isinstance(leaf, str | bytes | int | float | None):
            yield repr(leaf).encode()  # the repr of any other type may hold a memory address


def _kinds(value: Any) -> Iterator[str]:
    for leaf in _leaves(value):
        shape = list(getattr(leaf, "shape", ()))[1:]
        yield f"{getattr(leaf, 'dtype', type(leaf).__name__)}{shape or ''}"
