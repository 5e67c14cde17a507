"""Ring: each chunk travels around the ring once to be summed and once to be distributed.

n bytes, p members: 2(p-1) alpha + 2(p-1)/p n beta + (p-1)/p n gamma, where gamma is the time to add a byte. No
algorithm sends less; the latency grows with p. A chunk travels in k segments, each a chain of its own, so that one is
added while the next is on the wire: of transfers and additions the longer one and 1/k of the other remain.

Patarasuk and Yuan, 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

from podium.comm.moves import (
    Span,
    fewer_parts,
    in_turn,
    require_permutation,
    require_positive,
    segments,
    spans,
)
from podium.comm.schedule import Chain, Move
from podium.errors import ConfigError
from podium.exchange.collectives.base import Collective, Scheduled
from podium.exchange.collectives.links import measure
from podium.exchange.collectives.order import best_ring

if TYPE_CHECKING:
    from podium.comm.base import Communicator


@final
@dataclass(frozen=True, kw_only=True)
class Ring(Scheduled):
    """Reduce-scatter and all-gather around a ring."""

    name: ClassVar[str] = "ring"

    segment_bytes: int = 1 << 20
    """The largest message."""
    least_bytes: int = 4096
    """Smallest chunk: a small tensor is cut into fewer chunks than there are members."""
    order: tuple[int, ...] | None = None
    """The members in the order in which the ring visits them; by rank when not given."""
    measure: bool = False
    """Measure the links and take the best order for them. A repeated run may measure another order and round so."""

    def __post_init__(self) -> None:
        require_positive("ring", segment_bytes=self.segment_bytes, least_bytes=self.least_bytes)
        if self.order is not None:
            require_permutation("ring", "order", self.order, len(self.order))

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        if comm.generation == 0 and self.order is not None:
            require_permutation(self.name, "order", self.order, comm.size)
        order = self.order if self.order is not None and len(self.order) == comm.size else None
        if order is None and self.measure and comm.size > 3:  # all rings of three are alike
            links = measure(comm)
            order = best_ring(links.large)
        return replace(self, order=order)

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if self.order is not None and len(self.order) != size:
            raise ConfigError(f"ring: order must name all {size} members, got {len(self.order)}")
        if size == 1:
            return []
        order = self.order or tuple(range(size))
        at = order.index(index)
        after, before = order[(at + 1) % size], order[(at - 1) % size]
        chunks = fewer_parts(size, numel * itemsize, self.least_bytes)
        cut = [
            [(c * size // chunks, segment) for segment in segments(*chunk, itemsize, self.segment_bytes)]
            for c, chunk in enumerate(spans(0, numel, chunks))
        ]
        return [_travel((at - first) % size, size, before, after, span) for first, span in in_turn(cut)]


def _travel(hop: int, size: int, before: int, after: int, span: Span) -> Chain:
    """The moves for a segment at the member `hop` places after the one where it starts."""
    moves = Chain()
    if hop > 0:
        moves.append(Move("add", before, hop - 1, *span))
    moves.append(Move("send", after, hop, *span))  # the last member to add is the first to distribute
    if hop < size - 1:
        moves.append(Move("put", before, size - 1 + hop, *span))
    if hop < size - 2:
        moves.append(Move("send", after, size + hop, *span))
    return moves
