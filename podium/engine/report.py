"""A worker's result."""

from __future__ import annotations

from typing import NamedTuple


class Report(NamedTuple):
    """A worker's result."""

    rank: int
    param_hash: str
    steps: int
    position: int
    stopped: bool
    loss: float | None
    metrics: dict[str, float]
