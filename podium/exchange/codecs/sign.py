"""One bit per number: its sign, and one or two magnitudes for the whole span or for each chunk.

    sign     mean magnitude times sign: signSGD (Bernstein et al., 2018, arXiv:1802.04434) on the gradient's own scale,
             so that the learning rate carries over; the loss is not fed back
    ef-sign  the same wire with error feedback (Karimireddy et al., 2019, arXiv:1901.09847)
    vote     the same wire; the majority of the workers decides each sign (Bernstein et al., 2019, arXiv:1810.05291)
    one-bit  two magnitudes, the mean of the numbers below zero and of the others, with error feedback (Seide et al.,
             1-bit stochastic gradient descent, Interspeech 2014)

The wire is bytes: float32 magnitudes of all chunks, then eight elements per byte, the first in the highest bit, padded
with zeros. A set bit means zero or more. One number that is not finite makes its whole chunk not finite.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from podium.errors import ConfigError
from podium.exchange.codecs.base import Codec, Memory, Span, StepContext
from podium.exchange.codecs.blocks import BLOCK, add_into, as_float32, blocks, scratch, view_as


class _Rows(NamedTuple):
    """Elements `start` to `stop` of a block as rows of `width`, one chunk each, beginning with chunk `first`."""

    first: int
    start: int
    stop: int
    width: int


@dataclass(frozen=True, kw_only=True)
class _Bits(Codec):
    """Base of all of them: a bit per element picks one of its chunk's two levels."""

    reduction: ClassVar[Literal["sum", "gather"]] = "gather"
    magnitudes: ClassVar[int] = 1
    """Float32 numbers per chunk on the wire."""

    chunk: int = 0
    """Elements that share their magnitudes; 0: the whole span."""

    def __post_init__(self) -> None:
        if self.chunk < 0 or self.chunk % 8 or (self.chunk and BLOCK % self.chunk and self.chunk % BLOCK):
            raise ConfigError(
                f"{self.name}: chunk must be 0, a multiple of 8 that divides {BLOCK}, or a multiple of {BLOCK}, "
                f"got {self.chunk}"
            )

    @abstractmethod
    def measure(self, rows: Tensor, bits: Tensor) -> Tensor:
        """Sums over float32 rows, from which `settle` computes the magnitudes: one column per row."""

    @abstractmethod
    def settle(self, sums: Tensor, counts: Tensor) -> Tensor:
        """Magnitudes, one row per chunk, from the chunks' sums and numbers of elements."""

    @abstractmethod
    def levels(self, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
        """The values of a cleared and of a set bit, by chunk."""

    def encode(self, tensor: Tensor, span: Span, context: StepContext, memory: Memory) -> Tensor:
        numel, device = tensor.numel(), tensor.device
        chunks = self._chunks(numel)
        head = 4 * self.magnitudes * chunks
        wire = torch.empty(head + -(-numel // 8), dtype=torch.uint8, device=device)
        sums: Tensor | None = None
        for start, stop in blocks(numel, device):
            block = as_float32(tensor[start:stop])
            bits = scratch(stop - start, torch.bool, device)
            if device.type == "cpu":
                np.greater_equal(block.numpy(), 0, out=bits.numpy())
            else:
                torch.ge(block, 0, out=bits)
            for first, a, b, width in self._rows(start, stop):
                found = self.measure(block[a:b].view(-1, width), bits[a:b].view(-1, width))
                if sums is None:
                    sums = torch.zeros((len(found), chunks), dtype=torch.float64, device=device)
                sums[:, first : first + found.shape[1]] += found
            wire[head + start // 8 : head + -(-stop // 8)].copy_(_pack(bits))
        if sums is not None:
            wire[:head].view(torch.float32).copy_(self.settle(sums, self._counts(numel, device)).reshape(-1))
        return wire

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, context: StepContext, alpha: float = 1.0) -> None:
        self._add(wire, out, alpha, out)

    def remainder(self, wire: Tensor, tensor: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        self._add(wire, tensor, -1.0, out)

    def _add(self, wire: Tensor, base: Tensor, alpha: float, out: Tensor) -> None:
        magnitudes, bits = self._parts(wire, base.numel())
        low, high = self.levels(magnitudes)
        table = _table(wire.device)
        for start, stop in blocks(base.numel(), base.device):
            values = _look_up(table, bits[start // 8 : -(-stop // 8)])[: stop - start]
            for first, a, b, width in self._rows(start, stop):
                rows = values[a:b].view(-1, width)
                some = slice(first, first + len(rows))
                torch.addcmul(low[some, None], rows, (high - low)[some, None], out=rows)
            add_into(base[start:stop], values, alpha, out[start:stop])

    def _chunks(self, numel: int) -> int:
        return -(-numel // self.chunk) if self.chunk else min(1, numel)

    def _counts(self, numel: int, device: torch.device) -> Tensor:
        counts = torch.full((self._chunks(numel),), float(self.chunk), dtype=torch.float64, device=device)
        counts[-1:] = numel - (len(counts) - 1) * self.chunk
        return counts

    def _rows(self, start: int, stop: int) -> Iterator[_Rows]:
        """A block as rows of whole chunks plus the rest of the last; or as part of one chunk."""
        chunk = self.chunk or stop
        if start // chunk == (stop - 1) // chunk:
            yield _Rows(start // chunk, 0, stop - start, stop - start)
            return
        whole = (stop - start) // chunk * chunk
        yield _Rows(start // chunk, 0, whole, chunk)
        if whole < stop - start:
            yield _Rows((start + whole) // chunk, whole, stop - start, stop - start - whole)

    def _parts(self, wire: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        head = 4 * self.magnitudes * self._chunks(numel)
        return view_as(wire[:head], torch.float32).view(-1, self.magnitudes), wire[head:]


@dataclass(frozen=True, kw_only=True)
class _Mean(_Bits):
    """A sign times the mean magnitude."""

    def measure(self, rows: Tensor, bits: Tensor) -> Tensor:
        room = scratch(rows.numel(), torch.float32, rows.device, slot=1).view_as(rows)
        return torch.abs(rows, out=room).sum(1)[None]

    def settle(self, sums: Tensor, counts: Tensor) -> Tensor:
        return sums[0] / counts

    def levels(self, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
        return -magnitudes[:, 0], magnitudes[:, 0]


@final
@dataclass(frozen=True, kw_only=True)
class Sign(_Mean):
    """The sign times the mean magnitude, without error feedback."""

    name: ClassVar[str] = "sign"

    @property
    def wants_feedback(self) -> bool:
        return False


@final
@dataclass(frozen=True, kw_only=True)
class EFSign(_Mean):
    """The sign times the mean magnitude, with error feedback."""

    name: ClassVar[str] = "ef-sign"


@final
@dataclass(frozen=True, kw_only=True)
class Vote(_Mean):
    """Each element gets the sign that most workers gave it, and zero in a tie.

    Its magnitude is the sum of the workers' mean magnitudes: where all agree, that is the sum of their decoded wires,
    so the result is on the scale of the sum that `dense` gives. A worker does not vote on a chunk of zeros.
    """

    name: ClassVar[str] = "vote"
    feeds_back: ClassVar[bool] = False  # the result is the majority's, not what this worker sent

    @property
    def wants_feedback(self) -> bool:
        return False

    def combine(self, wires: Tensor, out: Tensor, span: Span, context: StepContext) -> None:
        parts = [self._parts(wire, out.numel()) for wire in wires]
        scales = torch.stack([magnitudes[:, 0] for magnitudes, _ in parts])
        votes_at_all, total = (scales != 0).float(), scales.sum(0)
        table = _table(out.device)
        for start, stop in blocks(out.numel(), out.device):
            votes = scratch(stop - start, torch.float32, out.device, slot=2).zero_()
            for votes_here, (_, bits) in zip(votes_at_all, parts, strict=True):
                signs = _look_up(table, bits[start // 8 : -(-stop // 8)])[: stop - start].mul_(2).sub_(1)
                for first, a, b, width in self._rows(start, stop):
                    rows = signs[a:b].view(-1, width)
                    votes[a:b].view(-1, width).addcmul_(rows, votes_here[first : first + len(rows), None])
            votes.sign_()
            for first, a, b, width in self._rows(start, stop):
                rows = votes[a:b].view(-1, width)
                rows *= total[first : first + len(rows), None]
            out[start:stop].copy_(votes)


@final
@dataclass(frozen=True, kw_only=True)
class OneBit(_Bits):
    """The mean of the numbers below zero and the mean of the others, with error feedback."""

    name: ClassVar[str] = "one-bit"
    magnitudes: ClassVar[int] = 2

    def measure(self, rows: Tensor, bits: Tensor) -> Tensor:
        room = scratch(rows.numel(), torch.float32, rows.device, slot=1).view_as(rows)
        below = torch.clamp(rows, max=0, out=room).sum(1)
        above = torch.clamp(rows, min=0, out=room).sum(1)
        return torch.stack([below, above, bits.sum(1).to(torch.float32)])

    def settle(self, sums: Tensor, counts: Tensor) -> Tensor:
        below, above, count = sums
        return torch.stack([below / (counts - count).clamp(min=1), above / count.clamp(min=1)], dim=1)

    def levels(self, magnitudes: Tensor) -> tuple[Tensor, Tensor]:
        return magnitudes[:, 0], magnitudes[:, 1]


def _pack(bits: Tensor) -> Tensor:
    """Eight per byte, the first in the highest bit."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (eights << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def _table(device: torch.device) -> Tensor:
    """The eight bits of each byte value, as floats."""
    every = torch.arange(256, device=device, dtype=torch.uint8)
    return ((every[:, None] >> _shifts(device)) & 1).float()


def _look_up(table: Tensor, packed: Tensor) -> Tensor:
    room = scratch(packed.numel() * 8, torch.float32, packed.device)
    index = scratch(packed.numel(), torch.int32, packed.device).copy_(packed)
    return torch.index_select(table, 0, index, out=room.view(-1, 8)).view(-1)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, device=device, dtype=torch.uint8)
