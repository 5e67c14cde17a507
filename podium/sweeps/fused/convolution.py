"""Convolution under `vmap` with one filter per model, which `torch.vmap` turns into a slow grouped convolution.

`conv2d` is for use inside `torch.vmap` over stacked parameters, with gradients taken outside of it. On a GPU all
models are then convolved at once by Triton kernels (`podium.sweeps.fused.kernels`), with channels last in memory.
Inputs that the kernels do not support (CPU, float64, groups, dilation …) go to `torch.nn.functional.conv2d` and so to
vmap's own rule.

The tensors keep their usual shapes [images, channels, height, width]; only the strides are channels-last. Element-wise
operations and pooling preserve them, so nothing is transposed between layers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional
from torch.nn import grad as grad_of

_HAS_TRITON = importlib.util.find_spec("triton") is not None
_SCHEMA = "(Tensor x, Tensor weight, Tensor? bias, int[] stride, int[] padding) -> Tensor"
_LARGEST_FILTER = 12  # in one direction: kernels store its taps, and three neighbours', as 15 bits
_MOST_ELEMENTS = 2**31 - 1  # of one model's tensor: kernels count them in 32 bits


def conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sequence[int] = (1, 1),
    padding: Sequence[int] | str = (0, 0),
    dilation: Sequence[int] = (1, 1),
    groups: int = 1,
) -> Tensor:
    """`torch.nn.functional.conv2d` for use inside vmap; x may be shared by all models."""
    stride, dilation = _pair(stride), _pair(dilation)
    if isinstance(padding, str) or groups != 1 or dilation != [1, 1] or not _serves(x, weight, stride, _pair(padding)):
        padding = padding if isinstance(padding, str) else _pair(padding)
        return functional.conv2d(x, weight, bias, stride, padding, dilation, groups)
    return cast(Tensor, one_model(x, weight, bias, stride, _pair(padding)))


def _pair(value: Sequence[int] | int) -> list[int]:
    return [value, value] if isinstance(value, int) else list(value)


def _serves(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> bool:
    """Whether the kernels support it: float32 or bfloat16 on a GPU, a filter of usual size, a non-empty output.

    On a CPU vmap's grouped convolution was the fastest of the forms tried (`docs/log.md`).
    """
    if x.dtype == torch.float64 and x.ndim == 4:  # for the probe: grouped convolutions in float64 are far slower
        return True
    if not x.is_cuda or not _HAS_TRITON or x.ndim != 4:
        return False
    if torch.cuda.get_device_capability(x.device) < (8, 0):  # no tensor cores for float32 and bfloat16
        return False
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.bfloat16):
        return False
    images, _, height, width = x.shape
    out, channels, taps_h, taps_w = weight.shape
    rows_h = (height + 2 * padding[0] - taps_h) // stride[0] + 1
    rows_w = (width + 2 * padding[1] - taps_w) // stride[1] + 1
    return (
        max(taps_h, taps_w) <= _LARGEST_FILTER
        and min(images, channels, out, rows_h, rows_w) > 0
        and images * max(height * width * channels, rows_h * rows_w * out) <= _MOST_ELEMENTS
    )


def _by_kernels(x: Tensor) -> bool:
    """Whether kernels compute it; else model by model, as in float64, far faster than a grouped convolution."""
    return x.is_cuda and x.dtype != torch.float64


# One model: called under vmap; without vmap it is the plain convolution.


@custom_op("podium::conv2d", mutates_args=(), schema=_SCHEMA)
def one_model(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    """A plain convolution; under vmap with one filter per model, `stacked_conv2d`."""
    return functional.conv2d(x, weight, bias, stride, padding)


@one_model.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    return functional.conv2d(x, weight, bias, stride, padding)


def _keep_one(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)
    ctx.out = None if bias is None else [bias.shape[0]]


def _one_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    wanted = [*ctx.needs_input_grad[:2], ctx.out is not None and ctx.needs_input_grad[2]]
    grads = torch.ops.aten.convolution_backward(
        grad, x, weight, ctx.out, ctx.stride, ctx.padding, [1, 1], False, [0, 0], 1, wanted
    )
    return (*grads, None, None)


one_model.register_autograd(_one_backward, setup_context=_keep_one)


@one_model.register_vmap
def _(
    info: Any,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
) -> tuple[Tensor, int]:
    x_dim, w_dim, b_dim = in_dims[:3]
    weight = _rows(weight, w_dim, info.batch_size)
    bias = None if bias is None else _rows(bias, b_dim, info.batch_size)
    x = x[None] if x_dim is None else x.movedim(x_dim, 0)
    return stacked_conv2d(x, weight, bias, stride, padding), 0


def _rows(t: Tensor, dim: int | None, models: int) -> Tensor:
    return t.expand(models, *t.shape) if dim is None else t.movedim(dim, 0)


# All models: tensors with channels last and the model first, all contiguous.


def stacked_conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    """Convolve x [B, N, C, H, W] (or [1, …]: shared) with weight [B, O, C, R, S] and bias [B, O], row by row."""
    x, weight = (t.permute(0, 1, 3, 4, 2).contiguous() for t in (x, weight))
    bias = None if bias is None else bias.contiguous()
    y: Tensor = _stacked(x, weight, bias, stride, padding)
    return y.permute(0, 1, 4, 2, 3)


@custom_op("podium::stacked_conv2d", mutates_args=(), schema=_SCHEMA)
def _stacked(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    if _by_kernels(x):
        from podium.sweeps.fused import kernels  # needs Triton

        return kernels.forward(x, weight, bias, stride, padding)
    y = x.new_empty(_output_shape(x, weight, stride, padding))
    for i, row in enumerate(y):
        one = None if bias is None else bias[i]
        row.copy_(_last(functional.conv2d(_first(x[i % len(x)]), _first(weight[i]), one, stride, padding)))
    return y


@_stacked.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, stride: list[int], padding: list[int]) -> Tensor:
    return x.new_empty(_output_shape(x, weight, stride, padding))


@custom_op(
    "podium::stacked_conv2d_input_grad",
    mutates_args=(),
    schema="(Tensor grad, Tensor turned, int[] stride, int[] pad, SymInt[] size) -> Tensor",
)
def _input_grad(grad: Tensor, turned: Tensor, stride: list[int], padding: list[int], size: list[int]) -> Tensor:
    """The gradient of x from that of y; `turned` is the filter as [B, C, R, S, O]."""
    if _by_kernels(grad):
        from podium.sweeps.fused import kernels

        return kernels.input_grad(grad, turned, stride, padding, size)
    dx = grad.new_empty(grad.shape[0], grad.shape[1], size[0], size[1], turned.shape[1])
    for i, row in enumerate(dx):
        filters = turned[i].permute(3, 0, 1, 2)
        shape = (row.shape[0], row.shape[3], *size)
        row.copy_(_last(grad_of.conv2d_input(shape, filters, _first(grad[i]), stride, padding)))
    return dx


@_input_grad.register_fake
def _(grad: Tensor, turned: Tensor, stride: list[int], padding: list[int], size: list[int]) -> Tensor:
    return grad.new_empty(grad.shape[0], grad.shape[1], size[0], size[1], turned.shape[1])


@custom_op(
    "podium::stacked_conv2d_weight_grad",
    mutates_args=(),
    schema="(Tensor x, Tensor grad, int[] stride, int[] padding, int[] taps, bool bias) -> (Tensor, Tensor)",
)
def _weight_grad(
    x: Tensor, grad: Tensor, stride: list[int], padding: list[int], taps: list[int], bias: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of the filter, as [B, R, S, C, O], and of the bias (empty if not wanted).

    The bias gradient is computed inside this custom op, because a compiler would compute all of `grad` anew to sum it.
    """
    wide = torch.promote_types(grad.dtype, torch.float32)
    db = grad.sum((1, 2, 3), dtype=wide) if bias else grad.new_empty(0, dtype=wide)
    if _by_kernels(x):
        from podium.sweeps.fused import kernels

        return kernels.weight_grad(x, grad, stride, padding, taps), db
    dw = x.new_empty(grad.shape[0], *taps, x.shape[4], grad.shape[4], dtype=wide)
    for i, row in enumerate(dw):
        shape = (grad.shape[4], x.shape[4], *taps)
        found = grad_of.conv2d_weight(_first(x[i % len(x)]), shape, _first(grad[i]), stride, padding)
        row.copy_(found.permute(2, 3, 1, 0))
    return dw, db


