"""Several data sets end to end: reads a set of several memory-mapped files without joining the files."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import numpy as np
import torch
from torch import Tensor

from podium.data.base import Dataset
from podium.errors import DataError


@final
class JoinedDataset(Dataset):
    """Samples of the first part, then of the second …; the parts must return tensors of one shape."""

    def __init__(self, parts: Sequence[Dataset]) -> None:
        if not parts:
            raise DataError("a joined data set needs at least one part, got none")
        self.parts = list(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def gather(self, indices: np.ndarray, keys: np.ndarray | None = None) -> tuple[Tensor, Tensor]:
        if not len(indices):
            return self.parts[0].gather(indices, keys)
        owner = np.searchsorted(self._ends, indices, side="right")
        places, pieces = [], []
        for number in np.unique(owner):
            part, where = self.parts[number], np.flatnonzero(owner == number)
            start = self._ends[number] - len(part)
            places.append(where)
            pieces.append(part.gather(indices[where] - start, None if keys is None else keys[where]))
        back = torch.from_numpy(np.argsort(np.concatenate(places)))
        inputs, targets = (torch.cat(column)[back] for column in zip(*pieces, strict=True))
        return inputs, targets
