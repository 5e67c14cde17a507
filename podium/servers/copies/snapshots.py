"""Snapshots of a server on disk, written by a thread every `every` updates.

Updates after the last snapshot are lost with the server, on its ranges only; the restored server records how many, by
the versions that workers have.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from podium.engine.files import bytes_to_tree, save_tree
from podium.errors import CheckpointError
from podium.servers.copies.server_state import FORMAT, state_of

if TYPE_CHECKING:
    from podium.servers.segment import Segment

_WRITE_S = 300.0
"""How long a snapshot may take to be written."""


class Snapshots:
    """Writes one server's snapshots, each over the previous one."""

    def __init__(self, rank: int, path: Path | None = None, every: int = 0) -> None:
        """`every`: updates between two snapshots; 0: none is written."""
        self._rank, self._path, self.every = rank, path, every if path is not None else 0
        self._writer: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._saved_at = 0

    def begin(self, segment: Segment) -> None:
        """A segment begins: returns once its first snapshot is written, before any worker is answered."""
        self.save(segment)
        self.wait()

    def moved(self, segment: Segment, unit: int) -> None:
        """A unit was moved. Snapshots only after the last unit of an update: before, units are of two versions."""
        is_last = self.every and unit == len(segment.store.shard.units) - 1
        if is_last and segment.store.updates - self._saved_at >= self.every:
            self.save(segment)

    def save(self, segment: Segment) -> None:
        """Write a snapshot in a thread, once the previous one is written."""
        if not self.every:
            return
        self.wait()
        self._saved_at = segment.store.updates
        state = state_of(segment)
        self._writer = threading.Thread(target=self._write, args=(self._path, state), name="snapshot", daemon=True)
        self._writer.start()

    def _write(self, path: Path, state: Mapping[str, Any]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            save_tree(path, state, durable=False)  # for a lost process: a lost machine ends the run anyway
        except (OSError, CheckpointError) as error:
            self._trouble = error

    def wait(self) -> None:
        """Return once the last snapshot is written."""
        if self._writer is not None:
            self._writer.join(_WRITE_S)
            if self._writer.is_alive():
                raise CheckpointError(
                    f"server {self._rank}: its snapshot was not written in {_WRITE_S:g} s; is the disk stuck?"
                )
            self._writer = None
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise CheckpointError(f"server {self._rank}: its snapshot could not be written: {trouble}")

    def read(self) -> Any | None:
        """The lost server's snapshot, if there is one of this format."""
        if self._path is None or not self._path.exists():
            return None
        # Mapped, so that the whole file is not read into memory before its tensors are copied.
        data = np.memmap(self._path, dtype=np.uint8, mode="r").data if self._path.stat().st_size else b""
        state = bytes_to_tree(data, str(self._path))
        return state if state.get("format") == FORMAT else None

    def restored(self, updates: int) -> None:
        """The server was restored with this many updates."""
        self._saved_at = updates
