"""Trees of state as tensors by name, and one JSON text for everything else.

A tree is a nest of dicts, lists, tuples and sets of tensors, numpy arrays and plain values. `strip` takes the tensors
out of it and `fill` puts them back: every type is restored, and nothing is unpickled.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.errors import CheckpointError

_NUMPY_KINDS = "biufcSUmM"
_SEQUENCES = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}


def strip(tree: Mapping[str, Any], tensors: dict[str, Tensor]) -> str:
    """The tree as JSON, with every tensor, array and run of bytes put into `tensors` and replaced by its name there."""
    try:
        return json.dumps(_strip(tree, "", tensors))
    except RecursionError:
        raise CheckpointError("a state that holds itself, or is nested without end, cannot be saved") from None


def fill(text: str, tensors: Mapping[str, Tensor], origin: str) -> Any:
    """The tree that `strip` was given; `origin` names the file in messages."""
    try:
        return _fill(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{origin}: its table of tensors is damaged: {error!r}") from error


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        return {"tensor": _put(value, path, tensors)}
    if isinstance(value, Counter):
        return {"counter": _strip_items(value, path, tensors)}
    if isinstance(value, Mapping):
        return {"dict": _strip_items(value, path, tensors)}
    if isinstance(value, tuple | list | set | frozenset):
        kind = next(kind for kind, cls in _SEQUENCES.items() if isinstance(value, cls))
        return {kind: [_strip(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, np.generic | np.ndarray):
        if value.dtype.kind not in _NUMPY_KINDS:
            raise _cannot_be_saved(path, f"numpy {type(value).__name__} of {value.dtype}")
        if isinstance(value, np.generic):  # with its type: arithmetic with a float32 gives other results
            return {"numpy": [value.dtype.str, value.tobytes().hex()]}
        return {"array": [value.dtype.str, list(value.shape), _put(_bytes(value.tobytes()), path, tensors)]}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__: _put(_bytes(value), path, tensors)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, torch.dtype | torch.device):
        return {type(value).__name__: str(value)}
    raise _cannot_be_saved(path, type(value).__name__)


def _cannot_be_saved(path: str, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path}: a {what} cannot be saved (tensors, numpy arrays, numbers, text, bytes and nests of them can); "
        "keep it out of the state, or let get_extra_state or state_dict return one of these instead"
    )


def _strip_items(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor]) -> list[Any]:
    items = []
    for k, v in value.items():
        place = f"{path}/{k}" if path else str(k)
        key = k if k is None or type(k) in (bool, int, float, str) else _strip(k, f"{place} (a key)", tensors)
        items.append([key, _strip(v, place, tensors)])
    return items


def _put(tensor: Tensor, path: str, tensors: dict[str, Tensor]) -> str:
    name = path or "tensor"
    while name in tensors or name == "__metadata__":  # a key with a slash in it may look like a nest
        name += "'"
    tensors[name] = tensor
    return name


def _bytes(data: bytes | bytearray) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _fill(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind in ("dict", "counter"):
        items = {_fill(k, tensors): _fill(v, tensors) for k, v in inner}
        return Counter(items) if kind == "counter" else items
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_fill(v, tensors) for v in inner)
    if kind == "numpy":
        return np.frombuffer(bytes.fromhex(inner[1]), dtype=_numpy_dtype(inner[0]))[0]
    if kind == "array":
        flat = np.frombuffer(tensors[inner[2]].numpy().tobytes(), dtype=_numpy_dtype(inner[0]))
        return flat.reshape(inner[1]).copy()
    if kind in ("bytes", "bytearray"):
        data = tensors[inner].numpy().tobytes()
        return bytearray(data) if kind == "bytearray" else data
    if kind == "complex":
        return complex(*inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "dtype":
        return _torch_dtype(inner)
    raise ValueError(f"unknown kind {kind!r}")


def _numpy_dtype(name: str) -> np.dtype[Any]:
    found = np.dtype(name)
    if found.kind not in _NUMPY_KINDS:
        raise ValueError(f"numpy type {name!r}")
    return found


def _torch_dtype(name: str) -> torch.dtype:
    found = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch type {name!r}")
    return found
