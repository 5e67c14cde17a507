"""Seeds of a trial: all generators that a model may draw from, set and restored together."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed the generators of torch, Python and numpy, and restore their states afterwards."""
    kept: Any = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        torch.default_generator.manual_seed(seed)
        if device is not None and device.type == "cuda":
            torch.cuda.manual_seed(seed)
        seed_others(seed)
        try:
            yield
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])


def seed_others(seed: int) -> None:
    """Seed the generators of Python and numpy, which some models draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
