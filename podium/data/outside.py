"""Data sets of torchvision and Hugging Face, where those are installed. Downloads only with `download=True`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from podium.data.base import Data, Dataset, MapDataset
from podium.errors import ConfigError, DataError, MissingExtra, UnknownName


def torchvision_data(
    name: str, root: str | Path, *, download: bool = False, transform: Callable[[Any], Any] | None = None
) -> Data:
    """A data set of `torchvision.datasets` that has a `train` switch, as MNIST or CIFAR10.

    `transform` turns an image into a model input; without it, bytes become numbers between 0 and 1, channels first.
    """
    datasets = _need("torchvision", "a torchvision data set").datasets
    make = getattr(datasets, name, None)
    if make is None:
        raise UnknownName("torchvision data set", name, datasets.__all__)

    def open_split(train: bool) -> Dataset:
        try:
            return MapDataset(make(str(root), train=train, download=download, transform=transform or image_to_tensor))
        except RuntimeError as error:
            hint = "" if download else "; pass download=True to fetch it"
            raise DataError(f"{root}: must hold torchvision's {name}: {error}{hint}") from error

    return Data(train=open_split(True), test=open_split(False))


def hugging_face_data(
    source: str | Path,
    *,
    inputs: str,
    targets: str,
    splits: tuple[str, str] = ("train", "test"),
    download: bool = False,
    prepare: Callable[[Tensor], Tensor] | None = None,
) -> Data:
    """Two columns of a Hugging Face data set: a folder written by `save_to_disk`, or with `download` a name on the hub.

    Rows come in torch format; `prepare` turns a batch of the inputs column into model inputs.
    """
    datasets = _need("datasets", "a Hugging Face data set")
    if Path(source).is_dir():
        held = _from_disk(datasets, source)
    elif download:
        held = datasets.load_dataset(str(source))
    else:
        raise DataError(f"{source}: must be a folder written by save_to_disk; pass download=True to fetch it by name")
    if not isinstance(held, dict):
        raise DataError(f"{source}: must hold splits {' and '.join(splits)}, got a single {type(held).__name__}")
    for split in splits:
        if split not in held:
            raise UnknownName(f"split of {source}", split, held)
    train, test = (ColumnsDataset(held[split], inputs, targets, prepare) for split in splits)
    return Data(train=train, test=test)


@final
class ColumnsDataset(Dataset):
    """Two columns of a Hugging Face table. Its rows stay in the memory-mapped file until gathered."""

    def __init__(
        self, table: Any, inputs: str, targets: str, prepare: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        for column in (inputs, targets):
            if column not in table.column_names:
                raise UnknownName("column", column, table.column_names)
        self.table = table.with_format("torch", columns=[inputs, targets])
        self.inputs, self.targets, self.prepare = inputs, targets, prepare

    def __len__(self) -> int:
        return len(self.table)

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        rows = self.table[indices.tolist()]
        inputs: Tensor = rows[self.inputs]
        return (inputs if self.prepare is None else self.prepare(inputs)), rows[self.targets]


def image_to_tensor(image: Any) -> Tensor:
    """An image to numbers between 0 and 1, channels first."""
    pixels = np.array(image, dtype=np.float32) / 255
    return torch.from_numpy(pixels[None] if pixels.ndim == 2 else np.ascontiguousarray(pixels.transpose(2, 0, 1)))


def _from_disk(datasets: Any, source: str | Path) -> Any:
    try:
        return datasets.load_from_disk(str(source))
    except OSError as error:
        raise DataError(f"{source}: must be a folder written by save_to_disk, but cannot be read: {error}") from error


def _need(package: str, purpose: str) -> Any:
    try:
        return importlib.import_module(package)
    except (ImportError, RuntimeError) as error:  # a torchvision built for another torch raises either
        if isinstance(error, ModuleNotFoundError) and error.name == package:
            raise MissingExtra(package, "data", purpose) from error
        raise ConfigError(f"{purpose} needs {package}, which cannot be imported: {error}") from error
