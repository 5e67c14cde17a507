"""Data as Podium sees it: a length, and rows by index.

A data set returns whole batches by index, so that memory maps and in-memory arrays cost one gather, and so that any
rank can read any sample: the global order (`podium.data.order`), not the data set, decides which rank reads which.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
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
        """Inputs and targets of these samples, batched. `keys` seeds augmentation; None: no augmentation."""


class Data(NamedTuple):
    """What a task trains and validates on."""

    train: Dataset
    test: Dataset


@final
class ArrayDataset(Dataset):
    """Two arrays of equal length: tensors, numpy arrays or memory maps; `gather` copies, nothing else does."""

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

        inputs, targets = default_collate([as_pair(self.items[int(i)], f"sample {i}") for i in indices])
        return inputs, targets


def read_pair(dataset: Dataset, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Any, Any]:
    """Inputs and targets of these samples; raises DataError unless `gather` returns a pair."""
    found = dataset.gather(indices, keys)
    if not isinstance(found, tuple | list) or len(found) != 2:
        raise DataError(f"{type(dataset).__name__}.gather must return (inputs, targets), got {_described(found)}")
    return found[0], found[1]


def as_pair(sample: Any, who: str) -> tuple[Any, Any]:
    """A sample as (inputs, target). Anything else is refused: unpacked, it would be trained on as something else."""
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise DataError(
            f"{who} must be a pair (inputs, target), got {_described(sample)}; inputs and target may be dicts or "
            "tuples of tensors themselves. Wrap the data set: return (sample, target), with any number as target if "
            "the sample has none"
        )
    return sample[0], sample[1]


def _described(value: Any) -> str:
    """Describes a value that is not a pair, for error messages."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        return f"a {kind} with keys {', '.join(map(repr, list(value)[:5]))}"
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return f"a {kind} with fields {', '.join(value._fields)}"
    if isinstance(value, Tensor | np.ndarray):
        return f"a {kind} of shape {tuple(value.shape)}"
    return f"a {kind} of {len(value)}" if isinstance(value, tuple | list) else f"a {kind}"


def as_dataset(items: Any) -> Dataset:
    """A Dataset unchanged; a pair of arrays or a map-style data set, wrapped."""
    if isinstance(items, Dataset):
        return items
    if isinstance(items, tuple) and len(items) == 2 and all(isinstance(each, Tensor | np.ndarray) for each in items):
        return ArrayDataset(*items)
    # A tuple holds arrays, a mapping columns: neither is a sequence of samples.
    streams = _is_a("IterableDataset", items)
    holds_samples = hasattr(items, "__len__") and hasattr(items, "__getitem__") and not streams
    if holds_samples and not isinstance(items, tuple | Mapping | str | bytes):
        return MapDataset(items)
    hint = ""
    if _is_a("DataLoader", items):
        hint = "; pass the DataLoader's data set instead: Podium batches and shuffles itself"
    elif streams:
        hint = "; a worker reads its samples by index, which an IterableDataset does not support"
    raise DataError(
        "data must be a Dataset, a pair of arrays (inputs, targets) or a map-style data set whose samples are pairs, "
        f"got {_described(items)}{hint}"
    )


def _is_a(name: str, items: Any) -> bool:
    """Whether a class of this name is among its bases; by name, so that PyTorch's data module need not be imported."""
    return any(kind.__name__ == name for kind in type(items).__mro__)


def _rows(array: Tensor | np.ndarray, indices: np.ndarray) -> Tensor:
    if isinstance(array, Tensor):
        return array[torch.from_numpy(indices)]
    rows = array[indices]
    # Files may hold either byte order; torch knows only this machine's.
    return torch.from_numpy(np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("=")))
