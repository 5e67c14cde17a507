"""Tensors of one GPU in several processes, by the driver's own sharing (CUDA IPC), with handles as JSON.

A process describes its allocation (`describe`); another opens it once (`OpenedHandles`) and uses any part of it. The
allocation must stay alive: flat buffers do.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

_BYTES = "hex:"


def identity(device: torch.device) -> str:
    """The GPU's UUID: the same in all processes, whatever its index there."""
    return str(torch.cuda.get_device_properties(device).uuid)


class SharedHandles:
    """Descriptions of this process's own allocations, each made once."""

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
    found[0] = torch.cuda.current_device() if device.index is None else device.index  # this process's index of the GPU
    return found
