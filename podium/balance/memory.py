"""How many samples fit into a worker's memory at a time."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.worker import Worker


def most_samples(worker: Worker) -> int | None:
    """As many as the device's memory holds, by what passes have taken so far; None where there is no telling."""
    return None
