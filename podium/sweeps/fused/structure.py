"""Keys of models, optimizers and functions: trials with equal keys may share a fused array.

Rows share one module's Python: its code, its attributes and its branches run once for all of them. So all that is not a
row's own tensor must be equal, or one trial's model would silently train as another's (a dropout rate is the famous
case). Values that can be lifted into tensors (the optimizer's numbers, dropout rates, label smoothing) may differ.

Keys err on one side only: objects that cannot be compared by value are compared by identity, which may put two equal
trials into two arrays, but never two different ones into one.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import types
import weakref
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations
from torch.optim import Optimizer

MAY_BE_ABSENT = ("momentum", "weight_decay", "dampening")
"""Numbers that need no computation where they are 0."""
_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TORCH = set(vars(nn.Module())) | {"_is_full_backward_hook"}
"""Attributes that every module has."""
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size, np.generic, Path, slice, range)
_LONGEST = 1000
"""Longer containers are compared by identity."""
_DEEPEST = 12
"""How deep attributes of attributes are followed; deeper objects are compared by identity."""


def module_key(model: nn.Module, *, values: bool = False) -> Any:
    """The model's structure: classes, names, shapes, hooks, and every attribute that is not a parameter or buffer.

    With `values`, the values of parameters and buffers, too.
    """
    shared: dict[int, str] = {}
    found: list[Any] = []
    for place, module in model.named_modules(remove_duplicate=False):
        known = shared.setdefault(id(module), place)
        if known != place:
            found.append((place, "same as", known))
            continue
        found.append((place, *_module(module), _tensors(module, place, shared, values)))
    return tuple(found)


def attributes_key(model: nn.Module) -> Any:
    """The part of a model's key that only Python can change."""
    return tuple((place, *_module(module)) for place, module in model.named_modules())


def optimizer_key(optimizer: Optimizer, names: dict[int, str], varies: Collection[str] = ()) -> Any:
    """The optimizer's class, the parameters of each group, and its options that are not numbers.

    An optimizer without momentum or weight decay computes none, so that is part of the key, unless it `varies`.
    """
    groups = []
    for group in optimizer.param_groups:
        fixed = {k: value_key(v) for k, v in group.items() if k != "params" and not is_number(v)}
        numbers = sorted(k for k, v in group.items() if k != "params" and is_number(v))
        zero = tuple(k for k in MAY_BE_ABSENT if group.get(k) == 0 and k not in varies)
        held = tuple(names[id(p)] for p in group["params"])
        groups.append((held, tuple(sorted(fixed.items(), key=lambda item: item[0])), tuple(numbers), zero))
    return (class_key(type(optimizer)), tuple(groups))


def is_number(value: Any) -> bool:
    """Whether an optimizer's option is a number or a tuple of them, which rows may differ in."""
    if isinstance(value, tuple | list):
        return bool(value) and all(is_number(v) for v in value)
    if isinstance(value, Tensor):
        return value.dim() == 0
    return isinstance(value, int | float) and not isinstance(value, bool)


def callable_key(function: Any) -> Any:
    """A function's code, defaults and closure.

    A nested function is made anew at each call, so its identity would differ where the function is the same; and its
    name would be the same where closures differ (a slope that a lambda took from its scope).
    """
    return value_key(function)


def class_key(cls: type) -> Any:
    """A class by its name, where it can be imported; one made inside a function by its bases and attributes."""
    return _class(cls, ())


def value_key(value: Any) -> Any:
    """A hashable key that differs wherever two values may behave differently."""
    return _value(value, ())


def _value(value: Any, way: tuple[int, ...]) -> Any:
    """`way` has the ids of the enclosing values: a cycle is not followed again."""
    if value is None or isinstance(value, _PLAIN):
        return (type(value).__name__, repr(value))
    if id(value) in way:
        return ("again", len(way) - way.index(id(value)))
    if len(way) >= _DEEPEST:
        return _Same(value)
    on = (*way, id(value))
    if isinstance(value, nn.Parameter):  # a module's parameter in a second attribute: its values may differ by row
        return ("Parameter", tuple(value.shape), str(value.dtype))
    if isinstance(value, Tensor | np.ndarray):
        return _array(value)
    if isinstance(value, random.Random | np.random.Generator | torch.Generator):
        return _generator(value)
    if isinstance(value, tuple | list | dict) and len(value) > _LONGEST:
        return _Same(value)
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_value(v, on) for v in value))
    if isinstance(value, dict):
        return ("dict", *((repr(k), _value(v, on)) for k, v in value.items()))
    if isinstance(value, set | frozenset):
        return ("set", *sorted(repr(v) for v in value)) if all(isinstance(v, _PLAIN) for v in value) else _Same(value)
    if isinstance(value, type):
        return _class(value, way)
    if isinstance(value, weakref.ref):
        return ("ref", _value(value(), on))
    if isinstance(value, functools.partial):
        return ("partial", _value(value.func, on), _value(value.args, on), _value(value.keywords, on))
    if isinstance(value, types.MethodType):
        return ("method", _value(value.__func__, on), _value(value.__self__, on))
    if isinstance(value, types.FunctionType):
        return _function(value, on)
    if isinstance(value, staticmethod | classmethod):
        return (type(value).__name__, _value(value.__func__, on))
    if isinstance(value, property):
        return ("property", *(_value(f, on) for f in (value.fget, value.fset, value.fdel)))
    if isinstance(value, types.BuiltinFunctionType):
        return ("built in", str(value.__module__), value.__qualname__)
    if isinstance(value, nn.Module):
        return ("module", module_key(value, values=True)) if len(way) < 4 else _Same(value)
    if _holds_only_attributes(value):
        return ("object", _class(type(value), way), _value(vars(value), on))
    return _Same(value)


