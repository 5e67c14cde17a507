"""Stand-ins for the layers that `torch.vmap` makes slow: same names, same parameters, another way to compute.

`stack_form` looks at one module and nothing below it; its caller walks the tree. A module of a derived class is left
as it is, since what the class changed is unknown, and so is one with hooks.
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
    """A module to put in the place of this one before it runs under vmap, or None where it should stay.

    The stand-in holds the original's own parameters and buffers under the same names.
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
    """Whether hooks hang on it, which a stand-in would lose; old-style weight norms are such hooks too."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for kind in kinds)


def _share(original: nn.Module, stand_in: nn.Module) -> None:
    for name, parameter in original._parameters.items():
        stand_in.register_parameter(name, parameter)


class Linear(nn.Module):
    """Stands in for a `Linear`: the product is taken the other way round, y' = W x'.

    Its gradient then comes out in the order in which the weights lie; otherwise it comes transposed, and the
    optimizer, which reads it next, takes nearly twice as long.
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
    """Stands in for a `MaxPool2d` whose windows do not overlap: element-wise when compiled, so that it fuses."""

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
        with torch.autocast(x.device.type, enabled=False):  # it would add up in float32, and here nothing is added
            return pool(x, self.height, self.width)


def pool(x: Tensor, height: int, width: int) -> Tensor:
    """The largest of each window, as torch does it: of equals the first, and a NaN beats all.

    The winner's number is found first, without gradient; the value is then picked by it, and so is the gradient. In
    float32 throughout, since a compiler splits a sum of shorter numbers off; it is exact, only zeros are added.
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
    """Stands in for a `Conv1d` or `Conv2d` padded with zeros; follows autocast as they do."""

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
        if self.flat:  # a picture one row high
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
    """The model with layers swapped for forms made for many models at once; names stay.

    `dense`: sparse embeddings give ordinary gradients, which `vmap` can stack.
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
    """With the original's attributes too: a model may ask its layer how wide it is."""
    for name, value in vars(original).items():
        if not name.startswith("_") and not hasattr(stand_in, name):
            setattr(stand_in, name, value)
    return stand_in.train(original.training)


def _embedding(original: nn.Embedding, *, dense: bool) -> nn.Module:
    """One whose gradient `vmap` can stack: it is not sparse, and padding gets none in any row."""
    table = copy.copy(original)
    table.sparse = original.sparse and not dense
    plain = original.max_norm is None and not original.scale_grad_by_freq and not table.sparse
    return PaddedEmbedding(table) if original.padding_idx is not None and plain else table


class PaddedEmbedding(nn.Module):
    """An embedding with padding: `vmap`'s own rule keeps gradients from the padding of the first model only."""

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
    """Dropout where no row drops anything: its buffers, and nothing else."""

    def __init__(self, dropout: CountedDropout) -> None:
        super().__init__()
        for name, buffer in dropout.named_buffers():
            self.register_buffer(name, buffer, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return x
