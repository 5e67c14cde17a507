"""The state of torch's random generators: the CPU's, and the GPU's where a rank computes on one."""

from __future__ import annotations

import torch
from torch import Tensor

State = tuple[Tensor, ...]
"""The CPU generator's state; behind it the GPU's, where there is one."""


def generator_state(device: torch.device) -> State:
    cpu = torch.get_rng_state()
    return (cpu, torch.cuda.get_rng_state(device)) if device.type == "cuda" else (cpu,)


def set_generator_state(state: State, device: torch.device) -> None:
    """Go on from `state`; one that was taken on a CPU leaves the GPU's generator as it is."""
    torch.set_rng_state(state[0])
    if device.type == "cuda" and len(state) > 1:
        torch.cuda.set_rng_state(state[1], device)
