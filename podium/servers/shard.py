"""The parameters of a server's ranges, and the optimizer that moves them.

Each unit has its own copy of the optimizer, the task's or the outer one, so a unit can be stepped as soon as its
gradients arrive, without those of other units. Gradients are used where they lie: in the worker's memory where that is
shared.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.sparse import check_sparse_tensor_invariants

from podium.comm.base import Meta
from podium.engine.flat import Flat, Piece
from podium.engine.optim import FlatOptimizer, is_elementwise, refuse_step_hooks
from podium.errors import ConfigError
from podium.servers.outer import DelayedNesterov
from podium.servers.ranges import Layout, Range, Unit, groups_of
from podium.servers.wire.moments import pack, unpack
from podium.servers.wire.parcels import MOST_TENSORS, Kept

Options = Sequence[Meta]
"""The hyper-parameters of each parameter group that a unit has a part of, or of all groups."""


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
        for group in self.optimizer.param_groups:
            group["params"] = []
        for p, piece in zip(self.parts, self.pieces, strict=True):
            self.optimizer.param_groups[piece.group]["params"].append(p)
        for group in self.optimizer.param_groups:
            group["foreach"] = False  # with it, torch's Nesterov momentum writes to the gradients, which are a worker's
        self._own_groups = [self.optimizer.param_groups[g] for g in groups_of(ranges)]
        nowhere = [torch.zeros_like(p) for p in params]
        self.fast = FlatOptimizer(self.optimizer, self.parts, self.pieces, params, nowhere)

    def _options(self, options: Options) -> Iterable[tuple[dict[str, Any], Meta]]:
        """This unit's parameter groups with their options; `options` may cover only these groups or all of them."""
        own = len(options) == len(self._own_groups)
        return zip(self._own_groups if own else self.optimizer.param_groups, options, strict=True)

    def step(
        self, grads: Sequence[Tensor], options: Options, unused: Collection[int], out: Sequence[Tensor] | None = None
    ) -> None:
        for group, given in self._options(options):
            group.update(given)
        left_out = {n for n, piece in enumerate(self.owners) if piece in unused} if unused else ()
        if out is None:
            self.fast.step_on(grads, left_out)
        else:
            self.fast.step_into(grads, out, left_out)


class _RowEngine(_Engine):
    """The optimizer of a unit that travels by rows: torch's own, with a sparse gradient."""

    def __init__(self, optimizer: Optimizer, params: Sequence[Tensor], ranges: Sequence[Range]) -> None:
        super().__init__(optimizer, params, ranges)
        self._row = ranges[0].row
        rows = params[0].numel() // self._row
        self.changed = torch.zeros(rows, dtype=torch.int64)
        """By row: the version in which it last changed."""

    def step(
        self, grads: Sequence[Tensor], options: Options, unused: Collection[int], out: Sequence[Tensor] | None = None
    ) -> None:
        assert out is None, "rows are not written to `out`"
        index, values = grads
        if self.owners[0] in unused:
            return  # only where no worker used it: otherwise it must count a step, by which Adagrad's rate may fall
        table = nn.Parameter(self.params[0].view(-1, self._row))
        # Checked here, where the rows arrive; torch would warn about each unchecked sparse tensor.
        table.grad = torch.sparse_coo_tensor(index[None], values, table.shape, is_coalesced=True, check_invariants=True)
        (part,) = self.parts
        for group, given in self._options(options):
            group.update(given)
            if any(p is part for p in group["params"]):
                group["params"] = [table]
        state = self.optimizer.state.pop(part, {})
        self.optimizer.state[table] = {k: v.view_as(table) if _is_moment(v, part) else v for k, v in state.items()}
        with check_sparse_tensor_invariants(False):
            self.optimizer.step()
        kept = self.optimizer.state.pop(table)
        self.optimizer.state[part] = {k: v.view_as(part) if _is_moment(v, table) else v for k, v in kept.items()}
        for group in self.optimizer.param_groups:
            group["params"] = [part if p is table else p for p in group["params"]]


def _is_moment(value: Any, param: Tensor) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape == param.shape


