"""TinyImageNet as its archive unpacks: 64 × 64 JPEG files in folders.

    train/n01443537/images/n01443537_0.JPEG …    one folder per class, named by its WordNet number
    val/images/val_0.JPEG …                       all classes in one folder
    val/val_annotations.txt                       file, class and box of each, between tabs

A class's index is its place among the sorted names of the folders in `train`. Files are decoded when a sample is first
read and then cached as bytes, so a run that uses a part of the set pays for that part: 12 kB of memory per image used.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from podium.data.base import Data, Dataset, Transform
from podium.errors import DataError, MissingExtra

SIDE = 64
SHAPE = (3, SIDE, SIDE)


def tiny_imagenet(folder: str | Path, *, augment: Transform | None = None, classes: int = 200) -> Data:
    """Training and validation set of a folder; `augment` is for training only."""
    folder = Path(folder)
    names = class_names(folder)
    if len(names) > classes:
        raise DataError(f"{folder}: must hold at most {classes} classes, got {len(names)} folders in train")
    train = [(path, i) for i, name in enumerate(names) for path in _images(folder / "train" / name / "images")]
    return Data(train=JpegDataset(train, augment=augment), test=JpegDataset(_validation(folder, names)))


def class_names(folder: Path) -> list[str]:
    """The classes in the order of their indices."""
    train = folder / "train"
    names = sorted(entry.name for entry in train.iterdir() if entry.is_dir()) if train.is_dir() else []
    if not names:
        raise DataError(f"{folder}: must hold train/CLASS/images/*.JPEG, val/images and val/val_annotations.txt")
    return names


@final
class JpegDataset(Dataset):
    """Images of one size by path, decoded once each."""

    def __init__(self, samples: Sequence[tuple[Path, int]], *, augment: Transform | None = None) -> None:
        if not samples:
            raise DataError("images: there must be at least one, got none")
        self.paths = [path for path, _ in samples]
        self.targets = np.array([target for _, target in samples], dtype=np.int64)
        self.augment = augment
        # Pages that are never written take no memory.
        self._pixels = np.empty((len(samples), *SHAPE), dtype=np.uint8)
        self._is_here = np.zeros(len(samples), dtype=bool)

    def __len__(self) -> int:
        return len(self.paths)

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        for i in np.unique(indices):
            if not self._is_here[i]:
                self._pixels[i] = read_image(self.paths[i])
                self._is_here[i] = True
        inputs = scale(torch.from_numpy(self._pixels[indices]))
        if self.augment is not None and keys is not None:
            inputs = self.augment(inputs, keys)
        return inputs, torch.from_numpy(self.targets[indices])


def read_image(path: Path) -> np.ndarray:
    """The image's bytes, channels first; a grey image gets three equal channels."""
    pillow = _pillow()
    try:
        with pillow.open(path) as image:
            size, pixels = image.size, np.asarray(image.convert("RGB"))
    except OSError as error:
        raise DataError(f"{path}: must be an image, but cannot be decoded: {error}") from error
    if size != (SIDE, SIDE):
        raise DataError(f"{path}: images must be {SIDE} × {SIDE}, got {size[0]} × {size[1]}")
    return pixels.transpose(2, 0, 1)


def scale(pixels: Tensor) -> Tensor:
    """Bytes to numbers of about zero mean and unit variance, by ImageNet's usual mean and deviation per channel."""
    mean = torch.tensor([0.485, 0.456, 0.406])[:, None, None]
    deviation = torch.tensor([0.229, 0.224, 0.225])[:, None, None]
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(deviation)


def _validation(folder: Path, names: Sequence[str]) -> list[tuple[Path, int]]:
    place = {name: i for i, name in enumerate(names)}
    listed = folder / "val" / "val_annotations.txt"
    try:
        lines = listed.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise DataError(f"{listed}: cannot be read: {error.strerror or error}") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        file, _, rest = line.partition("\t")
        name = rest.partition("\t")[0].strip()
        if name not in place:
            raise DataError(f"{listed}: line {number}: the class must be a folder in train, got {name!r}")
        found.append((folder / "val" / "images" / file, place[name]))
    if not found:
        raise DataError(f"{listed}: must list at least one image, got none")
    return found


def _images(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("*") if path.suffix.lower() in (".jpeg", ".jpg"))
    if not found:
        raise DataError(f"{folder}: must hold at least one .JPEG file, got none")
    return found


def _pillow() -> Any:
    try:
        return importlib.import_module("PIL.Image")
    except ImportError:
        raise MissingExtra("pillow", "study", "reading JPEG images") from None
