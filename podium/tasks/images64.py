"""Images of 64 × 64 pixels in 200 classes, with ResNet-50 and EfficientNet-B0: models worth distributing.

Without `data_dir` there are `samples` synthetic images: a coarse pattern per class under noise, from a fixed seed. They
take as long to train on as TinyImageNet's; their accuracy means nothing.

The networks have the published layers, so for 1,000 classes the published number of parameters. Left out of
EfficientNet's recipe is stochastic depth, which has no parameters.

He et al., 2015, https://arxiv.org/abs/1512.03385; Tan and Le, 2019, https://arxiv.org/abs/1905.11946.

A *stand-in* has a model's parameters and almost none of its computation: for virtual time, where compute time is given
and only the traffic has to be real.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, relu, silu

from podium.data.augment import CropAndFlip
from podium.data.base import ArrayDataset, Data
from podium.data.tiny_imagenet import SHAPE, SIDE, scale, tiny_imagenet
from podium.errors import ConfigError, UnknownName
from podium.task import Task, accuracy
from podium.tasks.recipes import Sgd, cosine

CLASSES = 200


def tiny_imagenet_resnet50(
    *,
    data_dir: str | None = None,
    samples: int = 2000,
    width: int = 64,
    classes: int = CLASSES,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    batch_size: int = 32,
    epochs: int = 1,
    augment: bool = True,
) -> Task:
    """64 × 64 images in 200 classes with ResNet-50 (24 M parameters); `data_dir` in TinyImageNet's layout.

    Without `data_dir`, `samples` synthetic images. `width`: channels after the first convolution.
    """
    return Task(
        name="tiny-imagenet-resnet50",
        model=partial(ResNet50, classes, width),
        data=partial(images64, data_dir, samples=samples, augment=augment, classes=classes),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay),
        schedule=cosine,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
        eval_batch_size=100,
    )


def tiny_imagenet_efficientnet_b0(
    *,
    data_dir: str | None = None,
    samples: int = 2000,
    dropout: float = 0.2,
    classes: int = CLASSES,
    lr: float = 0.05,
    momentum: float = 0.9,
    weight_decay: float = 1e-5,
    batch_size: int = 32,
    epochs: int = 1,
    augment: bool = True,
) -> Task:
    """64 × 64 images in 200 classes with EfficientNet-B0 (4.3 M parameters); `data_dir` in TinyImageNet's layout.

    Without `data_dir`, `samples` synthetic images. `dropout`: rate before the last layer.
    """
    return Task(
        name="tiny-imagenet-efficientnet-b0",
        model=partial(EfficientNetB0, classes, dropout),
        data=partial(images64, data_dir, samples=samples, augment=augment, classes=classes),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum, weight_decay=weight_decay),
        schedule=cosine,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
        eval_batch_size=100,
    )


def stand_in(
    *,
    model: str = "resnet50",
    samples: int = 2000,
    width: int = 64,
    classes: int = CLASSES,
    lr: float = 0.05,
    momentum: float = 0.9,
    batch_size: int = 32,
    epochs: int = 1,
) -> Task:
    """The parameters of `resnet50` or `efficientnet-b0` and almost none of the computation, for virtual time.

    A step sends what the real model would send; the cluster file must give the time of a pass (`seconds_per_sample`,
    `seconds_per_step`). `width` is that of ResNet-50.
    """
    makers: dict[str, Callable[[], nn.Module]] = {
        "resnet50": partial(ResNet50, classes, width),
        "efficientnet-b0": partial(EfficientNetB0, classes, 0.0),
    }
    if model not in makers:
        raise UnknownName("model with a stand-in", model, makers)
    return Task(
        name=f"stand-in-{model}",
        model=partial(StandIn.of, makers[model], classes),
        data=partial(labels_only, samples, classes),
        loss=cross_entropy,
        optimizer=Sgd(lr=lr, momentum=momentum),
        schedule=cosine,
        metrics={"accuracy": accuracy},
        batch_size=batch_size,
        epochs=epochs,
    )


# ResNet-50.


class Bottleneck(nn.Module):
    """1 × 1, 3 × 3 and 1 × 1 convolutions beside a shortcut; the 3 × 3 one strides, and the last is four times as wide.

    The paper strides in the first convolution; most implementations since do so in the second. Parameters are the same.
    """

    def __init__(self, channels_in: int, width: int, stride: int) -> None:
        super().__init__()
        out = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(out)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or channels_in != out:
            self.shortcut = nn.Sequential(nn.Conv2d(channels_in, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.norm1(self.conv1(x)))
        out = relu(self.norm2(self.conv2(out)))
        return relu(self.norm3(self.conv3(out)) + self.shortcut(x))


@final
class ResNet50(nn.Module):
    """A 7 × 7 convolution, a pool, 3 + 4 + 6 + 3 bottlenecks, one linear layer."""

    def __init__(self, classes: int = CLASSES, width: int = 64) -> None:
        super().__init__()
        if width < 1 or classes < 1:
            raise ConfigError(f"ResNet-50: width and classes must be at least 1, got {width} and {classes}")
        self.conv = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        blocks, channels = list[nn.Module](), width
        for stage, count in enumerate((3, 4, 6, 3)):
            inner = width << stage
            for place in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if stage and not place else 1))
                channels = 4 * inner
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(relu(self.norm(self.conv(x)))))
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


# EfficientNet-B0.

_STAGES = (
    # times wider inside, kernel, stride, channels, blocks
    (1, 3, 1, 16, 1),
    (6, 3, 2, 24, 2),
    (6, 5, 2, 40, 2),
    (6, 3, 2, 80, 3),
    (6, 5, 1, 112, 3),
    (6, 5, 2, 192, 4),
    (6, 3, 1, 320, 1),
)
"""Table 1 of the paper, between the first convolution and the last."""


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01)


class Gate(nn.Module):
    """Squeeze and excitation: scales each channel by a function of all channels' means."""

    def __init__(self, channels: int, squeezed: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels, squeezed, 1)
        self.excite = nn.Conv2d(squeezed, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.excite(silu(self.squeeze(x.mean((2, 3), keepdim=True)))))


