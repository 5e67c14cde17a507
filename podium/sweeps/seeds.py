"""Seeds of a trial: all generators that a model may draw from, set together and put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Let torch, Python and numpy draw from this seed inside, and leave their generators as they were."""
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
    """The generators of Python and numpy, which models now and then draw from."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
