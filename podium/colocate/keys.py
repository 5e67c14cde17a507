"""What must be alike for trials to share a fused array.

Rows share one module's Python: its code, its attributes and its branches run once for all of them. So all that is not a
tensor must be equal, or one trial's model would silently train as another's (a dropout rate is the famous case). What
can be lifted into tensors (the optimizer's numbers, dropout rates, label smoothing) may differ.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import weakref
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

_OF_TORCH = set(vars(nn.Module())) | {"_is_full_backward_hook"}
"""Attributes that every module has."""


MAY_BE_ABSENT = ("momentum", "weight_decay")
"""Numbers that cost something only where they are not 0."""


def module_key(model: nn.Module) -> Any:
    """The model's structure: classes, names, shapes, and every attribute that is not a tensor."""
    shared: dict[int, str] = {}
    found: list[Any] = []
    for place, module in model.named_modules(remove_duplicate=False):
        known = shared.setdefault(id(module), place)
        if known != place:
            found.append((place, "same as", known))
            continue
        found.append((place, type(module), _attributes(module), _tensors(module, place, shared)))
    return tuple(found)


def optimizer_key(optimizer: Optimizer, names: dict[int, str], varies: Collection[str] = ()) -> Any:
    """The optimizer's class, which parameters each group holds, and its options that are not numbers.

    One without momentum or weight decay computes none, so that is part of the key, unless it is among what varies.
    """
    groups = []
    for group in optimizer.param_groups:
        fixed = {k: _plain(v) for k, v in group.items() if k != "params" and not is_number(v)}
        numbers = sorted(k for k, v in group.items() if k != "params" and is_number(v))
        zero = tuple(k for k in MAY_BE_ABSENT if group.get(k) == 0 and k not in varies)
        groups.append(
            (tuple(names[id(p)] for p in group["params"]), tuple(sorted(fixed.items())), tuple(numbers), zero)
        )
    return (type(optimizer), tuple(groups))


def is_number(value: Any) -> bool:
    """Whether an optimizer's option is a number or a tuple of them, which rows may differ in."""
    if isinstance(value, tuple | list):
        return bool(value) and all(is_number(v) for v in value)
    return isinstance(value, int | float) and not isinstance(value, bool)


def callable_key(function: Any) -> Any:
    """What tells one function from another: its code and what it holds.

    A function that another one defines is made anew at each call, so its identity would tell apart what is the same;
    and its name would not tell apart what differs (a slope that a lambda took from around it). What is held and is not
    plain counts by its identity.
    """
    if isinstance(function, functools.partial):
        kept = tuple(sorted((name, _held(value)) for name, value in function.keywords.items()))
        return ("partial", callable_key(function.func), tuple(_held(value) for value in function.args), kept)
    if isinstance(function, types.MethodType):
        return ("method", callable_key(function.__func__), _held(function.__self__))
    if isinstance(function, types.FunctionType):
        cells = tuple(_held(cell.cell_contents) for cell in function.__closure__ or ())
        named = tuple(sorted((name, _held(value)) for name, value in (function.__kwdefaults__ or {}).items()))
        return (
            "function",
            function.__code__,
            tuple(_held(value) for value in function.__defaults__ or ()),
            named,
            cells,
        )
    return _held(function)


def _held(value: Any) -> Any:
    """A value that a function holds: plain ones by value, functions by theirs, everything else by identity."""
    if isinstance(value, bool | int | float | str | bytes | torch.dtype | torch.device | Path) or value is None:
        return (type(value).__name__, repr(value))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_held(v) for v in value))
    if isinstance(value, dict):
        return ("dict", *sorted((repr(k), _held(v)) for k, v in value.items()))
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return callable_key(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and value.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # every dataclass has it
        return (type(value), *((f.name, _held(getattr(value, f.name))) for f in dataclasses.fields(value)))
    return _Same(value)


class _Same:
    """Equal to nothing but the same object, which it keeps: an address alone might be given to another."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)

    def __lt__(self, other: Any) -> bool:
        return id(self.value) < id(other.value)


def differences(first: Any, second: Any) -> str:
    """Where two module keys part, for a message."""
    for one, two in zip(first, second, strict=False):
        if one != two:
            return f"{one[0] or 'the model'}: {one[1:3]} against {two[1:3]}"[:300]
    return "different numbers of modules"


def _tensors(module: nn.Module, place: str, shared: dict[int, str]) -> Any:
    found: list[Any] = []
    for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in held.items():
            if tensor is None:
                found.append((kind, name, None))
                continue
            first = shared.setdefault(id(tensor), f"{place}.{name}")
            tied = first if first != f"{place}.{name}" else None
            found.append((kind, name, (tuple(tensor.shape), tensor.dtype, tensor.requires_grad, tied)))
    return tuple(found)


def _attributes(module: nn.Module) -> Any:
    held = {k: v for k, v in vars(module).items() if k not in _OF_TORCH}
    return tuple(sorted((name, _plain(value)) for name, value in held.items()))


def _plain(value: Any, depth: int = 0) -> Any:
    """Something that can be compared and hashed, and differs wherever two values may behave differently."""
    if isinstance(value, bool | int | float | str | bytes | type | torch.dtype | torch.device) or value is None:
        return (type(value).__name__, str(value))
    if isinstance(value, tuple | list):
        return (type(value).__name__, *(_plain(v, depth) for v in value))
    if isinstance(value, dict):
        return ("dict", *sorted((str(k), _plain(v, depth)) for k, v in value.items()))
    if isinstance(value, set | frozenset):
        return ("set", *sorted(str(v) for v in value))
    if isinstance(value, nn.Parameter):  # a module's own, listed a second time (recurrent layers): its value is a row's
        return ("Parameter", tuple(value.shape), str(value.dtype))
    if isinstance(value, Tensor):
        return ("Tensor", tuple(value.shape), str(value.dtype), str(value.detach().flatten().tolist()[:4096]))
    if isinstance(value, weakref.ref):
        return ("ref", _plain(value(), depth))
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        return ("function", _Opaque(callable_key(value)))
    if isinstance(value, types.BuiltinFunctionType):
        return ("built in", str(value.__module__), value.__qualname__)
    if hasattr(value, "__dict__") and depth < _DEEPEST:
        return ("object", type(value).__qualname__, _plain(vars(value), depth + 1))
    return ("object", type(value).__qualname__, repr(value))


class _Opaque:
    """A key among plain ones: compared whole, and sorted as if all were alike."""

    def __init__(self, key: Any) -> None:
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Opaque) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __lt__(self, other: Any) -> bool:
        return False


_DEEPEST = 8
"""How far attributes of attributes are followed."""
