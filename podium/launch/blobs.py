"""Bytes of files, as messages carry them."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

CHUNK_BYTES = 8 << 20
"""The most of a file that one message carries."""


def as_tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def as_bytes(body: Iterable[Tensor]) -> bytes:
    return b"".join(part.numpy().tobytes() for part in body)
