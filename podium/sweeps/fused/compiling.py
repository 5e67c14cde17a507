"""`torch.compile` for methods of many objects: any number of kinds in one process.

torch stores compiled code with a function's code object, and compiles a code object for a few kinds of object only (its
`recompile_limit`, 8). All arrays run the code of the same methods, so a process could have no more than 8 kinds of
array. Here each kind runs a copy of the code.

Objects of one kind share a copy, so that only the first of them waits for the compiler. A copy is freed, with its
compiled code, once its objects are gone and 16 other copies have been made since.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import nn

_KEPT = 16
"""Copies that are kept for another object of their kind: an array has two methods, so 8 kinds of array."""
_SHARED = 4
"""Objects that run one copy, at most: torch may distinguish kinds that are one here, and compile again for each."""

_lock = threading.Lock()
_kept: OrderedDict[Hashable, tuple[FunctionType, int]] = OrderedDict()
"""The copies used last, and how many objects have used each."""


COMPILE_S, COMPILE_LAYER_S = 20.0, 1.0
"""Seconds to compile a training step on an H200's host, about, and what each layer adds."""


def seconds_to_compile(model: nn.Module) -> float:
    layers = sum(any(True for _ in module.parameters(recurse=False)) for module in model.modules())
    return COMPILE_S + layers * COMPILE_LAYER_S


def compile_method(method: Callable[..., Any], kind: Hashable, *, backend: str = "inductor") -> Callable[..., Any]:
    """The bound method, compiled at its first call. `kind`: equal for objects that may run the same compiled code.

    Kinds that are too coarse give no wrong results: torch's guards check each object.
    """
    assert isinstance(method, MethodType) and isinstance(method.__func__, FunctionType)
    copy = _copy_for(method.__func__, kind)
    compiled: Callable[..., Any] = torch.compile(
        MethodType(copy, method.__self__), fullgraph=True, dynamic=False, backend=backend
    )
    return compiled


def _copy_for(function: FunctionType, kind: Hashable) -> FunctionType:
    key = (function.__qualname__, hash(kind))  # a kind may refer to a model or data and keep them alive; its hash not
    with _lock:
        copy, users = _kept.pop(key, (None, 0))
        if copy is None or users >= _SHARED:
            copy, users = _copy_of(function), 0
        _kept[key] = copy, users + 1
        while len(_kept) > _KEPT:
            _kept.popitem(last=False)
    return copy


def _copy_of(function: FunctionType) -> FunctionType:
    """The same function with its own code object. Its compiled code is freed with it."""
    from torch._dynamo.eval_frame import remove_from_cache  # takes a second to load

    code = function.__code__.replace()
    copy = FunctionType(code, function.__globals__, function.__name__, function.__defaults__, function.__closure__)
    copy.__kwdefaults__, copy.__qualname__ = function.__kwdefaults__, function.__qualname__
    # torch's table from compiled to original code would keep both forever.
    weakref.finalize(copy, remove_from_cache, code).atexit = False
    return copy
