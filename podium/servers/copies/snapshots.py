"""Snapshots of a server on disk, written beside its loop every `every` updates.

What came after the last snapshot is lost with the server, from its ranges only; the restored server says in its records
how many updates that were, as the workers know it.
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
    """Writes one server's snapshot, each over the one before."""

    def __init__(self, rank: int, path: Path | None = None, every: int = 0) -> None:
        """`every`: updates between two snapshots; 0: none is written."""
        self._rank, self._path, self.every = rank, path, every if path is not None else 0
        self._writer: threading.Thread | None = None
        self._trouble: Exception | None = None
        self._saved_at = 0

    def begin(self, segment: Segment) -> None:
        """A segment begins, and nobody is told so before there is a snapshot of it."""
        self.save(segment)
        self.wait()

    def moved(self, segment: Segment, unit: int) -> None:
        """A unit was moved. Before the last unit of an update, units are of two versions: no time for a snapshot."""
        is_last = self.every and unit == len(segment.store.shard.units) - 1
        if is_last and segment.store.updates - self._saved_at >= self.every:
            self.save(segment)

    def save(self, segment: Segment) -> None:
        """Write a snapshot beside the loop, once the one before is written."""
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
            save_tree(path, state, durable=False)  # against a lost process: a lost machine takes the run with it
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
        """The snapshot that the lost server has left, if there is one of this version."""
        if self._path is None or not self._path.exists():
            return None
        # Tensors are copied from the file, and not from memory that holds all of it.
        data = np.memmap(self._path, dtype=np.uint8, mode="r").data if self._path.stat().st_size else b""
        state = bytes_to_tree(data, str(self._path))
        return state if state.get("format") == FORMAT else None

    def restored(self, updates: int) -> None:
        """The server begins at this many updates."""
        self._saved_at = updates
