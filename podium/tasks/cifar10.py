"""CIFAR-10 from its binary files, with the small residual network of the paper's own CIFAR experiments.

He et al., 2015, https://arxiv.org/abs/1512.03385, section 4.2; the data: Krizhevsky, 2009.
"""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d, cross_entropy, pad, relu

from podium.data.augment import CropAndFlip
from podium.data.base import ArrayDataset, Data, Dataset, Transform
from podium.data.cifar import cifar_files, read_cifar
from podium.data.joined import JoinedDataset
from podium.task import Task, accuracy
from podium.tasks.recipes import Sgd, cosine, need_data_dir


def cifar10_resnet20(
    *,
    data_dir: str | None = None,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 5e-4,
    batch_size: int = 64,
    epochs: int = 10,
    augment: bool = True,
) -> Task:
    """CIFAR-10 with ResNet-20 (about 270,000 parameters); `data_dir` holds data_batch_1.bin … and test_batch.bin."""
    folder = need_data_dir("cifar10-resnet20", data_dir, "data_batch_1.bin … data_batch_5.bin and test_batch.bin")
    return Task(
        name="cifar10-resnet20",
        model=ResNet20,
        data=partial(cifar10, folder, augment=augment),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay),
        schedule=cosine,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


class Block(nn.Module):
    """Two 3 × 3 convolutions and a shortcut without parameters (the paper's option A)."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.stride, self.new_channels = stride, channels - channels_in

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        if self.stride > 1:  # the new channels' shortcut is zero, half of them before the old ones and half after
            half = self.new_channels // 2
            x = pad(x[:, :, :: self.stride, :: self.stride], [0, 0, 0, 0, half, half])
        return relu(out + x)


class ResNet20(nn.Module):
    """One convolution, three stages of three blocks (16, 32, 64 channels), one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(16)
        widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
        self.blocks = nn.Sequential(*(Block(a, b, 1 if a == b else 2) for a, b in itertools.pairwise(widths)))
        self.head = nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(relu(self.norm(self.conv(x))))
        logits: Tensor = self.head(avg_pool2d(x, x.shape[-1]).flatten(1))
        return logits


def cifar10(folder: Path, *, augment: bool) -> Data:
    """Images as 3 × 32 × 32 numbers of about zero mean and unit variance; training images cropped and mirrored."""
    return Data(
        train=_open(folder, "train", CropAndFlip(padding=4) if augment else None), test=_open(folder, "test", None)
    )


def _open(folder: Path, split: str, augment: Transform | None) -> Dataset:
    parts = [ArrayDataset(*read_cifar(path), prepare=scale, augment=augment) for path in cifar_files(folder, split)]
    return parts[0] if len(parts) == 1 else JoinedDataset(parts)


def scale(pixels: Tensor) -> Tensor:
    """Bytes to numbers, by the training set's mean and deviation per channel."""
    mean = torch.tensor([0.4914, 0.4822, 0.4465])[:, None, None]
    deviation = torch.tensor([0.2470, 0.2435, 0.2616])[:, None, None]
    return pixels.to(torch.float32).div_(255).sub_(mean).div_(deviation)
