"""Augmentation drawn from each sample's key and from nothing else.

A key is fixed by (seed, epoch, sample), so a sample looks the same in every worker and batch, and after a resume.
Different bits of the key feed different draws.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from podium.errors import ConfigError


@final
@dataclass(frozen=True, kw_only=True)
class CropAndFlip:
    """Random crop after zero padding, then a mirror image half of the time: the usual augmentation for CIFAR."""

    padding: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        if self.padding < 0:
            raise ConfigError(f"CropAndFlip: padding must be 0 or more, got {self.padding}")

    def __call__(self, inputs: Tensor, keys: np.ndarray) -> Tensor:
        """Images (samples, channels, height, width) to images of the same shape."""
        return self.on_device(inputs, torch.from_numpy(keys.view(np.int64)))

    def on_device(self, inputs: Tensor, keys: Tensor) -> Tensor:
        """The same on the images' device, from keys on that device as int64 bits."""
        down, right, mirrored = self._draws(keys)
        height, width = inputs.shape[2:]
        rows = down[:, None] + torch.arange(height, device=keys.device)
        columns = right[:, None] + torch.arange(width, device=keys.device)
        columns = torch.where(mirrored[:, None], columns.flip(1), columns)
        sample = torch.arange(len(inputs), device=keys.device)[:, None, None]
        # Channels last for the gather: the three indices are adjacent, and one copy moves a whole pixel.
        padded = pad(inputs, [self.padding] * 4).permute(0, 2, 3, 1)
        return padded[sample, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2).contiguous()

    def _draws(self, keys: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Offsets down and right, and whether to mirror, from bits 0–20, 21–41 and 63 of each key."""
        span, low_bits = 2 * self.padding + 1, (1 << 21) - 1
        mirrored = keys < 0 if self.flip else torch.zeros_like(keys, dtype=torch.bool)  # bit 63 is the sign
        return (keys & low_bits) % span, ((keys >> 21) & low_bits) % span, mirrored
