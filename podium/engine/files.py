"""Trees of tensors and plain values as safetensors bytes: for checkpoints, for models, for sending state to a rank.

The format is safetensors' own (an 8-byte length, a JSON header, raw little-endian tensors), so other tools read the
files; what is not a tensor rides in the header's metadata as JSON. Nothing is ever unpickled.

A file also carries its own SHA-256 in the metadata, computed over all its bytes with the digest's place held by zeros.
Reading verifies it, so a flipped bit is an error and not a wrong weight. Files of before there were checksums are read
as they are.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.errors import CheckpointError

_NAMES = {
    torch.complex64: "C64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
}
"""Types that safetensors has no name for: stored as bytes, with an axis more, and the type noted in the metadata."""
_PLAIN = "podium"  # the metadata key that holds everything that is not a tensor
_DIGEST = "sha256"  # the metadata key that holds the file's own checksum
_NO_DIGEST = "0" * 64
_MAX_HEADER = 64 << 20
_NUMPY_KINDS = "biufcSUmM"


class Checksum(NamedTuple):
    """What identifies a file's content."""

    size_bytes: int
    sha256: str
    """As the file itself has it; empty for a file of before there were checksums."""


def tree_to_bytes(tree: Mapping[str, Any]) -> bytes:
    """A nest of dicts, lists and tuples of tensors and plain values, as one safetensors file without a checksum."""
    tensors, metadata = _flatten(tree)
    return b"".join([_header(tensors, metadata), *map(_body, tensors.values())])


def bytes_to_tree(data: bytes | bytearray | memoryview, origin: str = "state") -> Any:
    """The inverse of `tree_to_bytes`; the tensors are copies and may be written to."""
    tensors, metadata = _decode(data, origin)
    if _PLAIN not in metadata:
        raise CheckpointError(f"{origin}: holds tensors only, not a Podium state")
    return _unflatten(metadata[_PLAIN], tensors, origin)


def check_tree(tree: Mapping[str, Any]) -> None:
    """Raise where a tree could not be saved, naming the key and the type; copies no tensor, so it is cheap."""
    tensors, metadata = _flatten(tree)
    _header(tensors, metadata)


def save_tree(path: Path, tree: Mapping[str, Any], *, durable: bool = True) -> Checksum:
    """Write a tree, whole or not at all; not `durable`: it outlives this process, and perhaps not the machine."""
    return _write_tensors(path, *_flatten(tree), durable)


def load_tree(path: Path, expected: Checksum | None = None) -> Any:
    """The tree in a file; with `expected`, the file must be the very one that was written then."""
    data = _read(path)
    if expected is not None:
        _check_identity(path, _checksum_of(data, str(path)), expected)
    return bytes_to_tree(data, str(path))


def checksum_of(path: Path, expected: Checksum | None = None) -> Checksum:
    """What a file says it is, by its header alone; `verify` also reads the rest."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, _MAX_HEADER))
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    found = Checksum(size, _digest_in(_parse_header(header, length, size, str(path))))
    if expected is not None:
        _check_identity(path, found, expected)
    return found


def verify(path: Path, expected: Checksum | None = None) -> None:
    """Raise where a file is damaged, or is not the one that is `expected`. Reads all of it, a part at a time."""
    found = checksum_of(path, expected)
    if not found.sha256:
        _decode(_read(path), str(path))  # no checksum: at least its sizes have to fit
        return
    try:
        with path.open("rb") as file:
            start = file.read(8)
            header = file.read(int.from_bytes(start, "little"))
            digest = hashlib.sha256(start + _without_digest(header, found.sha256))
            while part := file.read(1 << 20):
                digest.update(part)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    _check_digest(str(path), digest.hexdigest(), found.sha256)


def save_tensors(path: Path, tensors: Mapping[str, Any]) -> Checksum:
    """Write a state dict as a plain safetensors file, whole or not at all.

    What a module's `get_extra_state` returned and is no tensor goes into the metadata: other tools see the tensors.
    """
    named = {k: v.detach() for k, v in tensors.items() if isinstance(v, Tensor)}
    others = {k: v for k, v in tensors.items() if not isinstance(v, Tensor)}
    metadata = {"format": "pt"}
    if others:
        metadata[_PLAIN] = json.dumps(_strip(others, "", named))
    return _write_tensors(path, named, metadata)


def load_tensors(path: Path) -> dict[str, Any]:
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
    tensors, metadata = _decode(data, str(path))
    if _PLAIN not in metadata or metadata.get("format") != "pt":
        return tensors
    parts = _Parts(tensors)
    others = _unflatten(metadata[_PLAIN], parts, str(path))
    return {**{k: v for k, v in tensors.items() if k not in parts.used}, **others}


def write_atomically(path: Path, data: bytes) -> None:
    """Write beside the target, flush to disk, then rename."""
    with _replacing(path, durable=True) as file:
        file.write(data)


def make_folder(path: Path) -> None:
    """Make a folder and those above it, each on disk before this returns. One that is there is left alone."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries: without it, a file that was renamed into it may be gone after a power failure."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that has no such thing
            raise
    finally:
        os.close(folder)


