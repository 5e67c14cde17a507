"""Flat buffers: a model's trainable parameters as views into one contiguous buffer per dtype, cut into buckets.

Parameters lie in reverse order of registration, roughly the order in which backward finishes their gradients, so that
the first bucket is ready first. Gradients lie in a twin buffer. The last bucket carries a short tail behind its
gradients, which travels with the exchange for nothing: see `TAIL`.

Build this last: `.to(...)`, `.double()` and `load_state_dict(assign=True)` afterwards detach parameters from their
buffer, which `check` notices.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from podium.errors import ConfigError, TrainingError

TAIL = 2
"""Extra numbers behind the last bucket: the workers' votes to stop, and the sum of their weighted losses."""


class Piece(NamedTuple):
    """One parameter's place: elements `start` to `stop` of a flat buffer."""

    name: str
    buffer: int
    start: int
    stop: int
    group: int  # the optimizer's parameter group
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """This piece of a buffer, in the parameter's own shape and layout."""
        return flat[self.start : self.stop].as_strided(self.shape, self.stride)


class Bucket(NamedTuple):
    """What travels together: elements `start` to `stop` of a flat buffer, holding pieces `first` to `last`."""

    buffer: int
    start: int
    stop: int
    pieces: tuple[int, ...]
    nbytes: int


class Flat:
    """Parameters and gradients of one replica, flat."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, bucket_bytes: int, first_bucket_bytes: int) -> None:
        named = {id(p): name for name, p in model.named_parameters()}
        groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        trainable = [p for p in model.parameters() if p.requires_grad]
        if not trainable:
            raise ConfigError("the model has no parameter to train (all are frozen, or there are none)")
        for p in trainable:
            _require_flattenable(p, named[id(p)], groups)
        self.parameters: list[nn.Parameter] = trainable[::-1]
        """Trainable parameters in piece order; a tied one stands once."""
        self.pieces: list[Piece] = []
        self.params: list[Tensor] = []
        self.grads: list[Tensor] = []
        self._lay_out(named, groups)
        self.buckets = self._cut(bucket_bytes, first_bucket_bytes)
        last = self.buckets[-1]
        self.tail = self.grads[last.buffer][last.stop : last.stop + TAIL]
        self.views = [piece.view(self.grads[piece.buffer]) for piece in self.pieces]
        self.bucket_of = [b for b, bucket in enumerate(self.buckets) for _ in bucket.pieces]
        if len({piece.buffer for piece in self.pieces}) > 1:  # buckets of several dtypes interleave
            self.bucket_of = [0] * len(self.pieces)
            for b, bucket in enumerate(self.buckets):
                for i in bucket.pieces:
                    self.bucket_of[i] = b

    @property
    def nbytes(self) -> int:
        return sum(flat.numel() * flat.element_size() for flat in self.params)

    def bucket(self, index: int) -> Tensor:
        """A bucket's gradients; the last one with the tail behind them."""
        b = self.buckets[index]
        extra = TAIL if index == len(self.buckets) - 1 else 0
        return self.grads[b.buffer][b.start : b.stop + extra]

    def check(self) -> None:
        """Raise when a parameter no longer lies in its buffer."""
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            home = self.params[piece.buffer]
            if p.data_ptr() != home.data_ptr() + piece.start * home.element_size():
                raise TrainingError(
                    f"parameter {piece.name} left its flat buffer: move or cast the model before its worker is built"
                )

    def _lay_out(self, named: dict[int, str], groups: dict[int, int]) -> None:
        """Give every parameter its place, copy it there, and make it a view of it."""
        buffers: dict[tuple[torch.dtype, torch.device], int] = {}
        ends: list[int] = []
        for p in self.parameters:
            buffer = buffers.setdefault((p.dtype, p.device), len(buffers))
            if buffer == len(ends):
                ends.append(0)
            dense = p.data if _is_dense(p) else p.data.contiguous()
            place = Piece(
                named[id(p)],
                buffer,
                ends[buffer],
                ends[buffer] + p.numel(),
                groups[id(p)],
                tuple(p.shape),
                dense.stride(),
            )
            ends[buffer] = place.stop
            self.pieces.append(place)
        for (dtype, device), buffer in buffers.items():
            self.params.append(torch.empty(ends[buffer], dtype=dtype, device=device))
            self.grads.append(torch.zeros(ends[buffer] + TAIL, dtype=dtype, device=device))
        for p, piece in zip(self.parameters, self.pieces, strict=True):
            home = piece.view(self.params[piece.buffer])
            home.copy_(p.data)
            p.data = home

    def _cut(self, bucket_bytes: int, first_bucket_bytes: int) -> list[Bucket]:
        """Close a bucket once it holds enough; each dtype fills its own, numbered in the order they close."""
        buckets: list[Bucket] = []
        open_: dict[int, list[int]] = {}
        for i, piece in enumerate(self.pieces):
            filling = open_.setdefault(piece.buffer, [])
            filling.append(i)
            limit = bucket_bytes if buckets else first_bucket_bytes
            if self._bytes(filling) >= limit:
                buckets.append(self._bucket(open_.pop(piece.buffer)))
        buckets.extend(self._bucket(filling) for filling in open_.values())
        return buckets

    def _bytes(self, pieces: list[int]) -> int:
        first, last = self.pieces[pieces[0]], self.pieces[pieces[-1]]
        return (last.stop - first.start) * self.params[first.buffer].element_size()

    def _bucket(self, pieces: list[int]) -> Bucket:
        first, last = self.pieces[pieces[0]], self.pieces[pieces[-1]]
        return Bucket(first.buffer, first.start, last.stop, tuple(pieces), self._bytes(pieces))


def _is_dense(p: Tensor) -> bool:
    """Whether the elements fill one stretch of memory, in whatever order of dimensions."""
    formats = [torch.contiguous_format]
    if p.dim() == 4:
        formats.append(torch.channels_last)
    if p.dim() == 5:
        formats.append(torch.channels_last_3d)
    return any(p.is_contiguous(memory_format=f) for f in formats)


def _require_flattenable(p: nn.Parameter, name: str, groups: dict[int, int]) -> None:
    if not p.is_floating_point():
        raise ConfigError(f"parameter {name}: trainable parameters must be real floating-point numbers, got {p.dtype}")
    if id(p) not in groups:
        raise ConfigError(f"parameter {name} is trainable but the optimizer does not hold it; freeze it or add it")
