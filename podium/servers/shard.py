"""The parameters of a server's ranges, and the optimizer that moves them.

Each unit has the task's own optimizer for itself, so a unit can be stepped the moment its gradients are there,
whatever has come of the others. Gradients are used where they lie: in the worker's memory where that is shared.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from podium.comm.base import Meta
from podium.errors import ConfigError
from podium.flat import Flat, Piece
from podium.optim import FlatOptimizer, is_elementwise
from podium.servers.moments import pack, unpack
from podium.servers.ranges import Layout, Range, Unit

Options = Sequence[Meta]
"""Each parameter group's hyper-parameters."""


class _Engine:
    """One unit's optimizer."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor], ranges: Sequence[Range]) -> None:
        self.params = params
        self.parts: list[nn.Parameter] = []
        self.pieces: list[Piece] = []
        self.owners = [part.piece for r in ranges for part in r.parts]
        for n, r in enumerate(ranges):
            for part in r.parts:
                stop = part.offset + part.stop - part.start
                self.parts.append(nn.Parameter(params[n][part.offset : stop]))
                self.pieces.append(Piece("", n, part.offset, stop, r.group, (stop - part.offset,), (1,)))
        self.optimizer = copy.copy(optimizer)
        self.optimizer.state = defaultdict(dict)
        self.optimizer.param_groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        for g, group in enumerate(self.optimizer.param_groups):
            group["params"] = [p for p, piece in zip(self.parts, self.pieces, strict=True) if piece.group == g]
        self.fast = FlatOptimizer(self.optimizer, self.parts, self.pieces, params, [torch.zeros_like(p) for p in params])

    def step(self, grads: Sequence[Tensor], options: Options, unused: Collection[int]) -> None:
        self.fast.point_at(grads)
        for group, given in zip(self.optimizer.param_groups, options, strict=True):
            group.update(given)
        for p, piece in zip(self.parts, self.owners, strict=True):
            if piece in unused:
                p.grad = None
        self.fast.step(all_used=not any(piece in unused for piece in self.owners))


class Shard:
    """The parameters and optimizers of a server's ranges."""

    def __init__(self, flat: Flat, optimizer: Optimizer, layout: Layout) -> None:
        if not is_elementwise(optimizer):
            raise ConfigError(
                f"parameter-server: {type(optimizer).__name__} cannot run on ranges of the parameters: it looks at "
                "whole tensors (or is fused); use SGD, Adam, AdamW, Adagrad or RMSprop"
            )
        self.ranges, self.units = layout
        self.params = [r.of(flat.params).detach().clone() for r in self.ranges]
        self._dtypes = [p.dtype for p in flat.params]
        self._engines = [_Engine(optimizer, unit.of(self.params), unit.of(self.ranges)) for unit in self.units]

    @property
    def nbytes(self) -> int:
        return sum(p.nbytes for p in self.params)

    def of(self, unit: int) -> Sequence[Tensor]:
        """The parameters of one unit."""
        return self.units[unit].of(self.params)

    def step(self, unit: int, grads: Sequence[Tensor], options: Options, unused: Collection[int]) -> None:
        """One optimizer step of one unit; pieces in `unused` are left alone."""
        self._engines[unit].step(grads, options, unused)

    def zeros(self) -> list[Tensor]:
        """One buffer per range."""
        return [torch.zeros_like(p) for p in self.params]

    def load(self, params: Sequence[Tensor], meta: Meta, state: Sequence[Tensor]) -> None:
        for mine, theirs in zip(self.params, params, strict=True):
            mine.copy_(theirs)
        kept = iter(unpack(self.ranges, meta, state))
        for engine in self._engines:
            engine.optimizer.state.clear()
            for part in engine.parts:
                mine_kept = next(kept)
                if mine_kept:
                    engine.optimizer.state[part] = {k: v.clone() for k, v in mine_kept.items()}
            engine.fast.reload()

    def dump(self) -> tuple[Meta, list[Tensor]]:
        """Optimizer state to take home."""
        states: list[Mapping[str, Any]] = [e.optimizer.state.get(p, {}) for e in self._engines for p in e.parts]
        return pack(self.ranges, states, self._dtypes)

    def norm(self, grads: Sequence[Tensor], unused: Collection[int]) -> Tensor:
        """Of these gradients, one tensor per range, added up parameter by parameter as PyTorch's clipping does."""
        by_piece: dict[int, list[Tensor]] = defaultdict(list)
        for r, grad in zip(self.ranges, grads, strict=True):
            for part in r.parts:
                if part.piece not in unused:
                    own = grad[part.offset : part.offset + part.stop - part.start]
                    by_piece[part.piece].append(torch.linalg.vector_norm(own))
        norms = [_joined(by_piece[piece]) for piece in sorted(by_piece, reverse=True)]
        return _joined(norms) if norms else torch.zeros(())


def _joined(norms: Sequence[Tensor]) -> Tensor:
    return torch.linalg.vector_norm(torch.stack([n.float() for n in norms])) if len(norms) != 1 else norms[0]


def unit_of(units: Sequence[Unit], unit: Any) -> int:
    """A unit's number as it came with a message, checked."""
    if not isinstance(unit, int) or not 0 <= unit < len(units):
        raise ConfigError(f"a push must name one of {len(units)} units, got {unit!r}")
    return unit
