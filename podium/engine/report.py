"""What a worker reports at its end."""

from __future__ import annotations

from typing import NamedTuple


class Report(NamedTuple):
    """What a worker came to."""

    rank: int
    param_hash: str
    steps: int
    position: int
    stopped: bool
    loss: float | None
    metrics: dict[str, float]
