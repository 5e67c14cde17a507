"""Data as Podium sees it: a length, and rows by index.

A data set hands out whole batches by index, so that memory maps and in-memory arrays cost one gather, and so that
any rank can read any sample: who reads what is decided by the global order (`podium.data.order`), not by the data.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from podium.errors import DataError

Transform = Callable[[Tensor, np.ndarray], Tensor]
"""(inputs, keys) to inputs. One uint64 key per sample, fixed by (seed, epoch, sample): draw randomness from it only."""


class Dataset(ABC):
    """Samples by index."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
        """Inputs and targets of these samples, batched. `keys` seeds augmentation; None means none is wanted."""


class Data(NamedTuple):
    """What a task trains and validates on."""

    train: Dataset
    test: Dataset


@final
class ArrayDataset(Dataset):
    """Two arrays of equal length: tensors, numpy arrays or memory maps; nothing is copied until gathered."""

    def __init__(
        self,
        inputs: Tensor | np.ndarray,
        targets: Tensor | np.ndarray,
        *,
        prepare: Callable[[Tensor], Tensor] | None = None,
        augment: Transform | None = None,
    ) -> None:
        """`prepare` turns gathered raw rows into model inputs (scaling bytes, say); `augment` is for training only."""
        if len(inputs) != len(targets):
            raise DataError(f"inputs and targets must have equal length, got {len(inputs)} and {len(targets)}")
        self.inputs, self.targets = inputs, targets
        self.prepare, self.augment = prepare, augment

    def __len__(self) -> int:
        return len(self.targets)

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        inputs, targets = _rows(self.inputs, indices), _rows(self.targets, indices)
        if self.prepare is not None:
            inputs = self.prepare(inputs)
        if self.augment is not None and keys is not None:
            inputs = self.augment(inputs, keys)
        return inputs, targets


@final
class MapDataset(Dataset):
    """Any map-style data set (`__len__`, `__getitem__`), collated as PyTorch's DataLoader would."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
        from torch.utils.data import default_collate

        inputs, targets = default_collate([self.items[int(i)] for i in indices])
        return inputs, targets


def as_dataset(items: Any) -> Dataset:
    """A Dataset as it is; a pair of arrays or a map-style data set, wrapped."""
    if isinstance(items, Dataset):
        return items
    if isinstance(items, tuple) and len(items) == 2:
        return ArrayDataset(*items)
    if hasattr(items, "__len__") and hasattr(items, "__getitem__"):
        return MapDataset(items)
    raise DataError(f"data must be a Dataset, a pair of arrays or a map-style data set, got {type(items).__name__}")


def _rows(array: Tensor | np.ndarray, indices: np.ndarray) -> Tensor:
    if isinstance(array, Tensor):
        return array[torch.from_numpy(indices)]
    rows = array[indices]
    # Files may hold either byte order; torch knows only this machine's.
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("=")))
