"""Eight bits per number, with one scale for each chunk.

A chunk's scale is its largest magnitude over 127. Numbers are rounded up or down at random, so that on average nothing
is lost (Alistarh et al., QSGD, 2017, arXiv:1610.02132, with a scale per chunk in place of a norm).

The wire is bytes: a float32 scale per chunk, then an int8 code per element. One number that is not finite makes its
chunk's scale, and so the whole decoded chunk, not finite. Scales below the smallest normal float32 count as zero.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.blocks import BLOCK, add_into, as_float32, blocks, scratch, view_as, words

_TINY = torch.finfo(torch.float32).tiny
# A little above 1/127, so that the largest magnitude plus noise below 1 stays under 128 despite rounding.
_PER_MAX = (1 + 2.0**-20) / 127


@final
@dataclass(frozen=True, kw_only=True)
class Int8(Codec):
    """A byte per element and a scale per chunk."""

    name: ClassVar[str] = "int8"
    reduction: ClassVar[Literal["sum", "gather"]] = "gather"
    biased: ClassVar[bool] = False

    chunk: int = 2048
    """Elements that share a scale."""
    stochastic: bool = True
    """Round up or down at random, unbiased; otherwise to the nearest."""

    def __post_init__(self) -> None:
        if not 1 <= self.chunk <= BLOCK:
            raise ConfigError(f"int8: chunk must be between 1 and {BLOCK}, got {self.chunk}")

    @property
    def wants_feedback(self) -> bool:
        return not self.stochastic

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        numel, device = tensor.numel(), tensor.device
        wire = torch.empty(self._header(numel) + numel, dtype=torch.uint8, device=device)
        scales, codes = self._parts(wire, numel)
        noise = _Noise(numel, self._size, device, context, span) if self.stochastic else None
        for start, stop in blocks(numel, device, self._size):
            whole = start + (stop - start) // self.chunk * self.chunk
            for first, last, width in ((start, whole, self.chunk), (whole, stop, stop - whole)):
                if first < last:
                    values = as_float32(tensor[first:last], slot=1).view(-1, width)
                    chunks = slice(first // self.chunk, -(-last // self.chunk))
                    rounded = self._round(values, scales[chunks], noise, first)
                    codes[first:last].copy_(rounded.view(-1))
        return wire

    def _round(self, values: Tensor, scales: Tensor, noise: _Noise | None, start: int) -> Tensor:
        """Codes still as floats, one chunk per row; writes the scales."""
        largest = torch.maximum(values.amax(1), values.amin(1).neg_())
        torch.mul(largest, _PER_MAX, out=scales)
        scales.masked_fill_(scales < _TINY, 0.0)
        inverse = scales.reciprocal().masked_fill_(scales == 0, 0.0)[:, None]
        room = scratch(values.numel(), torch.float32, values.device).view_as(values)
        if noise is None:
            return torch.mul(values, inverse, out=room).round_()
        return torch.addcmul(noise.at(start, values.numel()).view_as(values), values, inverse, out=room).floor_()

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        self._add(wire, out, alpha, out)

    def remainder(self, wire: Tensor, tensor: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        self._add(wire, tensor, -1.0, out)

    def _add(self, wire: Tensor, base: Tensor, alpha: float, out: Tensor) -> None:
        numel, device = base.numel(), base.device
        scales, codes = self._parts(wire, numel)
        for start, stop in blocks(numel, device, self._size):
            whole = start + (stop - start) // self.chunk * self.chunk
            for first, last, width in ((start, whole, self.chunk), (whole, stop, stop - whole)):
                if first < last:
                    room = scratch(last - first, torch.float32, device).view(-1, width)
                    factors = scales[first // self.chunk : -(-last // self.chunk), None]
                    torch.mul(codes[first:last].view(-1, width), factors, out=room)
                    add_into(base[first:last], room.view(-1), alpha, out[first:last])

    @property
    def _size(self) -> int:
        """Elements per block: whole chunks."""
        return BLOCK // self.chunk * self.chunk

    def _header(self, numel: int) -> int:
        """Bytes of scales."""
        return 4 * -(-numel // self.chunk)

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        header = self._header(numel)
        return view_as(wire[:header], torch.float32), wire[header:].view(torch.int8)


class _Noise:
    """Uniform noise in [0, 1) that depends on seed, step, rank and span.

    On a CPU each block reads a fixed shuffle of 65536 evenly spaced numbers from a random offset: every offset is
    equally likely for an element, so its noise is uniform, and nothing is drawn per element.
    """

    def __init__(self, numel: int, size: int, device: torch.device, context: StepContext, span: Span) -> None:
        key = (context.seed, context.step, context.rank, span.buffer, span.start)
        self._size = size
        self._fresh: Tensor | None = None
        if device.type == "cpu":
            self._pool = _shuffled_twice()
            self._places = (words(-(-numel // size), *key) % np.uint64(BLOCK)).tolist()
        else:
            generator = torch.Generator(device).manual_seed(int(words(1, *key)[0] >> np.uint64(1)))
            self._fresh = torch.rand(numel, device=device, generator=generator)

    def at(self, start: int, numel: int) -> Tensor:
        """Noise for `numel` elements from `start` on, which must lie in one block."""
        if self._fresh is not None:
            return self._fresh[start : start + numel]
        place = (self._places[start // self._size] + start % self._size) % BLOCK
        return self._pool[place : place + numel]


@cache
def _shuffled_twice() -> Tensor:
    """The shuffle twice over, so that a full block follows every offset."""
    order = np.argsort(words(BLOCK, 0), kind="stable")
    once = (np.arange(BLOCK, dtype=np.float32)[order] + np.float32(0.5)) / np.float32(BLOCK)
    return torch.from_numpy(np.tile(once, 2))
