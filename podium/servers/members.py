"""Which workers take part in a server's present segment."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.comm.base import Message


class Members:
    """The workers of a segment, and what has become of each."""

    def __init__(self, workers: Iterable[int]) -> None:
        self.workers: tuple[int, ...] = tuple(workers)
        self.gone: set[int] = set()
        """Workers that have departed, in whichever segment."""
        self.serve_only: set[int] = set()
        """Workers that do not train."""
        self.left: dict[int, Message] = {}
        """Workers that have left and wait to be given the state, with their calls."""
        self.through: set[int] = set()
        """Workers that were given the state."""
        self._skipped: set[int] = set()
        self._broke: set[int] = set()

    def begin(self, workers: Iterable[int], serve_only: Iterable[int]) -> None:
        """A segment begins with these."""
        self.workers, self.serve_only = tuple(workers), set(serve_only)
        for former in (self.left, self.through, self._skipped, self._broke):
            former.clear()

    @property
    def present(self) -> list[int]:
        """Workers of this segment that are still there, and will take its result home."""
        return [w for w in self.workers if w not in self.gone and w not in self._skipped]

    @property
    def live(self) -> list[int]:
        """Those of the present workers that have not broken out of the segment."""
        return [w for w in self.present if w not in self._broke]

    @property
    def training(self) -> list[int]:
        """Those of the live workers that train."""
        return [w for w in self.live if w not in self.serve_only]

    @property
    def all_through(self) -> bool:
        return self.through >= set(self.present)

    @property
    def all_left(self) -> bool:
        """Whether some workers wait for the state, and nobody is missing any more."""
        return bool(self.left) and self.left.keys() | self.through >= set(self.present)

    @property
    def all_gone(self) -> bool:
        return self.gone >= set(self.workers)

    @property
    def silent(self) -> set[int]:
        """Workers that will not push in this segment any more."""
        return self.gone | self._skipped | self._broke | set(self.left) | self.through

    def replace(self, workers: Iterable[int]) -> None:
        """Between segments: these are left."""
        self.workers = tuple(workers)

    def train_all(self) -> None:
        """Nobody is left to train but those that only served."""
        self.serve_only.clear()

    def skip(self, worker: int, *, broke: bool) -> None:
        """A worker takes no part in this segment or, where it broke out of its loop, no part any more."""
        (self._broke if broke else self._skipped).add(worker)

    def leave(self, message: Message) -> None:
        self.left[message.source] = message

    def let_go(self) -> None:
        """All that have left are given the state."""
        self.through |= set(self.left)
        self.left.clear()

    def is_through(self, worker: int) -> None:
        """A worker has the state, from this server or from the lost server whose place it took."""
        self.through.add(worker)

    def depart(self, worker: int) -> None:
        """A worker is gone."""
        self.gone.add(worker)

    def forget(self, worker: int) -> bool:
        """Stop waiting for a worker that is gone; whether it was still needed: a worker that had left is not."""
        had_left = self.left.pop(worker, None) is not None
        return worker in self.workers and not had_left and worker not in self.through
