"""The folds of a sweep: made from the user's `folds`, and described for the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from podium.data.base import ArrayDataset, Dataset
from podium.sweeps.search.folds import default_kind, make_folds, read_folds

Folds = Sequence[tuple[np.ndarray, np.ndarray]]
"""For each fold the training and the validation samples, as indices into the task's training data."""
FoldsLike = int | str | Sequence[tuple[Any, Any]] | Any | None
"""How many, `kind:count`, a scikit-learn splitter, or pairs of index arrays; None: no folds."""

_CHUNK = 4096


@dataclass(frozen=True, kw_only=True)
class SweepFolds:
    """Folds, and their description for the manifest."""

    kind: str
    folds: Folds
    request: str | None = None
    """The user's `folds` as text; None for a splitter or pairs."""

    def to_dict(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for part in (part for pair in self.folds for part in pair):
            digest.update(np.ascontiguousarray(part).tobytes() + b"/")
        overlap = float(np.mean([len(valid) / len(train) for train, valid in self.folds]))
        facts = {"asked": self.request, "kind": self.kind, "count": len(self.folds)}
        return {**facts, "overlap": overlap, "digest": digest.hexdigest()[:16]}


def make_sweep_folds(given: Any, train: Dataset, seed: int) -> SweepFolds:
    given = int(given) if isinstance(given, np.integer) else given
    if isinstance(given, list | tuple):
        given = _FoldPairs(given)
    targets = targets_of(train)
    if not isinstance(given, int | str):
        return SweepFolds(kind=type(given).__name__.strip("_").lower(), folds=make_folds(given, targets, 0, seed=seed))
    spec = read_folds(given)
    kind = spec.kind or default_kind(targets, spec.n_splits)
    found = make_folds(kind, targets, spec.n_splits, seed=seed, repeats=spec.repeats)
    return SweepFolds(kind=kind, folds=found, request=str(given))


class _FoldPairs:
    """Pairs of index arrays as a splitter."""

    def __init__(self, pairs: Sequence[tuple[Any, Any]]) -> None:
        self._pairs = pairs

    def split(self, x: Any, y: Any, groups: Any) -> Iterator[tuple[Any, Any]]:
        return iter(self._pairs)


def targets_of(data: Dataset) -> np.ndarray:
    """The target of each sample; zeros where targets are not tensors, so that folds are not stratified."""
    if isinstance(data, ArrayDataset):
        return np.asarray(data.targets)
    parts = []
    for start in range(0, len(data), _CHUNK):
        _, targets = data.gather(np.arange(start, min(start + _CHUNK, len(data))))
        if not isinstance(targets, torch.Tensor):
            return np.zeros(len(data))
        parts.append(targets.numpy())
    return np.concatenate(parts)
