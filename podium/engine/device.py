"""The device of a rank, and moving tensors to it."""

from __future__ import annotations

from typing import Any

import torch

from podium.config import devices_in
from podium.engine.pytree import map_tensors
from podium.errors import ConfigError


def device_of(
    setting: str, rank: int, first: int = 0, *, nth: int | None = None, most: int | None = None
) -> torch.device:
    """The device of a rank, by the run's `device`; ranks of one node on `cuda` take its GPUs round-robin.

    `first`: the lowest rank of this node. `nth`: this worker's place among those of its node, where their ranks do not
    follow one another. `most`: how many of the node's GPUs are used; None: all.
    """
    names = devices_in(setting)
    name = names[rank % len(names)]
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = count if most is None else min(count, most)
    if name == "cpu" or (name == "auto" and count == 0):
        return torch.device("cpu")
    if count == 0:
        seen = "the host's entry says gpus=0" if most == 0 else "PyTorch sees no GPU here"
        raise ConfigError(f"device={setting}: {seen}; use device=cpu or device=auto")
    if ":" not in name:
        if nth is None:
            nth = [names[other % len(names)] for other in range(first, rank)].count(name)
        return torch.device("cuda", nth % count)
    number = int(name.partition(":")[2])
    if number >= count:
        raise ConfigError(f"device={setting}: PyTorch sees {count} GPUs here, numbered from 0, got {name}")
    return torch.device("cuda", number)


def to_device(value: Any, device: torch.device) -> Any:
    """Every tensor of a nest, on this device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)
