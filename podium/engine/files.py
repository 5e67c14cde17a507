"""State and models as safetensors files: for checkpoints, for models, for sending state to a rank.

Values that are not tensors are JSON in the header's metadata (`state_tree`), so other tools read the tensors. Nothing
is ever unpickled. The package `safetensors` reads: it checks every size against the bytes before it allocates. This
module writes, for three reasons: the package orders the metadata at random, so the same state would give different
bytes in every process; it refuses tensors that share memory, as tied weights do; and it needs all tensors of a GPU in
the host's memory at once, where this needs one.

A file also carries its own SHA-256 in the metadata, computed over all its bytes with zeros in place of the digest.
Reading verifies it, so a flipped bit is an error and not a wrong weight. A file without a checksum is read unverified.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from podium.engine.state_tree import fill, strip
from podium.errors import CheckpointError
from podium.records.disk import replacing

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
_AS_BYTES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.complex128, torch.complex32, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
        *(torch.float8_e8m0fnu, torch.float4_e2m1fn_x2),
    )
}
"""Types that safetensors has no name for: stored as bytes, with one more axis, and the type in the metadata."""
_PLAIN = "podium"  # the metadata key that holds everything that is not a tensor
_DIGEST = "sha256"  # the metadata key that holds the file's own checksum
_NO_DIGEST = "0" * 64
_MAX_HEADER = 64 << 20


class Checksum(NamedTuple):
    """Identifies a file's content."""

    size_bytes: int
    sha256: str
    """From the file's header; empty for a file without a checksum."""


def tree_to_bytes(tree: Mapping[str, Any]) -> bytes:
    """A nest of dicts, lists and tuples of tensors and plain values, as one safetensors file without a checksum."""
    tensors: dict[str, Tensor] = {}
    text = strip(tree, tensors)
    return b"".join([_header(tensors, {_PLAIN: text}), *map(_body, tensors.values())])


def bytes_to_tree(data: bytes | bytearray | memoryview, origin: str = "state") -> Any:
    """The inverse of `tree_to_bytes`; the tensors are copies and may be written to."""
    tensors, metadata = _decode(data, origin)
    if _PLAIN not in metadata:
        raise CheckpointError(f"{origin}: holds tensors only, not a Podium state")
    return fill(metadata[_PLAIN], tensors, origin)


def check_tree(tree: Mapping[str, Any]) -> None:
    """Raise where a tree could not be saved, naming the key and the type; copies no tensor, so it is cheap."""
    tensors: dict[str, Tensor] = {}
    _header(tensors, {_PLAIN: strip(tree, tensors)})


def save_tree(path: Path, tree: Mapping[str, Any], *, durable: bool = True) -> Checksum:
    """Write a tree atomically; not `durable`: without fsync, so a power failure may lose it."""
    tensors: dict[str, Tensor] = {}
    metadata = {_PLAIN: strip(tree, tensors)}
    return _write_tensors(path, tensors, metadata, durable)


def load_tree(path: Path, expected: Checksum | None = None) -> Any:
    """The tree in a file; with `expected`, raises unless the file has this checksum."""
    data = _read(path)
    if expected is not None:
        _check_identity(path, _checksum_of(data, str(path)), expected)
    return bytes_to_tree(data, str(path))


def checksum_of(path: Path, expected: Checksum | None = None) -> Checksum:
    """The checksum in a file's header; `verify` also reads the rest."""
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
    """Raise where a file is damaged or is not the `expected` one. Reads all of it, 1 MiB at a time."""
    found = checksum_of(path, expected)
    if not found.sha256:
        _decode(_read(path), str(path))  # no checksum: at least its sizes must match
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
    """Write a state dict as a plain safetensors file, atomically.

    Values of `get_extra_state` that are not tensors go into the metadata: other tools see the tensors.
    """
    named = {k: v.detach() for k, v in tensors.items() if isinstance(v, Tensor)}
    others = {k: v for k, v in tensors.items() if not isinstance(v, Tensor)}
    metadata = {"format": "pt"}
    if others:
        metadata[_PLAIN] = strip(others, named)
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
    others = fill(metadata[_PLAIN], parts, str(path))
    return {**{k: v for k, v in tensors.items() if k not in parts.used}, **others}


# Writing.


def _write_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str], durable: bool = True
) -> Checksum:
    header = _header(tensors, {_DIGEST: _NO_DIGEST, **metadata})
    digest, size = hashlib.sha256(header), len(header)
    with replacing(path, durable=durable, error=CheckpointError) as partial, partial.open("wb") as file:
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
    """A tensor's bytes; of a contiguous tensor on the CPU without a copy."""
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
    try:
        found = safetensors.torch.load(bytes(data))
        tensors = {name: found[name] for name in header}  # the package returns them in no fixed order
    except (safetensors.SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{origin}: cut short or damaged: {error}") from error
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


class _Parts(dict[str, Tensor]):
    """Tensors by name; remembers which of them were read."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(tensors)
        self.used: set[str] = set()

    def __getitem__(self, name: str) -> Tensor:
        self.used.add(name)
        return super().__getitem__(name)
