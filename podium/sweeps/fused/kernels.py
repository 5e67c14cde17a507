"""Convolution of many models in one launch: Triton kernels for the forward pass and both gradients.

Every kernel is an implicit matrix product per model: rows are output positions, the inner dimension runs over the
filter's taps and channels, and nothing is unfolded in memory. Tensors have channels last and the model first:
activations [models, images, height, width, channels], filters [models, out, R, S, in].

No program reads two models and none adds to another's output, so a model's bits depend neither on its neighbours nor on
the order in which programs run: the weight gradient is summed in a fixed number of pieces, and a second pass sums the
pieces.

This module needs Triton and is imported only when a CUDA tensor is convolved.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

triton: Any = importlib.import_module("triton")
tl: Any = importlib.import_module("triton.language")
jit: Callable[[Callable[..., None]], Any] = triton.jit

# Triton reads a kernel's annotations too: it must know the names, and `constexpr` arguments are compiled in.
if TYPE_CHECKING:
    constexpr: TypeAlias = Any
    tensor: TypeAlias = Any
else:
    constexpr, tensor = tl.constexpr, tl.tensor

# Pieces of the positions over which a filter's gradient is summed.
SMALLEST_PIECE, MOST_PIECES = 1024, 16


class Tile(NamedTuple):
    """A kernel's tiling: rows, columns and inner length of one block's product, and how it is scheduled."""

    rows: int
    columns: int
    inner: int
    warps: int
    stages: int
    pack: int = 1  # neighbouring positions that share a row
    flip: bool = False  # for a filter's gradient: the product is computed transposed


@jit
def _convolve(
    x: tensor,
    w: tensor,
    bias: tensor,
    y: tensor,
    x_model: tensor,
    y_model: tensor,
    positions: tensor,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    OUT: constexpr,
    R: constexpr,
    S: constexpr,
    STRIDE_H: constexpr,
    STRIDE_W: constexpr,
    PAD_H: constexpr,
    PAD_W: constexpr,
    ROWS_H: constexpr,
    ROWS_W: constexpr,
    W_TAPS: constexpr,
    W_START: constexpr,
    W_STEP_R: constexpr,
    W_STEP_S: constexpr,
    Y_H: constexpr,
    Y_W: constexpr,
    Y_START: constexpr,
    Y_STEP_H: constexpr,
    Y_STEP_W: constexpr,
    BIAS: constexpr,
    PACK: constexpr,
    MASKED: constexpr,
    PRECISION: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
) -> None:
    """One block of one model's output; positions are counted over images, then ROWS_H × ROWS_W in each image.

    PACK neighbouring positions share one row: their patches overlap, so that the input is fetched fewer times. S counts
    the horizontal taps of such a row, and the columns are the neighbours' channels, one neighbour after the other.
    A bit mask, 15 bits in each direction, says which taps lie inside the image.
    """
    blocks_o = tl.cdiv(PACK * OUT, BN)
    per_model = tl.cdiv(positions, BM) * blocks_o
    model = (tl.program_id(0) // per_model).to(tl.int64)
    block = tl.program_id(0) % per_model
    m = (block // blocks_o) * BM + tl.arange(0, BM)
    n = (block % blocks_o) * BN + tl.arange(0, BN)
    o = n % OUT
    x += model * x_model
    y += model * y_model
    w += model * (OUT * W_TAPS * C)

    image = m // (ROWS_H * ROWS_W)
    i = m // ROWS_W % ROWS_H
    j = m % ROWS_W
    top = i * STRIDE_H - PAD_H
    left = j * STRIDE_W - PAD_W
    corner = ((image * H + top) * W + left) * C
    seen = tl.where(m < positions, 1 << 30, 0)
    for t in tl.static_range(R):
        seen |= ((top + t >= 0) & (top + t < H)).to(tl.int32) << t
    for t in tl.static_range(S):
        seen |= ((left + t >= 0) & (left + t < W)).to(tl.int32) << (15 + t)

    acc = tl.zeros((BM, BN), tl.float32)
    for k0 in range(0, R * S * C, BK):
        k = k0 + tl.arange(0, BK)
        c = k % C
        r = k // C // S
        s = k // C % S
        inside = k < R * S * C
        x_at = corner[:, None] + ((r * W + s) * C + c)[None, :]
        if MASKED:
            need = ((1 << 30) | (1 << r) | (1 << (15 + s)))[None, :]
            a = tl.load(x + x_at, mask=((seen[:, None] & need) == need) & inside[None, :], other=0.0)
        else:
            a = tl.load(x + x_at, mask=(m < positions)[:, None] & inside[None, :], other=0.0)
        if PACK == 1:
            w_at = ((W_START + r * W_STEP_R + s * W_STEP_S) * C + c)[:, None] + (n * (W_TAPS * C))[None, :]
            b = tl.load(w + w_at, mask=inside[:, None] & (n < OUT)[None, :], other=0.0)
        else:
            tap = s[:, None] - (n // OUT)[None, :]  # the n-th neighbour's filter starts n taps further
            w_at = ((W_START + r * W_STEP_R) * C + c)[:, None] + tap * (W_STEP_S * C) + (o * (W_TAPS * C))[None, :]
            real = inside[:, None] & (n < PACK * OUT)[None, :]
            b = tl.load(w + w_at, mask=real & (tap >= 0) & (tap <= S - PACK), other=0.0)
        acc = tl.dot(a, b, acc, input_precision=PRECISION)

    if BIAS:
        acc += tl.load(bias + model * OUT + o).to(tl.float32)[None, :]
    place = (image * Y_H + i * Y_STEP_H) * Y_W + j * (PACK * Y_STEP_W) + Y_START
    y_at = (place * OUT)[:, None] + n[None, :]
    tl.store(y + y_at, acc.to(y.dtype.element_ty), mask=(m < positions)[:, None] & (n < PACK * OUT)[None, :])


@jit
def _weigh(
    x: tensor,
    dy: tensor,
    dw: tensor,
    x_model: tensor,
    dy_model: tensor,
    positions: tensor,
    pieces: tensor,
    piece: tensor,
    H: constexpr,
    W: constexpr,
    C: constexpr,
    OUT: constexpr,
    R: constexpr,
    S: constexpr,
    STRIDE_H: constexpr,
    STRIDE_W: constexpr,
    PAD_H: constexpr,
    PAD_W: constexpr,
    ROWS_H: constexpr,
    ROWS_W: constexpr,
    FLIP: constexpr,
    MASKED: constexpr,
    PRECISION: constexpr,
    BM: constexpr,
    BN: constexpr,
    BK: constexpr,
) -> None:
    """One block of one model's filter gradient, [taps and channels, out], over one piece of the positions."""
    blocks_o = tl.cdiv(OUT, BN)
    blocks_k = tl.cdiv(R * S * C, BM)
    block = tl.program_id(0)
    o = (block % blocks_o) * BN + tl.arange(0, BN)
    block = block // blocks_o
    k = (block % blocks_k) * BM + tl.arange(0, BM)
    block = block // blocks_k
    model = (block // pieces).to(tl.int64)
    part = block % pieces
    x += model * x_model
    dy += model * dy_model
    dw += (model * pieces + part) * (R * S * C * OUT)

    c = k % C
    r = k // C // S
    s = k // C % S
    x_k = (r * W + s) * C + c
    inside = k < R * S * C
    need = (1 << 30) | (1 << r) | (1 << (15 + s))

    if FLIP:
        acc = tl.zeros((BN, BM), tl.float32)
    else:
        acc = tl.zeros((BM, BN), tl.float32)
    start = part * piece
    for m0 in range(start, tl.minimum(start + piece, positions), BK):
        m = m0 + tl.arange(0, BK)
        image = m // (ROWS_H * ROWS_W)
        top = m // ROWS_W % ROWS_H * STRIDE_H - PAD_H
        left = m % ROWS_W * STRIDE_W - PAD_W
        x_at = (((image * H + top) * W + left) * C)[:, None] + x_k[None, :]
        if MASKED:
            seen = tl.where(m < positions, 1 << 30, 0)
            for t in tl.static_range(R):
                seen |= ((top + t >= 0) & (top + t < H)).to(tl.int32) << t
            for t in tl.static_range(S):
                seen |= ((left + t >= 0) & (left + t < W)).to(tl.int32) << (15 + t)
            a = tl.load(x + x_at, mask=((seen[:, None] & need[None, :]) == need[None, :]) & inside[None, :], other=0.0)
        else:
            a = tl.load(x + x_at, mask=(m < positions)[:, None] & inside[None, :], other=0.0)
        g = tl.load(dy + m[:, None] * OUT + o[None, :], mask=(m < positions)[:, None] & (o < OUT)[None, :], other=0.0)
        if FLIP:
            acc = tl.dot(tl.trans(g), a, acc, input_precision=PRECISION)
        else:
            acc = tl.dot(tl.trans(a), g, acc, input_precision=PRECISION)

    if FLIP:
        acc = tl.trans(acc)
    tl.store(dw + k[:, None] * OUT + o[None, :], acc, mask=inside[:, None] & (o < OUT)[None, :])


def forward(x: Tensor, weight: Tensor, bias: Tensor | None, stride: Sequence[int], padding: Sequence[int]) -> Tensor:
    """Convolve x [B or 1, N, H, W, C] with weight [B, O, R, S, C] and bias [B, O]: [B, N, H', W', O], contiguous."""
    models, out, taps_h, taps_w, _ = weight.shape
    rows_h, rows_w = output_size(x.shape[2:4], (taps_h, taps_w), stride, padding)
    y = x.new_empty(models, x.shape[1], rows_h, rows_w, out)
    part = _Part(
        taps=(taps_h, taps_w), stride=(stride[0], stride[1]), padding=(padding[0], padding[1]), rows=(rows_h, rows_w)
    )
    _launch(x, weight, bias, y, part)
    return y


def input_grad(
    grad: Tensor, turned: Tensor, stride: Sequence[int], padding: Sequence[int], size: Sequence[int]
) -> Tensor:
    """The gradient of x [B, N, *size, C] from that of y; `turned` is the filter as [B, C, R, S, O].

    A stride of s leaves s × s interleaved sets of positions, each a plain convolution of `grad` with every s-th tap.
    """
    models, channels, taps_h, taps_w, _ = turned.shape
    dx = grad.new_empty(models, grad.shape[1], size[0], size[1], channels)
    across = list(_phases(taps_w, stride[1], padding[1], size[1]))
    parts = [
        _Part(
            taps=(v.taps, h.taps),
            stride=(1, 1),
            padding=(v.padding, h.padding),
            rows=(v.rows, h.rows),
            w_start=v.last * taps_w + h.last,
            w_step=(-stride[0] * taps_w, -stride[1]),
            y_start=v.start * size[1] + h.start,
            y_step=(stride[0], stride[1]),
        )
        for v in _phases(taps_h, stride[0], padding[0], size[0])
        for h in across
    ]
    if any(not all(part.taps) for part in parts):
        dx.zero_()  # some positions are under no tap
    for part in parts:
        if all(part.taps) and all(part.rows):
            _launch(grad, turned, None, dx, part)
    return dx


def weight_grad(x: Tensor, grad: Tensor, stride: Sequence[int], padding: Sequence[int], taps: Sequence[int]) -> Tensor:
    """The gradient of the filter, [B, R, S, C, O] in float32, from x and the gradient of y."""
    models, images, rows_h, rows_w, out = grad.shape
    _, _, height, width, channels = x.shape
    shared = x.shape[0] == 1 and models > 1

    tile = weight_tile(taps, channels, out, rows_w, stride, x.dtype)
    pack, across = tile.pack, taps[1] + tile.pack - 1
    positions, inner = images * rows_h * rows_w // pack, taps[0] * across * channels
    pieces, piece = _pieces(positions)
    dw = torch.empty(models, pieces, inner, pack * out, dtype=torch.float32, device=x.device)
    blocks = models * pieces * triton.cdiv(inner, tile.rows) * triton.cdiv(pack * out, tile.columns)
    _weigh[(blocks,)](
        x, grad, dw, 0 if shared else x.stride(0), grad.stride(0), positions, pieces, piece,
        H=height, W=width, C=channels, OUT=pack * out, R=taps[0], S=across,
        STRIDE_H=stride[0], STRIDE_W=stride[1] * pack, PAD_H=padding[0], PAD_W=padding[1],
        ROWS_H=rows_h, ROWS_W=rows_w // pack, MASKED=any(padding), PRECISION=precision(x.dtype), FLIP=tile.flip,
        BM=tile.rows, BN=tile.columns, BK=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    # Tap s of neighbour n is stored at s + n, so the stride over neighbours is the sum of both strides.
    dw = dw.view(models, pieces, taps[0], across, channels, pack, out)
    steps = dw.stride()
    shape = (models, pieces, *taps, channels, pack, out)
    return dw.as_strided(shape, (*steps[:5], steps[3] + steps[5], steps[6])).sum((1, 5))


def output_size(
    size: Sequence[int], taps: Sequence[int], stride: Sequence[int], padding: Sequence[int]
) -> tuple[int, int]:
    """Height and width of the output."""
    h, w = ((n + 2 * p - t) // s + 1 for n, t, s, p in zip(size, taps, stride, padding, strict=True))
    return h, w


def precision(dtype: torch.dtype) -> str:
    """Triton's precision for float32 products, following torch's `allow_tf32`; other types ignore it."""
    return "tf32" if dtype != torch.float32 or torch.backends.cuda.matmul.allow_tf32 else "ieee"


class _Part(NamedTuple):
    """A convolution over some positions: the taps it uses, and where its rows are in the output."""

    taps: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    rows: tuple[int, int]
    w_start: int = 0
    w_step: tuple[int, int] | None = None
    y_start: int = 0
    y_step: tuple[int, int] = (1, 1)


class _Phase(NamedTuple):
    start: int  # the first of the input positions, which are a stride apart
    rows: int  # how many positions there are
    taps: int  # how many taps cover them
    last: int  # the last of those taps, which are used backwards
    padding: int


def _phases(taps: int, stride: int, padding: int, size: int) -> Iterator[_Phase]:
    """Input position p meets tap t at output (p + padding - t) / stride: all p with the same remainder are a phase."""
    for start in range(stride):
        first = (start + padding) % stride
        count = len(range(first, taps, stride))
        last = first + stride * (count - 1)
        yield _Phase(start, len(range(start, size, stride)), count, last, -((start + padding - last) // stride))


def _pieces(positions: int) -> tuple[int, int]:
    """The number of pieces of the positions, and the length of one. They depend on `positions` alone, so that a model's
    bits do not depend on the number of models."""
    piece = max(SMALLEST_PIECE, triton.cdiv(positions, MOST_PIECES))
    piece = triton.cdiv(piece, 128) * 128  # a multiple of every tile's inner length, so that pieces do not overlap
    return triton.cdiv(positions, piece), piece


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, part: _Part) -> None:
    models, out, taps_h, taps_w, _ = weight.shape
    _, images, height, width, channels = x.shape
    w_step = part.w_step or (taps_w, 1)
    shared = x.shape[0] == 1 and models > 1

    tile = forward_tile(part, channels, out, x.dtype)
    pack = tile.pack
    positions = images * part.rows[0] * part.rows[1] // pack
    blocks = models * triton.cdiv(positions, tile.rows) * triton.cdiv(pack * out, tile.columns)
    _convolve[(blocks,)](
        x, weight, y if bias is None else bias, y, 0 if shared else x.stride(0), y.stride(0), positions,
        H=height, W=width, C=channels, OUT=out, R=part.taps[0], S=part.taps[1] + pack - 1,
        STRIDE_H=part.stride[0], STRIDE_W=part.stride[1] * pack, PAD_H=part.padding[0], PAD_W=part.padding[1],
        ROWS_H=part.rows[0], ROWS_W=part.rows[1] // pack,
        W_TAPS=taps_h * taps_w, W_START=part.w_start, W_STEP_R=w_step[0], W_STEP_S=w_step[1],
        Y_H=y.shape[2], Y_W=y.shape[3], Y_START=part.y_start, Y_STEP_H=part.y_step[0], Y_STEP_W=part.y_step[1],
        BIAS=bias is not None, PACK=pack, MASKED=_reaches_out(part, height, width), PRECISION=precision(x.dtype),
        BM=tile.rows, BN=tile.columns, BK=tile.inner, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def _reaches_out(part: _Part, height: int, width: int) -> bool:
    """Whether any tap reaches outside the input."""
    sides = zip((height, width), part.taps, part.stride, part.padding, part.rows, strict=True)
    return any(p > 0 or (rows - 1) * s - p + taps > n for n, taps, s, p, rows in sides)


def forward_tile(part: _Part, channels: int, out: int, dtype: torch.dtype) -> Tile:
    """A convolution's tile: the fastest, or nearly, at the shapes of a small CNN and of ResNet-20 on an H200.

    Chosen by the shape alone, not timed at run time, so that two runs give the same bits (`docs/log.md` has the times).
    """
    if precision(dtype) == "ieee":  # no tensor cores: small blocks, or registers run out
        return Tile(32, 32, 16, 4, 2)
    short = dtype != torch.float32
    if channels < 16:
        inner = min(64, max(16, triton.next_power_of_2(part.taps[0] * part.taps[1] * channels)))
        return Tile(128, _columns(out, 128), inner, 4, 2)
    if part.stride != (1, 1) or part.y_step != (1, 1):
        return Tile(128 if short else 64, _columns(out, 128), 32, 4, 3)
    pack = _pack(part.rows[1], out, 128 if short or channels >= 64 else 64, most=2 if short else 4)
    columns = _columns(pack * out, 128)
    if not short:
        return Tile(128, columns, 32, 4, 3, pack)
    if columns == 128:
        return Tile(128, columns, 64, 8, 3, pack)
    return Tile(128, columns, 64, 4, 3 if channels >= 64 else 2, pack)


def weight_tile(
    taps: Sequence[int], channels: int, out: int, across: int, stride: Sequence[int], dtype: torch.dtype
) -> Tile:
    """The tile for a filter's gradient, where `rows` are taps and channels, and `inner` the positions summed."""
    if precision(dtype) == "ieee":
        return Tile(32, 32, 16, 4, 2)
    inner = taps[0] * taps[1] * channels
    if inner <= 32:
        return Tile(max(16, triton.next_power_of_2(inner)), _columns(out, 64), 128, 4, 2)
    pack = _pack(across, out, 64, most=2) if stride[1] == 1 else 1
    columns = _columns(pack * out, 64)
    if dtype == torch.float32:
        # Hopper's own instruction needs float32 operands contiguous along the positions. They are strided here, so each
        # number would be copied separately. With two warps Triton uses the older instruction, which needs this for one
        # operand only.
        return Tile(128, columns, 16, 2, 4, pack, flip=True)
    return Tile(64, columns, 64, 4, 3, pack)


def _columns(wanted: int, most: int) -> int:
    return int(min(most, max(16, triton.next_power_of_2(wanted))))


def _pack(across: int, out: int, columns: int, most: int) -> int:
    """How many neighbours share a row: as many as divide the width and fit into the columns."""
    fitting = (n for n in (4, 2) if n <= most and across % n == 0 and n * out <= columns)
    return next(fitting, 1)
