"""A worker's part of a step: its samples, on its device, and how much they count."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from podium.data.order import Slice
from podium.engine.pytree import map_tensors


class Draws(ABC):
    """Micro-batches that a worker draws, one after the other, from a step that all workers share."""

    def __init__(self) -> None:
        self.samples = 0
        self.weight = 0.0
        self.slices: list[Slice] = []
        """Slices drawn so far; neighbours in the global order are merged."""

    def next(self) -> Batch | None:
        """The next micro-batch, or None where the step has none left. May wait, and may raise Lost."""
        batch = self._draw()
        if batch is not None:
            self.samples, self.weight = self.samples + batch.samples, self.weight + batch.weight
            last = self.slices[-1] if self.slices else None
            if last is not None and last.position + last.count == batch.slice.position:
                self.slices[-1] = last._replace(count=last.count + batch.slice.count)
            else:
                self.slices.append(batch.slice)
        return batch

    @abstractmethod
    def _draw(self) -> Batch | None: ...


class Batch(NamedTuple):
    """One worker's part of a step."""

    inputs: Any
    targets: Any
    samples: int
    weight: float  # this part's fraction of the step's samples
    slice: Slice = Slice(0, 0, 0, 0)  # where in the global order it lies
    end: int = 0  # the position once the whole step is done
    lease: int = -1  # names the slice when it was leased from a cursor
    closure: Callable[[], Tensor] | None = None  # the user's own forward pass, in place of model and loss
    draws: Draws | None = None  # further micro-batches of this step; see `OpenBatch`

    def split(self, parts: int, weigh: Callable[[Any], float] | None = None) -> list[Batch]:
        """Micro-batches whose weights add up to this batch's: in proportion to their samples, or to `weigh`."""
        if parts == 1 or self.samples < 2 or self.closure is not None:
            return [self]
        cuts = [self.samples * i // parts for i in range(parts + 1)]
        found = [
            self._replace(
                inputs=map_tensors(lambda rows, a=a, b=b: rows[a:b], self.inputs),  # type: ignore[misc]  # bound now
                targets=map_tensors(lambda rows, a=a, b=b: rows[a:b], self.targets),  # type: ignore[misc]  # bound now
                samples=b - a,
                weight=self.weight * ((b - a) / self.samples),
            )
            for a, b in itertools.pairwise(cuts)
            if b > a
        ]
        if weigh is None:
            return found
        weights = [float(weigh(part.targets)) for part in found]
        total = sum(weights) or 1.0
        return [part._replace(weight=self.weight * w / total) for part, w in zip(found, weights, strict=True)]


class OpenBatch(Batch):
    """A batch that grows during the step: `samples` and `weight` count what the worker has drawn so far.

    `slice` is the whole step.
    """

    __slots__ = ()

    @classmethod
    def of(cls, step: Slice, draws: Draws) -> OpenBatch:
        return cls(None, None, 0, 0.0, step, step.position + step.count, draws=draws)

    @property
    def samples(self) -> int:  # in place of the field
        return self._drawn.samples

    @property
    def weight(self) -> float:  # in place of the field
        return self._drawn.weight

    @property
    def _drawn(self) -> Draws:
        assert self.draws is not None
        return self.draws
