"""What a server records: the order of arrivals, by which a run can be replayed, and every update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from podium.servers.wire.messages import arrival_of

if TYPE_CHECKING:
    from podium.comm.base import Message
    from podium.comm.clocks import Clock
    from podium.records.recorder import Recorder


class ServerRecords:
    """One server's records."""

    def __init__(self, recorder: Recorder, clock: Clock) -> None:
        self._recorder, self._clock = recorder, clock
        self._fresh: set[tuple[int, int]] = set()  # (worker, unit) without a push since the last seed

    def begin(self, workers: Iterable[int], units: int) -> None:
        """A segment begins."""
        self._fresh = {(w, u) for w in workers for u in range(units)}

    def arrival(self, message: Message) -> None:
        """Record a message that decides the run's order; a push applied on arrival has only its update's record."""
        lease, part = arrival_of(message)
        self._write("arrival", source=message.source, what=message.kind, lease=lease, range=part)

    def update(self, version: int, worker: int, unit: int, staleness: int, lease: int, **more: Any) -> None:
        """One record per update, worker and range."""
        first = (worker, unit) in self._fresh
        self._write(
            "update",
            version=version,
            worker=worker,
            range=unit,
            staleness=staleness,
            lease=lease,
            first=first,
            **more,
        )
        if first:
            self._fresh.discard((worker, unit))

    def dropped(self, worker: int, lease: int, staleness: int) -> None:
        self._write("dropped", worker=worker, lease=lease, staleness=staleness)

    def lost(self, worker: int, leases: Sequence[int]) -> None:
        self._write("worker_lost", worker=worker, leases=leases)

    def lost_updates(self, unit: int, updates: int) -> None:
        """A restored server has learned how many of the lost server's updates it lacks."""
        self._write("lost_updates", range=unit, updates=updates)

    def restored(self, source: str, updates: int, recorded: Iterable[tuple[int, int]]) -> None:
        self._write("restored", source=source, updates=updates, recorded=sorted(recorded))

    def _write(self, kind: str, **facts: Any) -> None:
        self._recorder.write(kind, self._clock.now_ns(), **facts)
