"""Counters that workers of several processes draw from: in a file where they share one, else in the store."""

from __future__ import annotations

import fcntl
import os
import struct
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

from podium.comm.base import Counters
from podium.errors import Lost

_LOCKED_S = 20e-6
"""Pause before retrying a lock that is usually held for a few microseconds."""


class Counter(ABC):
    """Where the workers' counters are stored."""

    @abstractmethod
    def draw(self, generation: int, turn: int, count: int) -> int: ...

    @property
    def is_gone(self) -> bool:
        """Whether other workers can no longer find it."""
        return False

    def close(self) -> None:
        """Release its resources."""


@final
class FileCounter(Counter):
    """In a small file of a file system that all workers share, a few microseconds a draw.

    torch's file store could count too, but it would grow with every draw. The kernel releases the lock of a worker that
    is killed; one that is stopped while it holds the lock costs the other workers the deadline.
    """

    _ONE = struct.Struct("<qqq")  # generation, turn, value

    def __init__(self, path: Path, deadline_s: float) -> None:
        self._path, self._deadline_s = path, deadline_s
        self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)

    def draw(self, generation: int, turn: int, count: int) -> int:
        self._lock()
        try:
            kept = os.pread(self._file, self._ONE.size * Counters.KEPT, 0)
            counters = Counters({(g, t): value for g, t, value in self._ONE.iter_unpack(kept)})
            before = counters.draw(generation, turn, count)
            os.pwrite(self._file, b"".join(self._ONE.pack(*key, value) for key, value in counters.values.items()), 0)
            return before
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    @property
    def is_gone(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def _lock(self) -> None:
        until = time.monotonic() + self._deadline_s
        while True:
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    raise Lost(f"{self._path} was locked by another worker for {self._deadline_s:g} s") from None
            time.sleep(_LOCKED_S)

    def close(self) -> None:
        os.close(self._file)


@final
class StoreCounter(Counter):
    """In the workers' common store: a round trip to its host per draw, within the store's timeout."""

    def __init__(self, store: Any) -> None:
        self._store, self._known = store, Counters()

    def draw(self, generation: int, turn: int, count: int) -> int:
        before = set(self._known.values)
        self._known.draw(generation, turn, count)
        try:
            drawn = int(self._store.add(_key(generation, turn), count)) - count
            if drawn == 0:  # the first to draw deletes old keys
                for key in before - self._known.values.keys():
                    self._store.delete_key(_key(*key))
        except RuntimeError as error:  # torch's own are RuntimeErrors too
            raise Lost(f"the store with the counters is out of reach: {str(error).partition(chr(10))[0]}") from error
        return drawn


def _key(generation: int, turn: int) -> str:
    return f"draw-{generation}-{turn}"


def counter_of(store: Any, deadline_s: float) -> Counter:
    """Beside the store's file where it is a file, in the store where it is a service."""
    path = getattr(store, "path", None)
    return StoreCounter(store) if path is None else FileCounter(Path(f"{path}-counters"), deadline_s)
