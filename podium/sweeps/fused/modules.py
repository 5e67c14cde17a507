"""Replacements for the layers that `torch.vmap` makes slow: same names, same parameters, other operations.

`stack_form` looks at one module, not at its children; its caller walks the tree. A module of a derived class is not
replaced, since it is unknown what the class changes, nor is one with hooks.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from podium.sweeps.fused.convolution import conv2d
from podium.sweeps.fused.dropout import CountedDropout
from podium.sweeps.fused.normalization import BatchNorm


def stack_form(module: nn.Module) -> nn.Module | None:
    """A replacement for this module under vmap, or None where it should stay.

    The replacement has the original's own parameters and buffers under the same names.
    """
    kind = type(module)
    if _watched(module):
        return None
    if kind is nn.Linear:
        assert isinstance(module, nn.Linear)
        return Linear(module)
    if kind in (nn.Conv1d, nn.Conv2d):
        assert isinstance(module, nn.Conv1d | nn.Conv2d)
        return Conv(module) if module.padding_mode == "zeros" else None
    if kind in (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d):
        assert isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d)
        return BatchNorm(module)
    if kind is nn.MaxPool2d:
        assert isinstance(module, nn.MaxPool2d)
        return MaxPool.of(module)
    return None


def _watched(module: nn.Module) -> bool:
    """Whether the module has hooks, which a replacement would lose; old-style weight norms are such hooks too."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _share(original: nn.Module, stand_in: nn.Module) -> None:
    for name, parameter in original._parameters.items():
        stand_in.register_parameter(name, parameter)


class Linear(nn.Module):
    """Replaces a `Linear`: the product is computed transposed, y' = W x'.

    The weight's gradient then has the memory layout of the weight; otherwise it is transposed, and the optimizer, which
    reads it next, takes nearly twice as long.
    """

    weight: Tensor
    bias: Tensor | None

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        _share(original, self)
        self.described = str(original.extra_repr())
        self.train(original.training)

    def extra_repr(self) -> str:
        return self.described

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim != 2:
            return functional.linear(x, self.weight, self.bias)
        y = (self.weight @ x.T).T
        return y if self.bias is None else y + self.bias.to(y.dtype)


class MaxPool(nn.Module):
    """Replaces a `MaxPool2d` whose windows do not overlap: element-wise when compiled, so that it fuses."""

    def __init__(self, height: int, width: int) -> None:
        super().__init__()
        self.height, self.width = height, width

    @classmethod
    def of(cls, original: nn.MaxPool2d) -> MaxPool | None:
        """None where windows overlap or reach beyond the edge."""
        size, stride = _two(original.kernel_size), _two(original.stride)
        plain = _two(original.padding) == (0, 0) and _two(original.dilation) == (1, 1)
        if size != stride or not plain or original.ceil_mode or original.return_indices:
            return None
        return cls(*size)

    def extra_repr(self) -> str:
        return f"{self.height} × {self.width}"

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() or x.ndim != 4:
            return functional.max_pool2d(x, (self.height, self.width))
        with torch.autocast(x.device.type, enabled=False):  # autocast would run `sum` in float32: only zeros are added
            return pool(x, self.height, self.width)


