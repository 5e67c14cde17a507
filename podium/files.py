"""Trees of tensors and plain values as safetensors bytes: for checkpoints, for models, for sending state to a rank.

The format is safetensors' own (an 8-byte length, a JSON header, raw little-endian tensors), so other tools read the
files; what is not a tensor rides in the header's metadata as JSON. Nothing is ever unpickled.
"""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.errors import CheckpointError

_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PLAIN = "podium"  # the metadata key that holds everything that is not a tensor
_MAX_HEADER = 64 << 20


def tree_to_bytes(tree: Mapping[str, Any]) -> bytes:
    """A nest of dicts, lists and tuples of tensors and plain values, as one safetensors file."""
    tensors: dict[str, Tensor] = {}
    plain = _strip(tree, "", tensors)
    return b"".join(_encode(tensors, {_PLAIN: json.dumps(plain)}))


def bytes_to_tree(data: bytes | bytearray | memoryview, origin: str = "state") -> Any:
    """The inverse of `tree_to_bytes`; the tensors are copies and may be written to."""
    tensors, metadata = _decode(data, origin)
    if _PLAIN not in metadata:
        raise CheckpointError(f"{origin}: holds tensors only, not a Podium state")
    try:
        return _fill(json.loads(metadata[_PLAIN]), tensors)
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{origin}: what it says of its tensors is damaged: {error!r}") from error


def save_tree(path: Path, tree: Mapping[str, Any], *, durable: bool = True) -> None:
    """Write a tree, whole or not at all; not `durable`: it outlives this process, and perhaps not the machine."""
    tensors: dict[str, Tensor] = {}
    plain = _strip(tree, "", tensors)
    _write(path, _encode(tensors, {_PLAIN: json.dumps(plain)}), durable)


def load_tree(path: Path) -> Any:
    return bytes_to_tree(_read(path), str(path))


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors as a plain safetensors file, whole or not at all."""
    _write(path, _encode({k: v.detach() for k, v in tensors.items()}, {"format": "pt"}))


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Named tensors of a safetensors file, or of a state dict written by `torch.save`."""
    data = _read(path)
    if data[:2] == b"PK":  # torch.save writes a zip archive
        try:
            loaded = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
            raise CheckpointError(
                f"{path}: must hold a state dict of tensors: {str(error).partition('. ')[0]}"
            ) from error
        if not isinstance(loaded, dict) or not all(isinstance(v, Tensor) for v in loaded.values()):
            raise CheckpointError(f"{path}: must hold a state dict of tensors, got {type(loaded).__name__}")
        return loaded
    return _decode(data, str(path))[0]


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, flush to disk, then rename."""
    _write(path, [data])


def _write(path: Path, parts: Iterable[bytes | memoryview], durable: bool = True) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            file.writelines(parts)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _encode(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> list[bytes | memoryview]:
    """The parts of a safetensors file, one after the other; those of tensors look at their memory."""
    header: dict[str, Any] = {"__metadata__": metadata}
    bodies: list[memoryview] = []
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"tensor {name}: cannot be saved as {tensor.dtype}")
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        body = flat.view(torch.uint8).numpy().data
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(body)],
        }
        offset += len(body)
        bodies.append(body)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    return [len(text).to_bytes(8, "little"), text, *bodies]


def _decode(data: bytes | bytearray | memoryview, origin: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    if len(view) < 8 or length > min(len(view) - 8, _MAX_HEADER):
        raise CheckpointError(f"{origin}: not a safetensors file, or cut short ({len(view)} bytes)")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except ValueError as error:
        raise CheckpointError(f"{origin}: its header is damaged: {error}") from error
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict):
        raise CheckpointError(f"{origin}: its header is damaged: it must be a table of tensors")
    body = view[8 + length :]
    return {name: _tensor(name, entry, body, origin) for name, entry in header.items()}, metadata


def _tensor(name: str, entry: Mapping[str, Any], body: memoryview, origin: str) -> Tensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], [int(n) for n in entry["shape"]]
        start, stop = (int(n) for n in entry["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{origin}: the entry of tensor {name} is damaged: {error}") from error
    count = 1
    for n in shape:
        count *= n
    if min(shape, default=0) < 0 or stop - start != count * dtype.itemsize or not 0 <= start <= stop <= len(body):
        raise CheckpointError(f"{origin}: cut short, or tensor {name} does not have the size it claims")
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    # A copy: the bytes are read-only, and tensors must be aligned and ours.
    return torch.frombuffer(bytearray(body[start:stop]), dtype=torch.uint8).view(dtype).reshape(shape)


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with every tensor replaced by its name."""
    if isinstance(value, Tensor):
        name = path or "tensor"
        while name in tensors:  # a key with a slash in it may look like a nest
            name += "'"
        tensors[name] = value
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[k, _strip(v, f"{path}/{k}" if path else str(k), tensors)] for k, v in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_strip(v, f"{path}/{i}", tensors) for i, v in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"{path}: a {type(value).__name__} cannot be saved (tensors, numbers, text and nests of them can)"
    )


def _fill(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dict":
        return {k: _fill(v, tensors) for k, v in inner}
    if kind not in ("tuple", "list"):
        raise ValueError(f"unknown kind {kind!r}")
    items = [_fill(v, tensors) for v in inner]
    return tuple(items) if kind == "tuple" else items
