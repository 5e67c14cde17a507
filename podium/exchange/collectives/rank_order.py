"""Rank order: sums to the bits of shared memory, wherever the members run. `podium.comm.rank_order` states its cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

from podium.comm.moves import require_positive
from podium.comm.rank_order import SEGMENT_BYTES, Hosts, each_alone, sum_in_rank_order, uses_memory
from podium.comm.schedule import Chain
from podium.exchange.collectives.base import Collective, Scheduled

if TYPE_CHECKING:
    from podium.comm.base import Communicator


@final
@dataclass(frozen=True, kw_only=True)
class RankOrder(Scheduled):
    """Adds in rank order; in shared memory inside each host, where hosts are known."""

    name: ClassVar[str] = "rank-order"

    segment_bytes: int = SEGMENT_BYTES
    """The largest message."""

    def __post_init__(self) -> None:
        require_positive("rank-order", segment_bytes=self.segment_bytes)

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        return RankOrderByHost(hosts=comm.hosts, segment_bytes=self.segment_bytes) if comm.hosts else self

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        return sum_in_rank_order(index, each_alone(size), numel, itemsize, self.segment_bytes)


@final
@dataclass(frozen=True, kw_only=True)
class RankOrderByHost(Scheduled):
    """The same among members whose hosts are known."""

    name: ClassVar[str] = "rank-order"

    hosts: Hosts
    segment_bytes: int

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        return sum_in_rank_order(index, self.hosts, numel, itemsize, self.segment_bytes)

    def uses_memory(self, nbytes: int) -> bool:
        return uses_memory(self.hosts, nbytes)