class InvertedBottleneck(nn.Module):
    """Widen, convolve depthwise, gate, narrow; with a shortcut where shapes allow."""

    def __init__(self, channels_in: int, channels: int, wider: int, kernel: int, stride: int) -> None:
        super().__init__()
        inner = channels_in * wider
        widen = [nn.Conv2d(channels_in, inner, 1, bias=False), _norm(inner), nn.SiLU()] if wider > 1 else []
        self.layers = nn.Sequential(
            *widen,
            nn.Conv2d(inner, inner, kernel, stride, padding=kernel // 2, groups=inner, bias=False),
            _norm(inner),
            nn.SiLU(),
            Gate(inner, max(1, channels_in // 4)),
            nn.Conv2d(inner, channels, 1, bias=False),
            _norm(channels),
        )
        self.has_shortcut = stride == 1 and channels_in == channels

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out + x if self.has_shortcut else out


@final
class EfficientNetB0(nn.Module):
    """A 3 × 3 convolution, 16 inverted bottlenecks in seven stages, a 1 × 1 convolution, one linear layer."""

    def __init__(self, classes: int = CLASSES, dropout: float = 0.2) -> None:
        super().__init__()
        if classes < 1 or not 0 <= dropout < 1:
            raise ConfigError(
                f"EfficientNet-B0: classes must be at least 1 and dropout from 0 up to but not 1, got {classes} and "
                f"{dropout}"
            )
        layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, 2, padding=1, bias=False), _norm(32), nn.SiLU()]
        before = 32
        for wider, kernel, stride, channels, count in _STAGES:
            for place in range(count):
                layers.append(InvertedBottleneck(before, channels, wider, kernel, 1 if place else stride))
                before = channels
        layers += [nn.Conv2d(before, 1280, 1, bias=False), _norm(1280), nn.SiLU()]
        self.layers = nn.Sequential(*layers)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(1280, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.head(self.dropout(self.layers(x).mean((2, 3))))
        return logits


# Stand-ins.


@final
class StandIn(nn.Module):
    """A model's parameters and buffers under their own names; a pass reads every parameter once and ignores its inputs.

    Gradients become ready in the real model's order, the last layer's first, and are small: nothing diverges.
    """

    def __init__(self, model: nn.Module, classes: int) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self.classes = classes

    @staticmethod
    def of(make: Callable[[], nn.Module], classes: int) -> StandIn:
        return StandIn(make(), classes)

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.stack([p.mean() for p in self.parameters()]).mean()
        first = torch.zeros(self.classes).index_fill(0, torch.tensor(0), 1.0)
        return (first * mean).expand(len(x), -1)


def labels_only(samples: int, classes: int) -> Data:
    """Labels from a fixed seed, and zeros as inputs."""
    if samples < 5:
        raise ConfigError(f"stand-in: samples must be at least 5, got {samples}")
    draw = np.random.Generator(np.random.Philox(key=64))

    def some(count: int) -> ArrayDataset:
        return ArrayDataset(torch.zeros(count, 1), torch.from_numpy(draw.integers(classes, size=count)))

    return Data(train=some(samples), test=some(5))


# Images.


def images64(data_dir: str | None, *, samples: int, augment: bool, classes: int = CLASSES) -> Data:
    """TinyImageNet from a folder, or synthetic images where none is given; training images cropped and mirrored."""
    transform = CropAndFlip(padding=8) if augment else None
    if data_dir is not None:
        return tiny_imagenet(Path(data_dir), augment=transform, classes=classes)
    if samples < 5:
        raise ConfigError(f"64 × 64 images: samples must be at least 5, got {samples}")
    draw = np.random.Generator(np.random.Philox(key=200))
    coarse = draw.integers(48, 208, size=(classes, 3, 8, 8), dtype=np.uint8)

    def some(count: int) -> tuple[np.ndarray, np.ndarray]:
        labels = draw.integers(classes, size=count)
        patterns = coarse[labels].repeat(SIDE // 8, axis=2).repeat(SIDE // 8, axis=3)
        return patterns + draw.integers(0, 48, size=(count, *SHAPE), dtype=np.uint8), labels

    return Data(
        train=ArrayDataset(*some(samples), prepare=scale, augment=transform),
        test=ArrayDataset(*some(max(1, samples // 5)), prepare=scale),
    )