def _function(function: types.FunctionType, on: tuple[int, ...]) -> Any:
    cells = []
    for cell in function.__closure__ or ():
        try:
            cells.append(_cell(cell.cell_contents, on))
        except ValueError:  # the cell is still empty
            cells.append("empty")
    defaults = _value(function.__defaults__ or (), on), _value(function.__kwdefaults__ or {}, on)
    where = (function.__module__, function.__globals__.get("__file__"))  # equal code may read other globals
    return ("function", function.__code__, where, *defaults, tuple(cells))


def _cell(value: Any, on: tuple[int, ...]) -> Any:
    key = _value(value, on)
    return _Shared(value, key) if isinstance(value, dict | list | set) else key


def _class(cls: type, way: tuple[int, ...]) -> Any:
    if id(cls) in way or getattr(sys.modules.get(cls.__module__), cls.__qualname__, None) is cls:
        return ("class", cls.__module__, cls.__qualname__)
    on = (*way, id(cls))
    made_of = {k: v for k, v in vars(cls).items() if k not in ("__dict__", "__weakref__", "__doc__", "__module__")}
    bases = tuple(_class(base, on) for base in cls.__bases__)
    return ("local class", cls.__module__, cls.__qualname__, bases, _value(made_of, on))


def _array(value: Tensor | np.ndarray) -> Any:
    """Type, shape and a digest of the bytes; by identity where there are no plain bytes."""
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return _Same(value)
        return ("Tensor", str(value.dtype), tuple(value.shape), _digest(value, value._version))
    if value.dtype.hasobject:
        return _Same(value)
    return ("array", str(value.dtype), value.shape, _digest(value, 0))


def _digest(value: Tensor | np.ndarray, version: int) -> str:
    """A digest of the bytes. Large arrays (data in a closure) are read once: they do not change during a sweep."""
    known = _DIGESTS.get(id(value))
    if known is not None and known[0]() is value and known[1] == version:
        return known[2]
    if isinstance(value, Tensor):
        array = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        array = np.ascontiguousarray(value)
    found = hashlib.sha256(array.data if array.size else b"").hexdigest()
    if value.nbytes > _LARGE:
        _DIGESTS[id(value)] = (weakref.ref(value), version, found)
    return found


_LARGE = 1 << 20
_DIGESTS: dict[int, tuple[weakref.ref[Any], int, str]] = {}


def _generator(value: random.Random | np.random.Generator | torch.Generator) -> Any:
    """A generator by its state."""
    if isinstance(value, random.Random):
        return ("random", repr(value.getstate()))
    if isinstance(value, torch.Generator):
        return ("torch.Generator", _digest(value.get_state(), 0))
    return ("Generator", repr(value.bit_generator.state))


def _holds_only_attributes(value: Any) -> bool:
    """Whether class and attributes are all of an object's state: no slots, no state in C."""
    plain = type(value).__flags__ & (1 << 9)  # made by a class statement
    return bool(plain) and hasattr(value, "__dict__") and not any("__slots__" in vars(c) for c in type(value).__mro__)


class _Same:
    """Equal only for the same object. It keeps the object alive, since an address alone might be reused."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __repr__(self) -> str:
        return f"this {type(self.value).__name__}"


class _Shared:
    """A container in a closure: equal to the same container, even if that has changed, or to one with an equal key."""

    def __init__(self, value: Any, key: Any) -> None:
        self.value, self.key = value, key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Shared) and (self.value is other.value or self.key == other.key)

    def __hash__(self) -> int:
        return hash(type(self.value))


def _module(module: nn.Module) -> tuple[Any, Any, Any, bool]:
    """Class, attributes, hooks and mode of a module."""
    way = (id(module),)
    held = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
    if isinstance(module, nn.RNNBase):  # its parameters again, in lists that torch updates itself
        held = {k: v for k, v in held.items() if k not in ("_flat_weights", "_flat_weight_refs")}
    attributes = tuple((name, _value(held[name], way)) for name in sorted(held))
    hooks = tuple(
        (kind, tuple(_value(h, way) for h in _hooks(module, kind))) for kind in _HOOKS if _hooks(module, kind)
    )
    return class_key(type_before_parametrizations(module)), attributes, hooks, module.training


def _hooks(module: nn.Module, kind: str) -> Iterable[Any]:
    return list(getattr(module, kind, {}).values())


def _tensors(module: nn.Module, place: str, shared: dict[int, str], values: bool) -> Any:
    found: list[Any] = []
    for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in held.items():
            if tensor is None:
                found.append((kind, name, None))
                continue
            first = shared.setdefault(id(tensor), f"{place}.{name}")
            tied = first if first != f"{place}.{name}" else None
            what = _array(tensor) if values else (tuple(tensor.shape), tensor.dtype)
            found.append((kind, name, what, tensor.requires_grad, tied))
    return tuple(found)
