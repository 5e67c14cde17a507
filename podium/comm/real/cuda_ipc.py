"""Tensors of one GPU, seen by several processes: the driver's own sharing (CUDA IPC), spoken of in plain numbers.

A process says where its allocation is (`describe`); another opens it once (`OpenedHandles`) and looks at any part of
it. The allocation must stay: flat buffers do.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

_BYTES = "hex:"


def identity(device: torch.device) -> str:
    """Names the GPU itself, whatever number it has in this process."""
    return str(torch.cuda.get_device_properties(device).uuid)


class SharedHandles:
    """What this process has said of its own allocations, said once each."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}

    def describe(self, tensor: Tensor) -> str:
        """The allocation that this tensor lies in, as text; raises RuntimeError where it cannot be shared."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            facts = list(storage._share_cuda_())
            plain = [_BYTES + fact.hex() if isinstance(fact, bytes) else fact for fact in facts]
            self._known[storage.data_ptr()] = json.dumps(plain)
        return self._known[storage.data_ptr()]


class OpenedHandles:
    """Another process's allocations, opened here."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages: dict[str, Any] = {}

    def tensor(self, text: str, offset: int, dtype: torch.dtype, numel: int) -> Tensor:
        """Elements at an offset (in elements) of an allocation that was described."""
        storage = self._storages.get(text)
        if storage is None:
            storage = self._storages[text] = torch.UntypedStorage._new_shared_cuda(*_facts(text, self._device))
        return torch.empty(0, dtype=dtype, device=self._device).set_(storage, offset, (numel,), (1,))


def _facts(text: str, device: torch.device) -> list[Any]:
    facts = json.loads(text)
    if not isinstance(facts, list) or not facts:
        raise ValueError("an allocation must be described by a list")
    found: list[Any] = [
        bytes.fromhex(fact.removeprefix(_BYTES)) if isinstance(fact, str) and fact.startswith(_BYTES) else fact
        for fact in facts
    ]
    found[0] = torch.cuda.current_device() if device.index is None else device.index  # its own number for the same GPU
    return found
