"""The user's saved arrays: numpy's .npy and .npz, torch's .pt.

A folder holds, for each of `train` and `test`, one of

    train_inputs.npy + train_targets.npy   memory-mapped, so they may be larger than memory
    train.pt                               a dict with tensors `inputs` and `targets`, or a pair of them; memory-mapped
    train.npz                              arrays `inputs` and `targets`; loaded

Nothing is unpickled: object arrays and anything but tensors and plain containers are refused.
"""

from __future__ import annotations

import pickle
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import torch
from torch import Tensor

from podium.data.base import ArrayDataset, Data, Transform
from podium.errors import DataError

A = TypeVar("A", Tensor, np.ndarray)
Loaded = TypeVar("Loaded")


def read_npy(path: str | Path) -> np.ndarray:
    """The array of a .npy file, as a read-only memory map."""
    path = Path(path)
    array = _load_numpy(path, np.ndarray, path, mmap_mode="r")
    _check_array(path, "the array", array)
    return array


def read_npz(path: str | Path) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a .npz file, loaded."""
    path = Path(path)
    # Opened here, since numpy leaves a file that it cannot read open.
    with _open(path) as file, _load_numpy(path, np.lib.npyio.NpzFile, file) as archive:
        if not {"inputs", "targets"} <= set(archive):
            raise DataError(f"{path}: must hold arrays 'inputs' and 'targets', got {sorted(archive)}")
        try:
            inputs, targets = archive["inputs"], archive["targets"]
        except (ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{path}: must hold plain arrays, but is corrupt or holds objects: {error}") from error
    return _check_pair(path, inputs, targets)


def read_pt(path: str | Path) -> tuple[Tensor, Tensor]:
    """Inputs and targets of a file written by torch.save, memory-mapped where its format allows."""
    path = Path(path)
    try:
        held = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as error:
        first_line = str(error).partition("\n")[0]
        raise DataError(f"{path}: must hold tensors saved by torch.save, but cannot be loaded: {first_line}") from error
    if isinstance(held, dict) and {"inputs", "targets"} <= held.keys():
        held = (held["inputs"], held["targets"])
    if not isinstance(held, tuple | list) or len(held) != 2 or not all(isinstance(x, Tensor) for x in held):
        raise DataError(f"{path}: must hold tensors 'inputs' and 'targets' or a pair, got {type(held).__name__}")
    return _check_pair(path, held[0], held[1])


def read_arrays(
    folder: str | Path, *, prepare: Callable[[Tensor], Tensor] | None = None, augment: Transform | None = None
) -> Data:
    """Train and test set of a folder; `prepare` and `augment` as in ArrayDataset."""
    train, test = (_read_split(Path(folder), split) for split in ("train", "test"))
    return Data(train=ArrayDataset(*train, prepare=prepare, augment=augment), test=ArrayDataset(*test, prepare=prepare))


def _read_split(folder: Path, split: str) -> tuple[Tensor | np.ndarray, Tensor | np.ndarray]:
    if (folder / f"{split}.npz").is_file():
        return read_npz(folder / f"{split}.npz")
    if (folder / f"{split}.pt").is_file():
        return read_pt(folder / f"{split}.pt")
    names = [folder / f"{split}_{part}.npy" for part in ("inputs", "targets")]
    for path in names:
        if not path.is_file():
            raise DataError(
                f"{folder}: must hold {split}_inputs.npy and {split}_targets.npy, {split}.npz or {split}.pt"
            )
    inputs, targets = (read_npy(path) for path in names)
    return _check_pair(names[1], inputs, targets)


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error


def _load_numpy(path: Path, kind: type[Loaded], source: Path | BinaryIO, **options: Any) -> Loaded:
    try:
        held = np.load(source, allow_pickle=False, **options)
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise DataError(f"{path}: must be a plain numpy file, but is truncated or not one: {error}") from error
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}") from error
    if not isinstance(held, kind):
        raise DataError(f"{path}: must be a {path.suffix} file, but holds a {type(held).__name__}")
    return held


def _check_pair(path: Path, inputs: A, targets: A) -> tuple[A, A]:
    _check_array(path, "inputs", inputs)
    _check_array(path, "targets", targets)
    if len(inputs) != len(targets):
        raise DataError(f"{path}: inputs and targets must have equal length, got {len(inputs)} and {len(targets)}")
    return inputs, targets


def _check_array(path: Path, what: str, array: Tensor | np.ndarray) -> None:
    if isinstance(array, np.ndarray) and array.dtype.kind not in "biuf":
        raise DataError(f"{path}: {what} must hold numbers, got {array.dtype}")
    if array.ndim == 0 or len(array) == 0:
        raise DataError(f"{path}: {what} must hold at least one sample, got shape {tuple(array.shape)}")
