"""The workers of a server's present segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.comm.base import Message


class Members:
    """The workers of a segment, and the status of each."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.workers: tuple[int, ...] = tuple(workers)
        self.gone: set[int] = set()
        """Workers that have departed, in any segment."""
        self.serve_only: set[int] = set()
        """Workers that do not train."""
        self.left: dict[int, Message] = {}
        """Workers that have left and wait for the state, with their calls."""
        self.through: set[int] = set()
        """Workers that were sent the state."""
        self._skipped: set[int] = set()
        self._broke: set[int] = set()

    def begin(self, workers: Iterable[int], serve_only: Iterable[int]) -> None:
        """A segment begins with these workers."""
        self.workers, self.serve_only = tuple(workers), set(serve_only)
        for former in (self.left, self.through, self._skipped, self._broke):
            former.clear()

    @property
    def present(self) -> list[int]:
        """Workers of this segment that have not departed, and will collect its result."""
        return [w for w in self.workers if w not in self.gone and w not in self._skipped]

    @property
    def live(self) -> list[int]:
        """Present workers that have not broken out of the segment."""
        return [w for w in self.present if w not in self._broke]

    @property
    def training(self) -> list[int]:
        """Live workers that train."""
        return [w for w in self.live if w not in self.serve_only]

    @property
    def all_through(self) -> bool:
        return self.through >= set(self.present)

    @property
    def all_left(self) -> bool:
        """Whether some workers wait for the state, and all other present workers have it."""
        return bool(self.left) and self.left.keys() | self.through >= set(self.present)

    @property
    def all_gone(self) -> bool:
        return self.gone >= set(self.workers)

    @property
    def silent(self) -> set[int]:
        """Workers that will not push again in this segment."""
        return self.gone | self._skipped | self._broke | set(self.left) | self.through

    def replace(self, workers: Iterable[int]) -> None:
        """Between segments: these workers remain."""
        self.workers = tuple(workers)

    def train_all(self) -> None:
        """Only serve-only workers are left: they train from now on."""
        self.serve_only.clear()

    def skip(self, worker: int, *, broke: bool) -> None:
        """A worker takes no part in this segment or, where it broke out of its loop, not in the rest of it."""
        (self._broke if broke else self._skipped).add(worker)

    def leave(self, message: Message) -> None:
        self.left[message.source] = message

    def let_go(self) -> None:
        """All workers that have left were sent the state."""
        self.through |= set(self.left)
        self.left.clear()

    def is_through(self, worker: int) -> None:
        """A worker has the state, from this server or from the lost server that it replaces."""
        self.through.add(worker)

    def depart(self, worker: int) -> None:
        self.gone.add(worker)

    def forget(self, worker: int) -> bool:
        """Stop waiting for a worker that is gone; returns whether it was still needed, as one that had left is not."""
        had_left = self.left.pop(worker, None) is not None
        return worker in self.workers and not had_left and worker not in self.through
