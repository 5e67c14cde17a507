"""Sparse tensors: choosing the largest elements, and their wire.

The wire is bytes, four per kept element: a float32 scale (the largest magnitude kept), an int32 count for each block of
65536 elements, a 16-bit index inside its block for each kept element, and its value over the scale as float16. It has
room for a fixed number of elements; unused room is zero and has no effect.

Choosing costs one pass over the tensor: a threshold is estimated from a strided sample so that a few more elements than
wanted are likely to reach it, and only those are looked at again. Numbers that are not finite count as the largest.
Zeros are not kept.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from podium.exchange.codecs.blocks import as_float32, blocks, scratch, view_as

PLACES = 1 << 16
"""Elements per block: as many as 16 bits can index."""
Select = Literal["exact", "sampled"]
_STRIDE = 101  # a prime, so that it does not walk down one column of a matrix
_ENOUGH = 64  # kept elements that a sample must hold for its threshold to be trusted
_TRIES = 4
_SMALLEST = 2.0**-149


def room_for(numel: int, ratio: float) -> int:
    """How many elements are kept: at least one unless there are none."""
    return min(numel, max(1, round(numel * ratio)))


def choose(tensor: Tensor, k: int, select: Select) -> Tensor:
    """Indices of at most `k` of the largest magnitudes, in order.

    `exact`: the k largest that are not zero; of equal ones the first. `sampled`: nearly always the same; when the
    sample misleads, at least 0.8 k of the largest.
    """
    if k == 0:
        return torch.empty(0, dtype=torch.int64, device=tensor.device)
    found = _sampled(tensor, k) if select == "sampled" else None
    if found is None:
        found = _reaching(tensor, _kth(_magnitudes(tensor), k))
    return found if found.numel() <= k else _refine(tensor, found, k)


def _sampled(tensor: Tensor, k: int) -> Tensor | None:
    """Indices of elements that reach a threshold estimated from a sample; None when the estimate is useless."""
    stride = min(_STRIDE, k // _ENOUGH | 1)
    if stride < 5:
        return None
    sample = _magnitudes(tensor[::stride])
    rank = k / stride
    rank += 2 * math.sqrt(rank)  # two standard deviations more, so that too few are rarely found
    for _ in range(_TRIES):
        whole = min(math.ceil(rank), sample.numel())
        found = _reaching(tensor, _kth(sample, whole) if whole < sample.numel() else 0.0)
        if found.numel() >= 0.8 * k or whole == sample.numel():
            return found
        rank *= 1.5 * k / max(found.numel(), k / 4)
    return None


def _magnitudes(tensor: Tensor) -> Tensor:
    return tensor.to(torch.float32, copy=True).abs_()


def _kth(magnitudes: Tensor, k: int) -> float:
    """The k-th largest; NaN counts as the largest."""
    if magnitudes.device.type == "cpu":
        place = magnitudes.numel() - k
        return float(np.partition(magnitudes.numpy(), place)[place])
    return float(torch.topk(magnitudes, k, sorted=False).values.min())


def _reaching(tensor: Tensor, threshold: float) -> Tensor:
    """Indices of all elements that are not zero and not below the threshold, in order."""
    threshold = max(threshold, _SMALLEST)
    if tensor.device.type != "cpu":
        return (_magnitudes(tensor) < threshold).logical_not_().nonzero().view(-1)
    found = []
    for start, stop in blocks(tensor.numel(), tensor.device):
        room = scratch(stop - start, torch.float32, tensor.device)
        magnitude = torch.abs(as_float32(tensor[start:stop], slot=1), out=room).numpy()
        low = scratch(stop - start, torch.bool, tensor.device).numpy()
        np.less(magnitude, threshold, out=low)
        places = np.flatnonzero(np.logical_not(low, out=low))
        places += start
        found.append(places)
    return torch.from_numpy(np.concatenate(found))


def _refine(tensor: Tensor, places: Tensor, k: int) -> Tensor:
    """The k largest of these; of equal ones the first."""
    magnitudes = _magnitudes(tensor.index_select(0, places)).nan_to_num_(nan=math.inf)
    threshold = _kth(magnitudes, k)
    keep = magnitudes > threshold
    equal = magnitudes == threshold
    keep |= equal & (equal.cumsum(0) <= k - keep.sum())
    return places[keep]


class _Parts(NamedTuple):
    """Views of a wire."""

    scale: Tensor
    counts: Tensor
    places: Tensor
    values: Tensor


def wire_bytes(numel: int, k: int) -> int:
    return 4 + 4 * -(-numel // PLACES) + 4 * k


def _parts(wire: Tensor, numel: int, k: int) -> _Parts:
    counts, places = 4 + 4 * -(-numel // PLACES), 4 + 4 * -(-numel // PLACES) + 2 * k
    return _Parts(
        view_as(wire[:4], torch.float32)[0],
        view_as(wire[4:counts], torch.int32),
        view_as(wire[counts:places], torch.int16),
        view_as(wire[places:], torch.float16),
    )


def pack(tensor: Tensor, chosen: Tensor, k: int) -> Tensor:
    """The wire for these elements: at most `k` indices, in order."""
    wire = torch.zeros(wire_bytes(tensor.numel(), k), dtype=torch.uint8, device=tensor.device)
    if chosen.numel():
        parts = _parts(wire, tensor.numel(), k)
        values = tensor.index_select(0, chosen).float()
        parts.scale.copy_(values.abs().max())
        parts.counts.copy_(torch.bincount(chosen >> 16, minlength=parts.counts.numel()))
        parts.places[: chosen.numel()].copy_(chosen & 0xFFFF)
        parts.values[: chosen.numel()].copy_(values / parts.scale)
    return wire


def unpack(wire: Tensor, numel: int, k: int) -> tuple[Tensor, Tensor]:
    """Indices and float32 values, `k` of each; unused room has value zero at some index."""
    parts = _parts(wire, numel, k)
    # A wire may come from another process, and the indices below follow from its counts.
    if parts.counts.numel() and (int(parts.counts.min()) < 0 or int(parts.counts.sum(dtype=torch.int64)) > k):
        raise ValueError(f"counts of a wire must be 0 or more and sum to at most {k}")
    repeats = torch.cat([parts.counts, (k - parts.counts.sum(dtype=torch.int32))[None]])
    first = torch.arange(0, repeats.numel() * PLACES, PLACES, device=wire.device)
    first[-1] = 0
    places = torch.repeat_interleave(first, repeats, output_size=k)
    places += parts.places.int() & 0xFFFF
    return places, parts.values.float() * parts.scale


def unpack_add(wire: Tensor, out: Tensor, k: int, alpha: float) -> None:
    """`out += alpha * unpack(wire)`."""
    if k:
        places, values = unpack(wire, out.numel(), k)
        out.index_add_(0, places, values.to(out.dtype), alpha=alpha)
