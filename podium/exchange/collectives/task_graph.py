"""Task graph: many small chunks, each with its own tasks: send it to its owner, sum it, return it.

Chunk c belongs to member c mod p. A task begins as soon as the tasks it depends on are done: a summed chunk is returned
while others are still on their way to their owners. So there is no barrier between the phases, and links and adders
work at the same time. A butterfly gives each member one share, sized by its bandwidth, and must know the links; here
chunks of a fixed size are assigned round-robin, and at the end members wait only for the last chunk.

n bytes, p members, chunks of c bytes, assigned round-robin:
2 alpha + 2(p-1)/p n beta + (p-2) c beta + (p-1) c gamma as long as adding is no slower than sending.

Only the owner adds to its chunk, in a fixed order that begins with its successor: all members end with the same bits,
the same every time. Collectives as pipelined tasks: Zhuang et al., 2021, arXiv:2002.05814.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from podium.comm.moves import fewer_parts, require_positive, spans, star
from podium.comm.schedule import Chain
from podium.exchange.collectives.base import Scheduled


@final
@dataclass(frozen=True, kw_only=True)
class TaskGraph(Scheduled):
    """Small chunks that are sent to their owners, summed and returned independently of each other."""

    name: ClassVar[str] = "task-graph"

    chunk_bytes: int = 256 << 10
    """The largest chunk."""
    least_bytes: int = 4096
    """Chunks are not made smaller than this to give each member the same number."""

    def __post_init__(self) -> None:
        require_positive("task-graph", chunk_bytes=self.chunk_bytes, least_bytes=self.least_bytes)

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if size == 1:
            return []
        chunks = spans(0, numel, self.chunks(size, numel, itemsize))
        return [star(index, size, c % size, span, rotated=True) for c, span in enumerate(chunks)]

    def chunks(self, size: int, numel: int, itemsize: int) -> int:
        """The number of chunks: rounded up to the same number per member where they stay large enough."""
        needed = max(1, -(-numel // max(1, self.chunk_bytes // itemsize)))
        alike = -(-needed // size) * size
        return max(needed, fewer_parts(alike, numel * itemsize, self.least_bytes))