def pool(x: Tensor, height: int, width: int) -> Tensor:
    """The maximum of each window as in torch: of equal values the first, and a NaN beats all.

    The index of the maximum is found first, without gradient; value and gradient are then selected by it. All in
    float32, since a compiler does not fuse a sum of shorter numbers; the sum is exact, as only zeros are added.
    """
    images, channels, rows, columns = x.shape[0], x.shape[1], x.shape[2] // height, x.shape[3] // width
    windows = x[:, :, : rows * height, : columns * width].reshape(images, channels, rows, height, columns, width)
    windows = windows.to(torch.promote_types(x.dtype, torch.float32))
    seen = windows.detach()
    best = seen[:, :, :, 0, :, 0]
    winner = torch.zeros_like(best, dtype=torch.uint8)
    for number in range(1, height * width):
        value = seen[:, :, :, number // width, :, number % width]
        wins = (value > best) | value.isnan()
        best, winner = torch.where(wins, value, best), torch.where(wins, number, winner)
    numbers = torch.arange(height * width, dtype=torch.uint8, device=x.device).view(height, 1, width)
    return torch.where(winner[:, :, :, None, :, None] == numbers, windows, 0).sum((3, 5)).to(x.dtype)


def _two(value: int | tuple[int, int]) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (value[0], value[1])


class Conv(nn.Module):
    """Replaces a `Conv1d` or `Conv2d` padded with zeros; follows autocast as they do."""

    weight: Tensor
    bias: Tensor | None

    def __init__(self, original: nn.Conv1d | nn.Conv2d) -> None:
        super().__init__()
        _share(original, self)
        self.described = str(original.extra_repr())  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.flat = isinstance(original, nn.Conv1d)
        self.stride, self.dilation = tuple(original.stride), tuple(original.dilation)
        self.padding = original.padding if isinstance(original.padding, str) else tuple(original.padding)
        self.groups = original.groups
        if self.flat:  # an image one row high
            self.stride, self.dilation = (1, *self.stride), (1, *self.dilation)
            self.padding = self.padding if isinstance(self.padding, str) else (0, *self.padding)
        self.train(original.training)

    def extra_repr(self) -> str:
        return self.described

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight = x.to(dtype), weight.to(dtype)
            bias = None if bias is None else bias.to(dtype)
        if self.flat:
            x, weight = x.unsqueeze(-2), weight.unsqueeze(-2)
        y = conv2d(x, weight, bias, self.stride, self.padding, self.dilation, self.groups)
        return y.squeeze(-2) if self.flat else y


def prepared(model: nn.Module, *, fast: bool, drops: bool, dense: bool = False) -> nn.Module:
    """Replace layers of the model, in place, by ones written for many models at once; names stay.

    `dense`: sparse embeddings give dense gradients, which `vmap` can stack.
    """
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is None:
                continue
            if isinstance(child, CountedDropout) and not drops:
                module._modules[name] = _Idle(child)
            elif type(child) is nn.Embedding and (child.sparse or child.padding_idx is not None):
                module._modules[name] = _embedding(child, dense=dense)
            elif fast and (swapped := stack_form(child)) is not None:
                module._modules[name] = _like(swapped, child)
    if fast and (whole := stack_form(model)) is not None:
        return _like(whole, model)
    return model


def _like(stand_in: nn.Module, original: nn.Module) -> nn.Module:
    """The replacement with the original's attributes: a model may read `in_features` of its layer."""
    for name, value in vars(original).items():
        if not name.startswith("_") and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
    return stand_in.train(original.training)


def _embedding(original: nn.Embedding, *, dense: bool) -> nn.Module:
    """An embedding whose gradient `vmap` can stack: not sparse, and zero for padding in every row."""
    table = copy.copy(original)
    table.sparse = original.sparse and not dense
    plain = original.max_norm is None and not original.scale_grad_by_freq and not table.sparse
    return PaddedEmbedding(table) if original.padding_idx is not None and plain else table


class PaddedEmbedding(nn.Module):
    """An embedding with padding: `vmap`'s own rule zeroes the padding's gradient for the first model only."""

    weight: Tensor
    padding_idx: int

    def __init__(self, original: nn.Embedding) -> None:
        super().__init__()
        self.register_parameter("weight", original._parameters["weight"])
        assert original.padding_idx is not None
        self.padding_idx = original.padding_idx
        self.num_embeddings, self.embedding_dim = original.num_embeddings, original.embedding_dim

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.embedding(x, self.weight)
        return torch.where((x == self.padding_idx).unsqueeze(-1), found.detach(), found)


class _Idle(nn.Module):
    """Dropout where no row drops anything: the buffers and an identity."""

    def __init__(self, dropout: CountedDropout) -> None:
        super().__init__()
        for name, buffer in dropout.named_buffers():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x
