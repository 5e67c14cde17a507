"""CIFAR-10's binary files: samples of one label byte and 3,072 pixel bytes, channels first, one after another."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from podium.data.files import check_labels, find_file, read_bytes
from podium.errors import DataError

SHAPE = (3, 32, 32)
SAMPLE_BYTES = 1 + 3 * 32 * 32


def read_cifar(path: str | Path, *, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Images (bytes, a memory map unless the file is compressed) and labels of one file."""
    path = Path(path)
    raw = read_bytes(path)
    samples, rest = divmod(raw.size, SAMPLE_BYTES)
    if rest:
        raise DataError(
            f"{path}: must hold whole samples of {SAMPLE_BYTES} bytes, "
            f"but is truncated or not CIFAR-10: {samples} samples and {rest} bytes"
        )
    rows = raw.reshape(samples, SAMPLE_BYTES)
    return rows[:, 1:].reshape(samples, *SHAPE), check_labels(path, rows[:, 0], classes)


def cifar_files(folder: str | Path, split: str) -> list[Path]:
    """The files of a split: `train` is every data_batch_1 … data_batch_5 that exists, `test` is test_batch."""
    if split == "test":
        return [find_file(folder, "test_batch.bin")]
    names = [f"data_batch_{n}.bin" for n in range(1, 6)]
    there = [name for name in names if any((Path(folder) / (name + packed)).is_file() for packed in ("", ".gz"))]
    return [find_file(folder, name) for name in there or names[:1]]
