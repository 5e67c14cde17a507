"""Tensors inside tuples, named tuples, lists and dicts: what models take and return."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def map_tensors(change: Callable[[Tensor], Tensor], nest: Any) -> Any:
    """The same nest with `change` applied to every tensor; other values stay."""
    if isinstance(nest, Tensor):
        return change(nest)
    if isinstance(nest, dict):
        return {key: map_tensors(change, value) for key, value in nest.items()}
    if isinstance(nest, tuple) and hasattr(nest, "_fields"):
        return type(nest)(*(map_tensors(change, value) for value in nest))
    if isinstance(nest, list | tuple):
        return type(nest)(map_tensors(change, value) for value in nest)
    return nest


def join_rows(nests: Sequence[Any]) -> Any:
    """Concatenate batches of the same structure; a value that is not a tensor is taken from the first."""
    first = nests[0]
    if isinstance(first, Tensor):
        return torch.cat(list(nests)) if first.dim() else torch.stack(list(nests))
    if isinstance(first, dict):
        return {key: join_rows([nest[key] for nest in nests]) for key in first}
    if isinstance(first, list | tuple):
        joined = [join_rows([nest[i] for nest in nests]) for i in range(len(first))]
        return type(first)(*joined) if hasattr(first, "_fields") else type(first)(joined)
    return first
