"""The data of a sweep: one copy on the device for all its trials.

A fold is a set of indices, an order is a permutation: neither needs a copy of the samples. Data that cannot be two
tensors on the device (nested inputs, augmentation that needs the host, more than fits) are gathered by the host, batch
by batch. That works for trials that are trained alone; a fused array raises on such data.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from podium.data.base import ArrayDataset, Data, Dataset
from podium.data.joined import JoinedDataset
from podium.engine.device import to_device

_SHARE_OF_MEMORY = 0.5
_CHUNK = 4096


class DeviceDataset:
    """Batches of one data set by index, from the device if the data fit there, else gathered by the host."""

    def __init__(self, dataset: Dataset, device: torch.device, dtype: torch.dtype) -> None:
        self.dataset, self.device, self.dtype = dataset, device, dtype
        self.inputs: Tensor | None = None
        self.targets: Tensor | None = None
        self.augment: Any = None
        self.why_not = _why_not(dataset, device)
        """Why the data are not on the device; empty when they are."""
        if not self.why_not:
            self._load()

    def batch(self, index: Tensor, keys: Tensor | None) -> tuple[Any, Any]:
        """Inputs and targets of these samples, shaped as `index` is; augmented where there are keys.

        `index` and `keys` must be on `index_device`: the data's device, or the CPU where the host gathers.
        """
        if self.inputs is None or self.targets is None:
            bits = None if keys is None else keys.numpy().view(np.uint64)
            inputs, targets = self._float(self.dataset.gather(index.numpy(), bits))
            return to_device(inputs, self.device), to_device(targets, self.device)
        flat = index.reshape(-1)
        inputs, targets = self._float((self.inputs.index_select(0, flat), self.targets.index_select(0, flat)))
        if self.augment is not None and keys is not None:
            inputs = self.augment.on_device(inputs, keys.reshape(-1))
        return inputs.view(*index.shape, *inputs.shape[1:]), targets.view(*index.shape, *targets.shape[1:])

    def converted(self, dtype: torch.dtype) -> DeviceDataset:
        """The same samples, converted batch by batch to another precision; nothing is copied."""
        other = copy.copy(self)
        other.dtype = dtype
        return other

    @property
    def index_device(self) -> torch.device:
        return self.device if self.inputs is not None else torch.device("cpu")

    def _load(self) -> None:
        parts = []
        for start in range(0, len(self.dataset), _CHUNK):
            index = np.arange(start, min(start + _CHUNK, len(self.dataset)))
            inputs, targets = self._float(self.dataset.gather(index))
            if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
                self.why_not = f"inputs and targets must be tensors, got {type(inputs).__name__}"
                return
            parts.append((inputs.to(self.device), targets.to(self.device)))
        self.inputs, self.targets = (torch.cat(column) for column in zip(*parts, strict=True))
        self.augment = _augment(self.dataset)

    def _float(self, batch: tuple[Any, Any]) -> tuple[Any, Any]:
        """Floating point tensors converted to `dtype`, unless that is float32."""
        if self.dtype == torch.float32:
            return batch
        inputs, targets = (x.to(self.dtype) if isinstance(x, Tensor) and x.is_floating_point() else x for x in batch)
        return inputs, targets


class DeviceData:
    """Training and test data of one task."""

    def __init__(self, data: Data, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.train, self.test = (DeviceDataset(part, device, dtype) for part in (data.train, data.test))

    def converted(self, dtype: torch.dtype) -> DeviceData:
        """The same data in another precision; nothing is copied."""
        other = copy.copy(self)
        other.train, other.test = self.train.converted(dtype), self.test.converted(dtype)
        return other


def _why_not(dataset: Dataset, device: torch.device) -> str:
    parts = dataset.parts if isinstance(dataset, JoinedDataset) else [dataset]
    if not all(isinstance(part, ArrayDataset) for part in parts):
        return f"a {type(dataset).__name__} makes its samples on the host, each time anew"
    transforms = {getattr(part, "augment", None) for part in parts}
    if len(transforms) > 1:
        return "its parts are augmented differently"
    (augment,) = transforms
    if augment is not None and not hasattr(augment, "on_device"):
        return f"{type(augment).__name__} augments on the host: it has no method on_device(inputs, keys)"
    inputs, targets = dataset.gather(np.zeros(1, dtype=np.int64))
    if not isinstance(inputs, Tensor) or not isinstance(targets, Tensor):
        return f"inputs and targets must be tensors, got {type(inputs).__name__} and {type(targets).__name__}"
    needed = len(dataset) * (inputs.nbytes + targets.nbytes)
    if needed > _SHARE_OF_MEMORY * _free_bytes(device):
        return f"it takes {needed / 2**30:.1f} GiB, more than half of what is free on {device}"
    return ""


def _augment(dataset: Dataset) -> Any:
    part = dataset.parts[0] if isinstance(dataset, JoinedDataset) else dataset
    return getattr(part, "augment", None)


def _free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with open("/proc/meminfo", encoding="ascii") as file:
        facts = dict(line.split(":", 1) for line in file)
    return int(facts["MemAvailable"].split()[0]) * 1024
