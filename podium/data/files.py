"""Bytes of data files, memory-mapped where possible.

An uncompressed file is memory-mapped, so that it may be larger than memory. A gzip file has to be unpacked into memory;
unpack it on disk where that is too much. Every error names the file, what must hold and what was found.
"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

import numpy as np

from podium.errors import DataError


def find_file(folder: str | Path, *names: str) -> Path:
    """The first of these files that the folder has, compressed (.gz) or not."""
    wanted = [packed for name in names for packed in (name, name + ".gz")]
    for name in wanted:
        path = Path(folder) / name
        if path.is_file():
            return path
    raise DataError(f"{folder}: must hold {' or '.join(wanted)}, {_what_is_there(Path(folder))}")


def read_bytes(path: str | Path) -> np.ndarray:
    """A file's bytes as a flat uint8 array: a read-only memory map, or unpacked in memory when it ends in .gz."""
    path = Path(path)
    try:
        data = _unpack(path) if path.suffix == ".gz" else _map(path)
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not data.size:
        raise DataError(f"{path}: must hold data, but is empty")
    return data


def check_labels(path: Path, labels: np.ndarray, classes: int) -> np.ndarray:
    """Labels as int64; raises DataError where one is not a class."""
    if labels.dtype.kind not in "iu":
        raise DataError(f"{path}: labels must be whole numbers, got {labels.dtype}")
    wrong = np.flatnonzero((labels < 0) | (labels >= classes))
    if wrong.size:
        raise DataError(f"{path}: labels must lie in 0 … {classes - 1}, got {labels[wrong[0]]} at sample {wrong[0]}")
    return labels.astype(np.int64)


def _map(path: Path) -> np.ndarray:
    if path.stat().st_size == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def _unpack(path: Path) -> np.ndarray:
    try:
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), dtype=np.uint8)
    except EOFError as error:
        raise DataError(f"{path}: must be a whole gzip file, but is truncated") from error
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{path}: must be a gzip file, but is corrupt: {error}") from error


def _what_is_there(folder: Path) -> str:
    if not folder.is_dir():
        return "but there is no such folder"
    names = sorted(entry.name for entry in folder.iterdir())
    if not names:
        return "but is empty"
    return f"but holds {', '.join(names[:8])}{' …' if len(names) > 8 else ''}"
