"""A number for the bits of a tensor."""

from __future__ import annotations

import torch
from torch import Tensor

_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_added_up(tensor: Tensor) -> int:
    """A checksum to compare two tensors of one shape and dtype; it does not detect a change of order."""
    found = tensor.detach().contiguous()
    found = torch.view_as_real(found.resolve_conj()) if found.is_complex() else found
    return int(found.view(_WORDS[found.element_size()]).sum()) if found.numel() else 0
