"""Records of a rank on another host: sent to the coordinator's run folder as they are written.

A rank writes its records to its own disk, line by line, as everywhere. Where the coordinator does not see that folder,
the rank's heartbeats carry what was written since the last one, in order, so the launcher's folder holds the records
of all ranks while the run is under way and when a rank is lost. Memory is bounded: the stream keeps offsets, no lines.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import final

CHUNK_BYTES = 1 << 18
BEAT_BYTES = 1 << 20
"""Most bytes per file with one heartbeat: a heartbeat must not wait long for a slow link."""


@final
class RecordStream:
    """What of some ranks' files was not sent yet."""

    def __init__(self, folder: Path, ranks: Iterable[int], send: Callable[[int, bytes], None]) -> None:
        """`send(rank, chunk)` appends to the rank's file at home. A rank's earlier lines in `folder` are not sent."""
        self._send, self._lock = send, threading.Lock()
        self._paths = {rank: folder / file_name(rank) for rank in ranks}
        self._sent = {rank: path.stat().st_size if path.exists() else 0 for rank, path in self._paths.items()}

    def send_new(self, most_bytes: int | None = BEAT_BYTES) -> None:
        """Send what was written since the last call; at most this much of each file, None: all of it."""
        with self._lock:  # heartbeats come from a thread, the rest of a finished run from the main one
            for rank, path in self._paths.items():
                self._send_file(rank, path, most_bytes)

    def _send_file(self, rank: int, path: Path, most_bytes: int | None) -> None:
        if not path.exists():  # not begun yet
            return
        until = self._sent[rank] + most_bytes if most_bytes is not None else None
        with path.open("rb") as file:
            file.seek(self._sent[rank])
            while until is None or self._sent[rank] < until:
                chunk = file.read(CHUNK_BYTES)
                if not chunk:
                    return
                self._send(rank, chunk)
                self._sent[rank] += len(chunk)


def file_name(rank: int) -> str:
    """The file of a rank's records in a run's folder `records`."""
    return f"rank-{rank}.jsonl"