class Shard:
    """The parameters and optimizers of a server's ranges."""

    def __init__(self, flat: Flat, optimizer: Optimizer, layout: Layout) -> None:
        if not is_elementwise(optimizer) and not isinstance(optimizer, DelayedNesterov):
            raise ConfigError(
                f"parameter-server: {type(optimizer).__name__} cannot run on ranges of the parameters: it looks at "
                "whole tensors (or is fused); use SGD, Adam, AdamW, Adagrad or RMSprop"
            )
        refuse_step_hooks(optimizer, "parameter-server")
        self.ranges, self.units = layout
        self.params = [r.of(flat.params).detach().clone() for r in self.ranges]
        self.nbytes = sum(p.nbytes for p in self.params)
        self._dtypes = [p.dtype for p in flat.params]
        self._engines = [self._engine(optimizer, unit) for unit in self.units]

    def _engine(self, optimizer: Optimizer, unit: Unit) -> _Engine:
        params, ranges = unit.of(self.params), unit.of(self.ranges)
        return (_RowEngine if any(r.row for r in ranges) else _Engine)(optimizer, params, ranges)

    def of(self, unit: int) -> Sequence[Tensor]:
        """The parameters of one unit."""
        return self.units[unit].of(self.params)

    def by_rows(self, unit: int) -> bool:
        """Whether this unit travels by rows: its gradients are then row numbers and values."""
        return isinstance(self._engines[unit], _RowEngine)

    def step(
        self,
        unit: int,
        grads: Sequence[Tensor],
        options: Options,
        unused: Collection[int],
        version: int = 0,
        out: Sequence[Tensor] | None = None,
    ) -> None:
        """One optimizer step of one unit, which makes it `version`; pieces in `unused` are left alone.

        `out`: also copy the unit's parameters there.
        """
        engine = self._engines[unit]
        engine.step(grads, options, unused, out)
        if isinstance(engine, _RowEngine):
            engine.changed[grads[0]] = version

    def rows_since(self, unit: int, version: int) -> tuple[Tensor, Tensor]:
        """The rows of a unit that changed after this version: their numbers, and their present values."""
        engine = self._engines[unit]
        assert isinstance(engine, _RowEngine)
        (r,) = self.units[unit].of(self.ranges)
        index = (engine.changed > version).nonzero()[:, 0]
        return index, self.of(unit)[0].view(-1, r.row)[index]

    def all_rows_changed(self, versions: Sequence[int]) -> None:
        """After a restart the server does not know which rows a worker has: mark all as changed in these versions."""
        for engine, version in zip(self._engines, versions, strict=True):
            if isinstance(engine, _RowEngine):
                engine.changed.fill_(version)

    def load(self, params: Sequence[Tensor], meta: Meta, state: Sequence[Tensor]) -> None:
        """Load all parameters and the optimizer state that `dump` returned."""
        for mine, theirs in zip(self.params, params, strict=True):
            mine.copy_(theirs)
        kept = iter(unpack(self.ranges, meta, state))
        for engine in self._engines:
            self._load_engine(engine, [next(kept) for _ in engine.parts])

    def load_unit(self, unit: int, kept: Kept) -> None:
        """Load one unit's parameters and optimizer state."""
        for mine, theirs in zip(self.of(unit), kept.params, strict=True):
            mine.copy_(theirs)
        self._load_engine(self._engines[unit], unpack(self.units[unit].of(self.ranges), kept.kinds, kept.state))

    @staticmethod
    def _load_engine(engine: _Engine, states: Sequence[Mapping[str, Any]]) -> None:
        engine.optimizer.state.clear()
        if isinstance(engine, _RowEngine):
            engine.changed.zero_()
        for part, state in zip(engine.parts, states, strict=True):
            if state:
                engine.optimizer.state[part] = {k: v.clone() for k, v in state.items()}
        engine.fast.reload()

    def fits(self, most_bytes: int) -> bool:
        """Whether parameters and optimizer state fit into one message."""
        states = [e.optimizer.state.get(p, {}) for e in self._engines for p in e.parts]
        kept = sum(v.nbytes for state in states for v in state.values() if isinstance(v, Tensor))
        keys = len({key for state in states for key in state})
        return self.nbytes + kept <= most_bytes and len(self.ranges) * (1 + keys) <= MOST_TENSORS

    def dump(self) -> tuple[Meta, list[Tensor]]:
        """The optimizer state of all ranges, packed."""
        states: list[Mapping[str, Any]] = [e.optimizer.state.get(p, {}) for e in self._engines for p in e.parts]
        return pack(self.ranges, states, self._dtypes)

    def dump_unit(self, unit: int) -> Kept:
        """One unit's parameters, not copied, and its optimizer state, copied."""
        engine = self._engines[unit]
        states: list[Mapping[str, Any]] = [engine.optimizer.state.get(p, {}) for p in engine.parts]
        kinds, state = pack(self.units[unit].of(self.ranges), states, self._dtypes)
        return Kept(self.of(unit), kinds, state)

    def norm(self, grads: Sequence[Tensor], unused: Collection[int]) -> Tensor:
        """The norm of these gradients, one tensor per range, by parameter first, as in PyTorch's clipping."""
        by_piece: dict[int, list[Tensor]] = defaultdict(list)
        for r, grad in zip(self.ranges, grads, strict=True):
            for part in r.parts:
                if part.piece not in unused:
                    own = grad[part.offset : part.offset + part.stop - part.start]
                    by_piece[part.piece].append(torch.linalg.vector_norm(own))
        norms = [_joined(by_piece[piece]) for piece in sorted(by_piece, reverse=True)]
        return _joined(norms) if norms else torch.zeros(())


def _joined(norms: Sequence[Tensor]) -> Tensor:
    if len(norms) == 1:
        return norms[0]
    norm: Tensor = torch.linalg.vector_norm(torch.stack([n.to(wider(norms)) for n in norms]))
    return norm


def wider(tensors: Iterable[Tensor]) -> torch.dtype:
    """float64 where one of them is, float32 otherwise."""
    return torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32


def unit_of(units: Sequence[Unit], unit: Any) -> int:
    """A unit's number from a message, checked."""
    if not isinstance(unit, int) or not 0 <= unit < len(units):
        raise ConfigError(f"a push must name one of {len(units)} units, got {unit!r}")
    return unit
