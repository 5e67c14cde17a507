"""What becomes of pushes: the part of a server that takes them in. `streams.py` and `gathers.py` are the two ways.

Each unit of a slice is applied once: one that comes again, since its worker or its server was lost in between, is
answered with the parameters and not applied a second time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from podium.comm.base import Message
from podium.servers.applied import Applied, span_of_lease

if TYPE_CHECKING:
    from podium.servers.server import Server


WISHES = 3
"""What workers may wish for with a push or a draw: to stop, to pause, to go on to the next phase."""


class Intake(ABC):
    """Takes pushes in."""

    def __init__(self, server: Server) -> None:
        self.server = server
        start = server.seed_meta.get("position", 0)
        self.once = [Applied(start) for _ in server.shard.units]
        """By unit: the samples that it was moved by."""

    @abstractmethod
    def push(self, message: Message) -> None:
        """One unit of one push has come."""

    @abstractmethod
    def rest(self, workers: set[int]) -> None:
        """There is nothing left to do for these: nobody shall wait for them."""

    @abstractmethod
    def wake(self, worker: int) -> None:
        """One that rested has something to do after all."""

    @abstractmethod
    def lose(self, worker: int) -> None:
        """A worker is gone."""

    def leave(self, worker: int) -> None:
        """A worker is through with this stretch, and will not push again."""

    @abstractmethod
    def awaited(self) -> set[int]:
        """Workers whose pushes others wait for."""

    @property
    @abstractmethod
    def waiting(self) -> set[int]:
        """Workers that have pushed and wait for an answer."""

    def hear(self, message: Message) -> None:
        """A word from another server."""

    def acknowledged(self) -> None:
        """A copy has caught up: what waited for it may be answered."""

    def counts(self, lease: int, samples: int) -> bool:
        """Whether the gradients of this lease are in the parameters, or will be."""
        return self.once[0].has(span_of_lease(lease, samples))

    @property
    def settled(self) -> bool:
        """Whether this server has done all that it was told to do, so that its parameters are the last."""
        return True

    def settle(self) -> None:
        """All workers are through: let the other servers know that there is nothing more to come."""
