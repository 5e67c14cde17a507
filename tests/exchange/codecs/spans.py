"""Spans, tensors and simulated workers for tests of codecs."""

from __future__ import annotations

import torch
from torch import Tensor

from podium.exchange.codecs.base import Codec, Matrix, Memory, Rounds, Span, StepContext


def span_of(numel: int, start: int = 0) -> Span:
    """A span that holds two matrices with something between, where it is long enough."""
    if numel < 2000:
        return Span(0, start, start + numel)
    cols = numel // 100
    return Span(0, start, start + numel, (Matrix("a", 3, 60, cols), Matrix("b", 60 * cols + 5, 30, cols)))


def noise(numel: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).to(dtype)


def memory_of(span: Span, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Memory:
    return Memory([torch.zeros(span.stop, dtype=dtype, device=device)], elements=span.numel)


def decode(codec: Codec, wire: Tensor, span: Span, turn: StepContext, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.zeros(span.numel, dtype=dtype, device=wire.device)
    codec.decode_add(wire, out, span, turn)
    return out


def run_rounds(workers: list[Rounds]) -> None:
    """Add up until nothing more is sent, in place as a collective does."""
    wires: list[Tensor | None] = [rounds.first() for rounds in workers]
    while wires[0] is not None:
        given = [wire for wire in wires if wire is not None]
        assert len(given) == len(workers)
        summed = torch.stack(given).sum(0)
        wires = [rounds.next(wire.copy_(summed)) for rounds, wire in zip(workers, given, strict=True)]
    assert all(wire is None for wire in wires)
