"""The worker's optimizer state, cut into the servers' ranges and scaled to their updates, and back again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from podium.servers.ranges import Range
from podium.servers.wire.moments import parts_of
from podium.servers.worker_side.update_scale import per_step, per_update

if TYPE_CHECKING:
    from podium.engine.flat import Piece
    from podium.engine.worker import Worker

States = Callable[[Sequence[Range]], Sequence[Mapping[str, Any]]]
"""The optimizer's state of some ranges, one mapping per part."""


def own_states(worker: Worker, share: float) -> States:
    """The state of the worker's optimizer, for updates of this fraction of a global step."""

    def whole(i: int) -> Mapping[str, Any]:
        found: Mapping[str, Any] = worker.optimizer.state.get(worker.flat.parameters[i], {})
        return found

    def of(ranges: Sequence[Range]) -> list[dict[str, Any]]:
        cut = parts_of(ranges, whole, lambda i, tensor: _in_memory_order(worker, i, tensor))
        pieces = [worker.flat.pieces[part.piece] for r in ranges for part in r.parts]
        return [per_update(state, _momentum_of(worker, p), share) for state, p in zip(cut, pieces, strict=True)]

    return of


def collect(worker: Worker, ranges: Sequence[Range], states: list[dict[str, Tensor]], moments: dict[str, Any]) -> None:
    """Put one server's parts of the optimizer state back into whole parameters."""
    parts = [part for r in ranges for part in r.parts]
    for part, state in zip(parts, states, strict=True):
        piece = worker.flat.pieces[part.piece]
        whole = moments.setdefault(piece.name, {})
        for key, value in state.items():
            if value.dim() == 0:
                whole[key] = value
                continue
            if key not in whole:
                whole[key] = torch.empty_strided(piece.shape, piece.stride, dtype=value.dtype, device=value.device)
            flat = whole[key].as_strided((piece.stop - piece.start,), (1,))
            flat[part.start : part.stop] = value


def take_states_home(worker: Worker, by_name: Mapping[str, Mapping[str, Any]], share: float) -> None:
    """The inverse of `own_states`: the worker's optimizer continues from the servers' state."""
    # Each worker has followed the schedule of its own leases, and momentum may be scheduled.
    worker.replica.follow_schedule(worker.progress.global_step)
    pieces = {piece.name: piece for piece in worker.flat.pieces}
    home = {n: per_step(state, _momentum_of(worker, pieces[n]), share) for n, state in by_name.items()}
    worker.replica.load_optimizer_state(home)


def _momentum_of(worker: Worker, piece: Piece) -> float:
    return float(worker.optimizer.param_groups[piece.group].get("momentum", 0.0))


def _in_memory_order(worker: Worker, index: int, tensor: Tensor) -> Tensor:
    """A tensor shaped like a parameter, flattened in the order of the parameter's elements in the buffer."""
    piece = worker.flat.pieces[index]
    if tensor.shape == piece.shape and tensor.stride() == piece.stride:
        return tensor.as_strided((piece.stop - piece.start,), (1,))
    flat = torch.empty(piece.stop - piece.start, dtype=tensor.dtype, device=tensor.device)
    flat.as_strided(piece.shape, piece.stride).copy_(tensor)
    return flat
