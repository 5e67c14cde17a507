"""Dropout with counter-based masks: a hash of (seed, layer, step, element), not draws from a generator.

A generator's stream depends on all earlier draws, so a trial in a fused array would never get the masks that it gets
alone, and stopping one row would change the masks of others. Here a mask depends on nothing but the trial itself.
The rate is a buffer, so that rows of a fused array may differ in it.

The hash is a 32-bit finaliser by multiplication and shifts (Murmur's constants), twice: once over (seed, step), once
over the element. Its top 24 bits are compared with the rate.
"""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from podium.engine.generators import derived_seed
from podium.errors import ConfigError

_SPATIAL: dict[type[nn.Module], int] = {nn.Dropout: 0, nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3}
_BITS = 24


@final
class CountedDropout(nn.Module):
    """Replaces nn.Dropout; with `spatial`, nn.Dropout1d, 2d or 3d, which drop whole channels."""

    rate: Tensor
    key: Tensor
    count: Tensor

    def __init__(self, rate: float, key: int, spatial: int = 0) -> None:
        """`spatial`: how many dimensions behind the channel are dropped together; 0 drops single elements."""
        super().__init__()
        self.spatial, self.inplace = spatial, False
        self.register_buffer("rate", torch.tensor(float(rate)), persistent=False)
        self.register_buffer("key", torch.tensor(key, dtype=torch.int64), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64), persistent=False)

    @property
    def p(self) -> float:
        """The rate as a number, for models that read `p` of a layer; not in a fused array, where rows differ."""
        return float(self.rate)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        shape = x.shape[: x.dim() - self.spatial] + (1,) * self.spatial
        keep = self._mask(shape, x.device)
        scale = torch.where(self.rate < 1, 1 / (1 - self.rate), 0.0).to(x.dtype)
        self.count.add_(1)
        return torch.where(keep, x * scale, torch.zeros((), dtype=x.dtype, device=x.device))

    def _mask(self, shape: torch.Size, device: torch.device) -> Tensor:
        elements = torch.arange(shape.numel(), device=device).view(shape)
        drawn = mix(elements + mix(self.key + self.count * 0x3C6EF372)) >> (32 - _BITS)
        return drawn.to(torch.float32) >= self.rate.to(torch.float32) * (1 << _BITS)

    def extra_repr(self) -> str:
        return f"spatial={self.spatial}"


def mix(values: Tensor) -> Tensor:
    """32 pseudo-random bits from the lower 32 bits of int64 values."""
    low = 0xFFFFFFFF
    values = values & low
    values = ((values ^ (values >> 16)) * 0x7FEB352D) & low
    values = ((values ^ (values >> 15)) * 0x846CA68B) & low
    return values ^ (values >> 16)


def with_counted_dropout(model: nn.Module, seed: int) -> nn.Module:
    """The model with every nn.Dropout replaced; layers are counted in the order of `modules()`."""
    if type(model) in _SPATIAL:
        return _counted(model, _key(seed, 0))
    swapped: dict[nn.Module, CountedDropout] = {}
    for module in list(model.modules()):
        for name, child in list(module._modules.items()):
            if child is not None and type(child) in _SPATIAL:
                if child not in swapped:  # one module in two places stays one module
                    swapped[child] = _counted(child, _key(seed, len(swapped)))
                module._modules[name] = swapped[child]
    return model


def set_dropout(model: nn.Module, rate: float, who: str) -> None:
    """Give every dropout layer this rate."""
    if not 0 <= rate <= 1:
        raise ConfigError(f"{who}: dropout must be between 0 and 1, got {rate}")
    layers = [module for module in model.modules() if isinstance(module, CountedDropout)]
    if not layers:
        raise ConfigError(f"{who}: dropout={rate} needs a model with nn.Dropout layers, which this one has none of")
    for layer in layers:
        layer.rate.fill_(rate)


def _counted(module: nn.Module, key: int) -> CountedDropout:
    assert isinstance(module, _DropoutNd)
    return CountedDropout(module.p, key, _SPATIAL[type(module)]).train(module.training)


def _key(seed: int, layer: int) -> int:
    """The 31-bit key of a trial's layer."""
    return derived_seed(seed, 0x0D20, layer) & 0x7FFFFFFF
