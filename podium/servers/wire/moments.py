"""Optimizer state of a server's ranges as tensors of a message: workers send it with a seed, and collect it at the end.

A state key is either a tensor as large as its parameter (a moment), cut like the parameter, or one number per
parameter (a step count). Both ends know the ranges, so the header holds only key names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from podium.comm.base import Meta
    from podium.servers.ranges import Part, Range

States = Sequence[Mapping[str, Any]]
"""One mapping per part, ranges in order: state key to tensor (flat, as long as the part) or number."""


def pack(ranges: Sequence[Range], states: States, dtypes: Sequence[torch.dtype]) -> tuple[Meta, list[Tensor]]:
    """Key names for the header, and the tensors: per key a mask of parts that have it, and a flat tensor per range."""
    keys = sorted({key for state in states for key in state})
    kinds: dict[str, str] = {}
    body: list[Tensor] = []
    parts = [part for r in ranges for part in r.parts]
    for key in keys:
        values = [state.get(key) for state in states]
        has = torch.tensor([v is not None for v in values], dtype=torch.uint8)
        body.append(has)
        if any(isinstance(v, Tensor) and v.dim() > 0 for v in values):
            kinds[key] = "tensor"
            body.extend(_joined(ranges, parts, values, dtypes))
        else:
            kinds[key] = "number"
            body.append(torch.tensor([float(v) if v is not None else 0.0 for v in values], dtype=torch.float64))
    return {"state": kinds}, body


def unpack(ranges: Sequence[Range], meta: Meta, body: Sequence[Tensor]) -> list[dict[str, Any]]:
    """The inverse of `pack`: one mapping per part; tensors are views of the body."""
    parts = [(r, part) for r, range_ in enumerate(ranges) for part in range_.parts]
    states: list[dict[str, Any]] = [{} for _ in parts]
    at = iter(body)
    for key, kind in meta["state"].items():
        has = next(at).tolist()
        if kind == "tensor":
            flats = [next(at) for _ in ranges]
            for state, (r, part), present in zip(states, parts, has, strict=True):
                if present:
                    state[key] = flats[r][part.offset : part.offset + part.stop - part.start]
        else:
            for state, value, present in zip(states, next(at).tolist(), has, strict=True):
                if present:
                    state[key] = torch.tensor(value, dtype=torch.float32)
    return states


def parts_of(
    ranges: Sequence[Range], state_of: Callable[[int], Mapping[str, Any]], flat_of: Callable[[int, Tensor], Tensor]
) -> list[dict[str, Any]]:
    """Cut whole parameters' state into a server's parts; `flat_of` flattens a tensor of a piece in memory order."""
    cut: list[dict[str, Any]] = []
    for range_ in ranges:
        for part in range_.parts:
            state: dict[str, Any] = {}
            for key, value in state_of(part.piece).items():
                # The moment of a parameter without dimensions has none either, but is not a step count.
                if isinstance(value, Tensor) and (value.dim() > 0 or key != "step"):
                    state[key] = flat_of(part.piece, value)[part.start : part.stop]
                elif value is not None:
                    state[key] = value
            cut.append(state)
    return cut


def _joined(
    ranges: Sequence[Range], parts: Sequence[Part], values: Sequence[Any], dtypes: Sequence[torch.dtype]
) -> list[Tensor]:
    flats = [torch.zeros(r.stop - r.start, dtype=dtypes[r.buffer]) for r in ranges]
    owners = [r for r, range_ in enumerate(ranges) for _ in range_.parts]
    for r, part, value in zip(owners, parts, values, strict=True):
        if value is not None:
            flats[r][part.offset : part.offset + part.stop - part.start] = value
    return flats
