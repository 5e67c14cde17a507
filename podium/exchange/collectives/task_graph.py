"""Task graph: many small chunks, each with tasks of its own: bring it to its owner, add it up, return it.

Chunk c belongs to member c mod p. A task begins as soon as those it depends on are done: a chunk that is complete goes
back while others are still on their way. So there is no barrier between the phases, and wires and adders work at the
same time. A butterfly gives each member one share, as large as its link is fast, and needs to know the links; here
pieces of a fixed size are dealt out in turn, and what anyone waits for in the end is the last piece.

n bytes, p members, chunks of c bytes, each owned by one of p in turn:
2 alpha + 2(p-1)/p n beta + (p-2) c beta + (p-1) c gamma as long as adding is no slower than sending.

Only the owner adds to its chunk, from its successor on, in an order that is fixed: all end with the same bits, the same
every time. Collectives as pipelined tasks: Zhuang et al., 2021, arXiv:2002.05814.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.comm.schedule import Chain
from podium.exchange.collectives.base import Scheduled
from podium.exchange.collectives.moves import fewer_parts, require_positive, spans, star


@final
@dataclass(frozen=True, kw_only=True)
class TaskGraph(Scheduled):
    """Chunks that are brought together, added and returned, each at its own pace."""

    name: ClassVar[str] = "task-graph"

    chunk_bytes: int = 256 << 10
    """The largest chunk."""
    least_bytes: int = 4096
    """Chunks are not made smaller than this for the sake of giving each member as many."""

    def __post_init__(self) -> None:
        require_positive("task-graph", chunk_bytes=self.chunk_bytes, least_bytes=self.least_bytes)

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if size == 1:
            return []
        chunks = spans(0, numel, self.chunks(size, numel, itemsize))
        return [star(index, size, c % size, span, rotated=True) for c, span in enumerate(chunks)]

    def chunks(self, size: int, numel: int, itemsize: int) -> int:
        """As many as are needed, and as many for each member where that leaves them large enough."""
        needed = max(1, -(-numel // max(1, self.chunk_bytes // itemsize)))
        alike = -(-needed // size) * size
        return max(needed, fewer_parts(alike, numel * itemsize, self.least_bytes))
