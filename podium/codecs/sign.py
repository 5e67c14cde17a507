"""One bit per number: its sign, and one or two magnitudes for all of them.

    sign     mean magnitude times sign: signSGD (Bernstein et al., 2018, arXiv:1802.04434) on the gradient's own scale,
             so that the learning rate carries over; nothing makes up for what is lost
    ef-sign  the same wire with error feedback (Karimireddy et al., 2019, arXiv:1901.09847)
    vote     the same wire; the majority of the workers decides each sign (Bernstein et al., 2019, arXiv:1810.05291)
    one-bit  two magnitudes, the mean of the numbers below zero and of the others, with error feedback (Seide et al.,
             1-bit stochastic gradient descent, Interspeech 2014), over a whole span rather than a column

The wire is bytes: float32 magnitudes, then eight elements per byte, the first in the highest bit, zero at the end. A
set bit means zero or more. Magnitudes are taken over the span. One number that is not finite makes all of it so.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor

from podium.codecs.base import Codec, Memory, Span, Turn
from podium.codecs.blocks import add_into, as_float32, blocks, scratch, view_as


class _Bits(Codec):
    """What all of them share: a bit per element that picks one of two levels."""

    reduction: ClassVar[Literal["sum", "gather"]] = "gather"
    magnitudes: ClassVar[int] = 1
    """How many float32 numbers the wire begins with."""

    @abstractmethod
    def measure(self, block: Tensor, bits: Tensor) -> Tensor:
        """Sums over one block of float32 from which `settle` makes the magnitudes."""

    @abstractmethod
    def settle(self, sums: Tensor, numel: int) -> Tensor:
        """Magnitudes, from the sums over the whole span."""

    @abstractmethod
    def levels(self, header: Tensor) -> tuple[Tensor, Tensor]:
        """What a cleared bit and a set one stand for."""

    def encode(self, tensor: Tensor, span: Span, turn: Turn, memory: Memory) -> Tensor:
        numel, device = tensor.numel(), tensor.device
        head = 4 * self.magnitudes
        wire = torch.empty(head + -(-numel // 8), dtype=torch.uint8, device=device)
        sums = []
        for start, stop in blocks(numel, device):
            block = as_float32(tensor[start:stop])
            bits = scratch(stop - start, torch.bool, device)
            if device.type == "cpu":
                np.greater_equal(block.numpy(), 0, out=bits.numpy())
            else:
                torch.ge(block, 0, out=bits)
            sums.append(self.measure(block, bits))
            wire[head + start // 8 : head + -(-stop // 8)].copy_(_pack(bits))
        if sums:
            wire[:head].view(torch.float32).copy_(self.settle(torch.stack(sums).sum(0), numel))
        else:
            wire.zero_()
        return wire

    def decode_add(self, wire: Tensor, out: Tensor, span: Span, turn: Turn, alpha: float = 1.0) -> None:
        self._add(wire, out, alpha, out)

    def remainder(self, wire: Tensor, tensor: Tensor, out: Tensor, span: Span, turn: Turn) -> None:
        self._add(wire, tensor, -1.0, out)

    def _add(self, wire: Tensor, base: Tensor, alpha: float, out: Tensor) -> None:
        header, bits = self._parts(wire)
        table = _table(*self.levels(header))
        for start, stop in blocks(base.numel(), base.device):
            values = _look_up(table, bits[start // 8 : -(-stop // 8)])[: stop - start]
            add_into(base[start:stop], values, alpha, out[start:stop])

    def _parts(self, wire: Tensor) -> tuple[Tensor, Tensor]:
        head = 4 * self.magnitudes
        return view_as(wire[:head], torch.float32), wire[head:]


class _Mean(_Bits):
    """A sign times the mean magnitude."""

    def measure(self, block: Tensor, bits: Tensor) -> Tensor:
        magnitude = torch.abs(block, out=scratch(block.numel(), torch.float32, block.device, slot=1))
        return magnitude.sum(dtype=torch.float32).double()[None]

    def settle(self, sums: Tensor, numel: int) -> Tensor:
        return sums / numel

    def levels(self, header: Tensor) -> tuple[Tensor, Tensor]:
        return -header[0], header[0]


@final
@dataclass(frozen=True, kw_only=True)
class Sign(_Mean):
    """The sign times the mean magnitude, and no more."""

    name: ClassVar[str] = "sign"

    @property
    def wants_feedback(self) -> bool:
        return False


@final
@dataclass(frozen=True, kw_only=True)
class EFSign(_Mean):
    """The sign times the mean magnitude; what is lost is sent later."""

    name: ClassVar[str] = "ef-sign"


@final
@dataclass(frozen=True, kw_only=True)
class Vote(_Mean):
    """Each element gets the sign that most workers gave it, and none where they are even.

    Its magnitude is the sum of the workers' mean magnitudes: where all agree, that is the sum of what their wires say,
    so the result is on the scale of the sum that `dense` gives. A worker whose numbers are all zero does not vote.
    """

    name: ClassVar[str] = "vote"

    @property
    def wants_feedback(self) -> bool:
        return False

    def combine(self, wires: Tensor, out: Tensor, span: Span, turn: Turn) -> None:
        parts = [self._parts(wire) for wire in wires]
        scales = torch.stack([header[0] for header, _ in parts])
        tables = [_table(-one, one) for one in (scales != 0).float()]
        total = scales.sum()
        for start, stop in blocks(out.numel(), out.device):
            votes = scratch(stop - start, torch.float32, out.device, slot=2).zero_()
            for table, (_, bits) in zip(tables, parts, strict=True):
                votes += _look_up(table, bits[start // 8 : -(-stop // 8)])[: stop - start]
            out[start:stop].copy_(votes.sign_().mul_(total))


@final
@dataclass(frozen=True, kw_only=True)
class OneBit(_Bits):
    """The mean of the numbers below zero and the mean of the others; what is lost is sent later."""

    name: ClassVar[str] = "one-bit"
    magnitudes: ClassVar[int] = 2

    def measure(self, block: Tensor, bits: Tensor) -> Tensor:
        room = scratch(block.numel(), torch.float32, block.device, slot=1)
        below = torch.clamp(block, max=0, out=room).sum(dtype=torch.float32)
        above = torch.clamp(block, min=0, out=room).sum(dtype=torch.float32)
        return torch.stack([below.double(), above.double(), bits.sum().double()])

    def settle(self, sums: Tensor, numel: int) -> Tensor:
        below, above, count = sums
        return torch.stack([below / (numel - count).clamp(min=1), above / count.clamp(min=1)])

    def levels(self, header: Tensor) -> tuple[Tensor, Tensor]:
        return header[0], header[1]


def _pack(bits: Tensor) -> Tensor:
    """Eight per byte, the first in the highest bit."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy()))
    eights = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (eights << _shifts(bits.device)).sum(1, dtype=torch.uint8)


def _table(low: Tensor, high: Tensor) -> Tensor:
    """The eight numbers that each byte stands for."""
    every = torch.arange(256, device=low.device, dtype=torch.uint8)
    return torch.where((every[:, None] >> _shifts(low.device)) & 1 == 1, high, low)


def _look_up(table: Tensor, packed: Tensor) -> Tensor:
    room = scratch(packed.numel() * 8, torch.float32, packed.device)
    index = scratch(packed.numel(), torch.int32, packed.device).copy_(packed)
    return torch.index_select(table, 0, index, out=room.view(-1, 8)).view(-1)


def _shifts(device: torch.device) -> Tensor:
    return torch.arange(7, -1, -1, device=device, dtype=torch.uint8)