# Writing.


@contextlib.contextmanager
def _replacing(path: Path, *, durable: bool) -> Iterator[BinaryIO]:
    """Write a file beside the target; it takes the target's place once all of it is there."""
    partial = path.with_name(path.name + ".partial")
    try:
        try:
            make_folder(path.parent)
            with partial.open("wb") as file:
                yield file
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            partial.replace(path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # a full disk has no room for half a file
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise CheckpointError(f"{path} cannot be written: {error.strerror or error}") from error


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], durable: bool = True
) -> Checksum:
    header = _header(tensors, {_DIGEST: _NO_DIGEST, **metadata})
    digest, size = hashlib.sha256(header), len(header)
    with _replacing(path, durable=durable) as file:
        file.write(header)
        for tensor in tensors.values():
            body = _body(tensor)
            digest.update(body)
            size += file.write(body)
        file.seek(header.index(_NO_DIGEST.encode()))
        file.write(digest.hexdigest().encode())
    return Checksum(size, digest.hexdigest())


def _header(tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> bytes:
    """Length and header of a safetensors file; raises where a tensor cannot be in one."""
    odd = {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items() if t.dtype not in _NAMES}
    for name, tensor in tensors.items():
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = "a meta tensor" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
            raise CheckpointError(f"tensor {name}: cannot be saved as {kind}; make it dense, or do without it")
        if odd.get(name) not in (None, *_AS_BYTES):
            raise CheckpointError(f"tensor {name}: cannot be saved as {tensor.dtype}")
    if odd:
        metadata = {**metadata, "dtypes": json.dumps(odd)}
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        shape, size = list(tensor.shape), tensor.numel() * tensor.dtype.itemsize
        if name in odd:
            shape = [*shape, tensor.dtype.itemsize]
        dtype = "U8" if name in odd else _NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors start at a multiple of 8
    if len(text) > _MAX_HEADER:
        raise CheckpointError(
            f"what is not a tensor must fit into {_MAX_HEADER >> 20} MiB as JSON, got {len(text) >> 20} MiB; keep "
            "large data as tensors, arrays or bytes"
        )
    return len(text).to_bytes(8, "little") + text


def _body(tensor: Tensor) -> memoryview:
    """A tensor's bytes; those of a contiguous one on the CPU are its own memory."""
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().data


# Reading.


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error


def _parse_header(text: bytes, length: int, size: int, origin: str) -> dict[str, Any]:
    if size < 8 or length > min(size - 8, _MAX_HEADER):
        raise CheckpointError(f"{origin}: not a safetensors file, or cut short ({size} bytes)")
    try:
        header: dict[str, Any] = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{origin}: its header is damaged: {error}") from error
    metadata = header.get("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError(f"{origin}: its header is damaged: it must be a table of tensors")
    if _DIGEST not in metadata and any(re.fullmatch("[0-9a-f]{64}", value) for value in metadata.values()):
        raise CheckpointError(f"{origin}: its header is damaged: it has a checksum under another name")
    return header


def _digest_in(header: Mapping[str, Any]) -> str:
    return str(header.get("__metadata__", {}).get(_DIGEST, ""))


def _checksum_of(data: bytes, origin: str) -> Checksum:
    length = int.from_bytes(data[:8], "little")
    return Checksum(len(data), _digest_in(_parse_header(data[8 : 8 + length], length, len(data), origin)))


def _check_identity(path: Path, found: Checksum, expected: Checksum) -> None:
    if found.size_bytes != expected.size_bytes:
        raise CheckpointError(
            f"{path}: cut short, or not the file that was written: must have {expected.size_bytes:,} bytes, "
            f"got {found.size_bytes:,}"
        )
    if found.sha256 != expected.sha256:
        raise CheckpointError(
            f"{path}: not the file that was written with this checkpoint: its checksum must be "
            f"{expected.sha256[:16]}…, got {found.sha256[:16] or 'none'}…"
        )


def _check_digest(origin: str, found: str, expected: str) -> None:
    if found != expected:
        raise CheckpointError(
            f"{origin}: damaged: its bytes must have the checksum {expected[:16]}…, got {found[:16]}…"
        )


def _without_digest(header: bytes, digest: str) -> bytes:
    return header.replace(digest.encode(errors="replace"), _NO_DIGEST.encode(), 1)


def _decode(data: bytes | bytearray | memoryview, origin: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    view = memoryview(data)
    length = int.from_bytes(view[:8], "little")
    text = bytes(view[8 : 8 + length]) if length <= _MAX_HEADER else b""
    header = _parse_header(text, length, len(view), origin)
    body = view[8 + length :]
    if expected := _digest_in(header):
        digest = hashlib.sha256(view[:8])
        digest.update(_without_digest(text, expected))
        digest.update(body)
        _check_digest(origin, digest.hexdigest(), expected)
    metadata = header.pop("__metadata__", {})
    tensors = {name: _tensor(name, entry, body, origin) for name, entry in header.items()}
    for name, dtype in _odd_dtypes(metadata, origin).items():
        if dtype not in _AS_BYTES or name not in tensors or tensors[name].shape[-1:] != (_AS_BYTES[dtype].itemsize,):
            raise CheckpointError(f"{origin}: the entry of tensor {name} is damaged: it cannot be {dtype}")
        tensors[name] = tensors[name].view(_AS_BYTES[dtype]).squeeze(-1)
    return tensors, metadata


def _odd_dtypes(metadata: Mapping[str, str], origin: str) -> dict[str, str]:
    try:
        found = json.loads(metadata.get("dtypes", "{}"))
        return {str(name): str(dtype) for name, dtype in found.items()}
    except (ValueError, AttributeError) as error:
        raise CheckpointError(f"{origin}: its header is damaged: {error}") from error


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


# Trees.


def _flatten(tree: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a tree by name, and the rest of it as metadata."""
    tensors: dict[str, Tensor] = {}
    try:
        plain = _strip(tree, "", tensors)
        return tensors, {_PLAIN: json.dumps(plain)}
    except RecursionError:
        raise CheckpointError("a state that holds itself, or is nested without end, cannot be saved") from None


def _unflatten(text: str, tensors: Mapping[str, Tensor], origin: str) -> Any:
    try:
        return _fill(json.loads(text), tensors)
    except (ValueError, KeyError, TypeError, RuntimeError, RecursionError) as error:
        raise CheckpointError(f"{origin}: what it says of its tensors is damaged: {error!r}") from error


def _strip(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """The tree with every tensor, array and run of bytes replaced by its name."""
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
        if isinstance(value, np.generic):  # with its type: arithmetic with a float32 is not that with a float
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


_SEQUENCES = {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}


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


class _Parts(dict[str, Tensor]):
    """Tensors by name, and which of them were asked for."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        return super().__getitem__(name)
