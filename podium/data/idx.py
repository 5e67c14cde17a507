"""IDX, the format of MNIST's files: two zero bytes, a type, the number of dimensions, the dimensions, the values.

All numbers are big-endian. Bytes are returned as a view of the memory map; wider types are converted to this machine's
byte order, which loads them.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from podium.data.files import check_labels, find_file, read_bytes
from podium.errors import DataError

TYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
"""The third byte of an IDX file to the type of its values."""


def read_idx(path: str | Path) -> np.ndarray:
    """The array in an IDX file; memory-mapped when the file is not compressed and holds bytes."""
    path = Path(path)
    raw = read_bytes(path)
    if raw.size < 4 or raw[0] != 0 or raw[1] != 0 or int(raw[2]) not in TYPES or raw[3] == 0:
        raise DataError(f"{path}: must begin as an IDX file (0, 0, type, dimensions), got bytes {raw[:4].tolist()}")
    dtype, start = np.dtype(TYPES[int(raw[2])]), 4 + 4 * int(raw[3])
    if raw.size < start:
        raise DataError(f"{path}: must hold a header of {start} bytes, but is truncated at {raw.size}")
    shape = tuple(int(n) for n in raw[4:start].view(">u4"))
    expected = start + math.prod(shape) * dtype.itemsize
    if raw.size != expected:
        what = "is truncated" if raw.size < expected else "is longer"
        raise DataError(f"{path}: shape {shape} needs {expected} bytes, but the file {what}: {raw.size} bytes")
    if 0 in shape:
        raise DataError(f"{path}: must hold at least one sample, got shape {shape}")
    values = raw[start:].view(dtype).reshape(shape)
    return values if dtype.itemsize == 1 else values.astype(dtype.newbyteorder("="))


def read_idx_pair(folder: str | Path, split: str, *, classes: int = 10) -> tuple[np.ndarray, np.ndarray]:
    """Images and labels of one split (`train` or `t10k`) of a folder laid out as MNIST's."""
    # Some copies of MNIST write a dot where others write a dash.
    images_path = find_file(folder, f"{split}-images-idx3-ubyte", f"{split}-images.idx3-ubyte")
    labels_path = find_file(folder, f"{split}-labels-idx1-ubyte", f"{split}-labels.idx1-ubyte")
    images, labels = read_idx(images_path), read_idx(labels_path)
    if images.ndim != 3 or images.dtype != np.uint8:
        raise DataError(f"{images_path}: must hold images of bytes, got {images.ndim} dimensions of {images.dtype}")
    if labels.ndim != 1:
        raise DataError(f"{labels_path}: must hold one label per sample, got {labels.ndim} dimensions")
    if len(images) != len(labels):
        raise DataError(f"{labels_path}: must hold a label for each of {len(images)} images, got {len(labels)}")
    return images, check_labels(labels_path, labels, classes)
