"""Gradients of several pushes, summed until they make an update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from podium.servers.shard import wider

if TYPE_CHECKING:
    from podium.servers.applied import Span
    from podium.servers.pushes.answers import PushRequest
    from podium.servers.store import Store
    from podium.servers.wire.messages import Key, Options


class _Total(NamedTuple):
    """The sum of gradients so far, unit by unit, and its weight."""

    grads: list[list[Tensor]]
    weight: float
    options: list[Options]  # by unit
    unused: set[int]


class Update(NamedTuple):
    """The next update of the parameters."""

    grads: list[list[Tensor]]  # by unit
    options: list[Options]
    unused: list[int]
    spans: dict[Key, Span]
    """Its pushes, and their samples."""


class GradientSum:
    """Sums pushes on one server, in the order of `add`."""

    def __init__(self, store: Store, clip_norm: float | None) -> None:
        self._store, self._clip_norm = store, clip_norm
        self._total: _Total | None = None
        self._scratch: list[list[Tensor]] = []
        self.spans: dict[Key, Span] = {}
        """The pushes in the sum, and their samples."""

    def clear(self) -> None:
        self._total, self.spans = None, {}

    def add(self, key: Key, span: Span, units: Sequence[PushRequest], weight: float, *, alone: bool) -> None:
        """Add one push; `alone`: no other will be added, so its gradients need not be copied."""
        self.spans[key] = span
        grads = self._mended(key, units)
        unused = {index for request in units for index in request.push.unused}
        total = self._total
        if total is None:
            options = [request.push.options for request in units]
            self._total = _Total(grads if alone else self._copied(grads), weight, options, unused)
            return
        for unit, theirs in enumerate(grads):
            self._join(unit, total.grads, theirs)
        self._total = total._replace(weight=total.weight + weight, unused=total.unused & unused)

    def _join(self, unit: int, sums: list[list[Tensor]], grads: list[Tensor]) -> None:
        """Add one unit's gradients to the sum; rows are concatenated, and summed at the end."""
        if self._store.shard.by_rows(unit):
            sums[unit] = [torch.cat(pair) for pair in zip(sums[unit], grads, strict=True)]
        else:
            for mine, theirs in zip(sums[unit], grads, strict=True):
                mine += theirs

    def _mended(self, key: Key, units: Sequence[PushRequest]) -> list[list[Tensor]]:
        """A push's gradients, unit by unit, corrected for staleness."""
        store, found = self._store, []
        for unit, request in enumerate(units):
            rate = store.mitigation.rate(store.staleness(unit, request.push.version))
            mended = list(store.mitigation.mend(key[0], unit, request.message.body, store.shard.of(unit)))
            found.append(self._times(unit, mended, rate) if rate != 1.0 else mended)
        return found

    def _times(self, unit: int, grads: list[Tensor], factor: float) -> list[Tensor]:
        first = 1 if self._store.shard.by_rows(unit) else 0  # not the row numbers
        return [*grads[:first], *(g * factor for g in grads[first:])]

    def _copied(self, grads: list[list[Tensor]]) -> list[list[Tensor]]:
        self._store.threads.settle()  # they may still read the last sum
        by_rows = [self._store.shard.by_rows(unit) for unit in range(len(grads))]
        if not self._scratch:
            self._scratch = [
                [] if rows else [torch.empty_like(g) for g in unit] for rows, unit in zip(by_rows, grads, strict=True)
            ]
        for unit, rows in enumerate(by_rows):
            if rows:
                self._scratch[unit] = [g.clone() for g in grads[unit]]
            else:
                for mine, first in zip(self._scratch[unit], grads[unit], strict=True):
                    mine.copy_(first)
        return list(self._scratch)

    def norm(self) -> float:
        """The norm of this server's part of the sum; nothing travels by rows where gradients are clipped."""
        total = self._total
        if total is None:
            return 0.0
        return float(self._store.shard.norm([g for unit in total.grads for g in unit], total.unused))

    def take(self, norm: float | None) -> Update | None:
        """The weighted mean, clipped where `norm`, the whole gradient's, is given; begins the next sum."""
        total, spans = self._total, self.spans
        self.clear()
        if total is None:
            return None
        return Update(self._scaled(total, norm), total.options, sorted(total.unused), spans)

    def _scaled(self, total: _Total, norm: float | None) -> list[list[Tensor]]:
        """Divide by the weight and clip; sums rows that several pushes touched."""
        factor = 1.0 if abs(total.weight - 1.0) <= 1e-3 or total.weight <= 0 else 1 / total.weight
        clip = None
        if norm is not None:
            assert self._clip_norm is not None
            scaled = torch.tensor(norm * factor, dtype=wider(g for unit in total.grads for g in unit))
            clip = torch.clamp(self._clip_norm / (scaled + 1e-6), max=1.0)
        units = []
        for number, grads in enumerate(total.grads):
            unit = _added_up(*grads) if self._store.shard.by_rows(number) else grads
            if factor != 1.0:
                unit = self._times(number, unit, factor)
            units.append(unit if clip is None else [g.mul_(clip) for g in unit])
        return units


def _added_up(index: Tensor, values: Tensor) -> list[Tensor]:
    """Sum the values of equal rows: each row once, in order."""
    rows, place = torch.unique(index, return_inverse=True)
    return [rows, torch.zeros((len(rows), *values.shape[1:]), dtype=values.dtype).index_add_(0, place, values)]
