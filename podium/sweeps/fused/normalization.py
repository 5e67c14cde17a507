"""Batch normalization under `vmap`, written out so that a compiler can fuse it with its neighbours.

`torch.vmap` folds the models into the channels of one batch normalization, which costs transpositions and leaves scale
and shift as separate passes. Here the statistics are plain reductions of one model, and the rest is one element-wise
expression, in any memory layout.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from podium.errors import ConfigError


class BatchNorm(nn.Module):
    """Replaces a `BatchNorm1d`, `2d` or `3d`: same names, same parameters and buffers (shared), same results.

    The running statistics are updated in place, so under vmap they must be stacked like the parameters.
    """

    weight: Tensor | None
    bias: Tensor | None
    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, original: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
        super().__init__()
        if original.momentum is None:
            raise ConfigError(
                "BatchNorm: momentum must be a number to train many models at once, got None (a cumulative average)"
            )
        self.num_features, self.eps, self.momentum = original.num_features, original.eps, original.momentum
        for name, parameter in original._parameters.items():
            self.register_parameter(name, parameter)
        for name, buffer in original._buffers.items():
            self.register_buffer(name, buffer)
        self.train(original.training)

    def extra_repr(self) -> str:
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.training or self.running_mean is None or self.running_var is None:
            others = [d for d in range(x.ndim) if d != 1]
            count = x.numel() // x.shape[1]
            if count < 2 and self.training:
                raise ValueError(f"BatchNorm: more than 1 value per channel is needed to train, got {list(x.shape)}")
            var, mean = torch.var_mean(wide, others, correction=0)
            if self.training:
                self._track(mean.detach(), var.detach(), count)
        else:
            mean, var = self.running_mean, self.running_var
        scale = torch.rsqrt(var + self.eps)
        if self.weight is not None:
            scale = scale * self.weight
        shape = [1, -1] + [1] * (x.ndim - 2)
        out = (wide - mean.view(shape)) * scale.view(shape)
        if self.bias is not None:
            out = out + self.bias.view(shape)
        return out.to(x.dtype)

    @torch.no_grad()
    def _track(self, mean: Tensor, var: Tensor, count: int) -> None:
        if self.running_mean is None or self.running_var is None:
            return
        unbiased = var * (count / (count - 1))
        self.running_mean.mul_(1 - self.momentum).add_(mean.to(self.running_mean.dtype) * self.momentum)
        self.running_var.mul_(1 - self.momentum).add_(unbiased.to(self.running_var.dtype) * self.momentum)
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
