"""Reduce to one: all members send to the root, which sums in member order and sends the sum back.

n bytes, p members: 2 alpha + 2(p-1) n beta + (p-1) n gamma, all of it at the root's link. For two or three members, for
a few bytes, and as the simplest baseline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

from podium.comm.moves import require_positive, segments, star
from podium.comm.schedule import Chain
from podium.errors import ConfigError
from podium.exchange.collectives.base import Collective, Scheduled

if TYPE_CHECKING:
    from podium.comm.base import Communicator


@final
@dataclass(frozen=True, kw_only=True)
class ReduceToOne(Scheduled):
    """One member sums for all."""

    name: ClassVar[str] = "reduce-to-one"

    root: int = 0
    """The member that sums."""
    segment_bytes: int = 1 << 20
    """The largest message."""

    def __post_init__(self) -> None:
        require_positive("reduce-to-one", segment_bytes=self.segment_bytes)
        if self.root < 0:
            raise ConfigError(f"reduce-to-one: root must not be negative, got {self.root}")

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        if comm.generation == 0 and self.root >= comm.size:
            raise ConfigError(f"reduce-to-one: root must be one of the workers 0 to {comm.size - 1}, got {self.root}")
        return self if self.root < comm.size else replace(self, root=0)  # the root may have been lost

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if self.root >= size:
            raise ConfigError(f"reduce-to-one: root must be one of the members 0 to {size - 1}, got {self.root}")
        if size == 1:
            return []
        return [star(index, size, self.root, span) for span in segments(0, numel, itemsize, self.segment_bytes)]
