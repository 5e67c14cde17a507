"""The global sample order: one permutation per epoch, fixed by (seed, epoch).

A position counts samples since the start of the run. A global step is a slice of the order that never crosses the end
of an epoch; it is divided among workers in proportion to their share. Nothing here knows about ranks that join, leave
or change strategy: training can resume from any position, so every sample is used once per epoch whatever happens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from podium.errors import ConfigError


class Slice(NamedTuple):
    """A run of samples in the global order, all of one epoch."""

    position: int  # of the first sample, counted since the start of the run
    count: int  # type: ignore[assignment]  # hides tuple.count, which is not used
    epoch: int
    offset: int  # of the first sample, inside its epoch


class GlobalOrder:
    """The order in which the samples of a data set are used, the same for any number of workers."""

    def __init__(self, samples: int, seed: int) -> None:
        if samples < 1:
            raise ConfigError("the training data must hold at least one sample, got none")
        self.samples, self.seed = samples, seed
        self._epoch = -1
        self._permutation = np.empty(0, dtype=np.int64)

    def slice_at(self, position: int, count: int) -> Slice:
        """The next `count` samples, or the rest of the epoch."""
        epoch, offset = divmod(position, self.samples)
        return Slice(position, min(count, self.samples - offset), epoch, offset)

    def rest_of_step(self, position: int, batch_size: int, end: int) -> Slice:
        """The rest, up to `end`, of the global step that contains this position; at a step's beginning, all of it.

        A segment may have ended in mid-step; a whole step from there would shift all later steps of the epoch.
        """
        begun = position % self.samples % batch_size
        return self.slice_at(position, min(batch_size - begun, end - position))

    def indices(self, piece: Slice) -> np.ndarray:
        """The samples' indices in the data set."""
        return self.permutation(piece.epoch)[piece.offset : piece.offset + piece.count]

    def keys(self, piece: Slice) -> np.ndarray:
        """One uint64 per sample, fixed by (seed, epoch, sample), from which augmentation draws."""
        return _mix(self.indices(piece).astype(np.uint64), self.seed, piece.epoch)

    def permutation(self, epoch: int) -> np.ndarray:
        if epoch != self._epoch:
            self._permutation = np.random.Generator(np.random.Philox(key=[self.seed, epoch])).permutation(self.samples)
            self._epoch = epoch
        return self._permutation

    def steps(self, batch_size: int, epochs: int) -> int:
        """How many global steps that many epochs take."""
        return epochs * -(-self.samples // batch_size)


def divide(count: int, shares: Sequence[float]) -> list[int]:
    """Whole numbers in proportion to `shares` that sum to `count` (largest remainder; ties to the lower index)."""
    total = math.fsum(shares)  # the same on all versions of Python: ranks must agree
    if total <= 0 or min(shares) < 0:
        raise ConfigError(f"shares must not be negative and must sum to more than 0, got {list(shares)}")
    exact = [count * share / total for share in shares]
    whole = [int(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: count - sum(whole)]:
        whole[i] += 1
    return whole


def share_of(piece: Slice, shares: Sequence[float], index: int) -> Slice:
    """The part of a global step that belongs to the worker at `index`."""
    return part_of(piece, divide(piece.count, shares), index)


def part_of(piece: Slice, counts: Sequence[int], index: int) -> Slice:
    """The samples of the worker at `index`, where worker i takes `counts[i]`."""
    before = sum(counts[:index])
    return Slice(piece.position + before, counts[index], piece.epoch, piece.offset + before)


def _mix(values: np.ndarray, *salts: int) -> np.ndarray:
    """SplitMix64's finaliser over (value, salts): cheap, vectorised, and the same on every machine."""
    with np.errstate(over="ignore"):
        for salt in salts:
            values = values + np.uint64((salt * 0x9E3779B97F4A7C15 + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF)
            values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
            values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
            values = values ^ (values >> np.uint64(31))
    return values