@_weight_grad.register_fake
def _(
    x: Tensor, grad: Tensor, stride: list[int], padding: list[int], taps: list[int], bias: bool
) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(grad.dtype, torch.float32)
    db = [grad.shape[0], grad.shape[4]] if bias else [0]
    return x.new_empty(grad.shape[0], *taps, x.shape[4], grad.shape[4], dtype=wide), x.new_empty(db, dtype=wide)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ctx.stride, ctx.padding = inputs
    ctx.save_for_backward(x, weight)
    ctx.bias_dtype = None if bias is None else bias.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight = ctx.saved_tensors
    models, _, taps_h, taps_w, _ = weight.shape
    grad = grad.contiguous()
    dx = dw = db = None
    if ctx.needs_input_grad[0]:
        dx = _input_grad(grad, weight.permute(0, 4, 2, 3, 1).contiguous(), ctx.stride, ctx.padding, list(x.shape[2:4]))
        if x.shape[0] < models:
            dx = dx.sum(0, keepdim=True)
    if ctx.needs_input_grad[1] or ctx.needs_input_grad[2]:
        bias = ctx.bias_dtype is not None and ctx.needs_input_grad[2]
        dw, db = _weight_grad(x, grad, ctx.stride, ctx.padding, [taps_h, taps_w], bias)
        dw = dw.permute(0, 4, 1, 2, 3).to(weight.dtype) if ctx.needs_input_grad[1] else None
        db = db.to(ctx.bias_dtype) if bias else None
    return dx, dw, db, None, None


_stacked.register_autograd(_backward, setup_context=_keep)


def _output_shape(x: Tensor, weight: Tensor, stride: list[int], padding: list[int]) -> list[int]:
    sides = zip(x.shape[2:4], weight.shape[2:4], stride, padding, strict=True)
    return [weight.shape[0], x.shape[1], *((n + 2 * p - taps) // s + 1 for n, taps, s, p in sides), weight.shape[1]]


def _first(t: Tensor) -> Tensor:
    """A view with channels first, as torch expects."""
    return t.permute(0, 3, 1, 2)


def _last(t: Tensor) -> Tensor:
    return t.permute(0, 2, 3, 1)
