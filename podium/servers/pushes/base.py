"""How pushes become updates: `immediate.py` applies each as it arrives, `gathered.py` makes updates of several.

Each unit of a slice is applied once: a unit that arrives again, because its worker or its server was lost in between,
is answered with the parameters and not applied a second time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from podium.servers.pushes.answers import PushRequest


class Waits(NamedTuple):
    """Waiting at a server's gate."""

    awaited: set[int]
    """Workers whose pushes other workers wait for."""
    waiting: set[int]
    """Workers that have pushed and wait for an answer."""


class PushPolicy(ABC):
    """Turns pushes into updates, for one segment."""

    # Called by the server.

    @abstractmethod
    def push(self, request: PushRequest) -> None:
        """One unit of one push has arrived."""

    @abstractmethod
    def hear(self, source: int, word: Any) -> None:
        """A message of another server, or of a worker that waits: Have, Decision, Norm, Hello, Pending."""

    @abstractmethod
    def lose(self, worker: int) -> None:
        """A worker is gone."""

    def leave(self, worker: int) -> None:
        """A worker has left this segment, and will not push again."""

    def settle(self) -> bool:
        """All workers have left: whether this server has made all its updates, so that its parameters are final."""
        return True

    @abstractmethod
    def waits(self) -> Waits: ...

    # Called by leases and copies.

    @abstractmethod
    def rest(self, workers: set[int]) -> None:
        """There is nothing left to lend to these workers: no worker must wait for their pushes."""

    @abstractmethod
    def wake(self, worker: int) -> None:
        """A worker that rested has a lease after all."""

    @abstractmethod
    def acknowledged(self) -> None:
        """A copy has caught up: pushes that waited for it may be answered."""

    def will_apply(self, lease: int) -> bool:
        """Whether the gradients of this lease wait here and will be applied."""
        return False
