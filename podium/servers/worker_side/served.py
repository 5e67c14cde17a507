"""What a worker knows of its servers: how the parameters are laid out on them, and the versions that the worker has.

`seeding.py`, `pushing.py` and `collecting.py` send a worker's messages to servers, under any strategy; `server.py` is
the other side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podium.errors import ConfigError
from podium.exchange.spans import span_of
from podium.servers.ranges import Layout, lay_out

if TYPE_CHECKING:
    from podium.engine.worker import Worker
    from podium.exchange.codecs.base import Span

UNIT_BYTES, SHARED_UNIT_BYTES = 8 << 20, 32 << 20
"""Bytes of one message: over a network, and in shared memory."""
_ROOM = 4
"""How many times larger than its elements a unit may be on the wire: as rows and their numbers, or badly packed."""


@dataclass
class Served:
    """What a worker knows of its servers, for one segment."""

    layouts: list[Layout]  # by server
    versions: list[list[int]]  # of the parameters this worker holds, by server and unit
    spans: list[list[Span]]  # of each server's ranges, for a codec

    @property
    def units(self) -> list[tuple[int, int]]:
        """All (server, unit)."""
        return [(m, u) for m, layout in enumerate(self.layouts) for u in range(len(layout.units))]


def unit_bytes_for(worker: Worker) -> int:
    """Default bytes of one message, where the strategy sets none."""
    most = SHARED_UNIT_BYTES if worker.comm.shares_memory else UNIT_BYTES
    return most if worker.comm.message_bytes is None else min(most, max(1, worker.comm.message_bytes // _ROOM))


def _check_units(worker: Worker, layouts: Sequence[Layout]) -> None:
    """Raise, before training, where a unit would not fit into a message."""
    limit = worker.comm.message_bytes
    if limit is None:
        return
    for layout in layouts:
        for unit in layout.units:
            ranges = unit.of(layout.ranges)
            size = sum(r.of(worker.params).nbytes for r in ranges)
            if size * _ROOM > limit:
                name = worker.flat.pieces[ranges[0].parts[0].piece].name
                raise ConfigError(
                    f"parameter servers: a unit must be at most {limit // _ROOM} bytes (a quarter of the largest "
                    f"message, so that it also fits when a codec packs it badly), got {size} (from {name} on); set a "
                    "smaller unit_bytes"
                )


def meet(worker: Worker, unit_bytes: int, weights: Sequence[float] | None = None) -> Served:
    """Lay the parameters out on the servers, equally or by weights, for a new segment. Sends nothing."""
    layouts = lay_out(worker.flat, len(worker.comm.servers), unit_bytes, weights)
    _check_units(worker, layouts)
    versions = [[0] * len(layout.units) for layout in layouts]
    worker.sender.memory.forget()
    worker.leases.clear()
    worker.progress.name_segment(worker.comm.generation)
    return Served(layouts, versions, [[span_of(worker.flat, r) for r in layout.ranges] for layout in layouts])
