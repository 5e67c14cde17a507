"""Hierarchical: sum inside each group, then across the groups, then broadcast inside.

Groups of equal size g, m of them: member j of each group sums the j-th shard of its group, the members j of all groups
sum their shard around a ring, and each sends the result to its group. n bytes:
2 (alpha + (g-1)/g n beta) + (g-1)/g n gamma inside, 2(m-1) (alpha + n/(g m) beta) + (m-1)/(g m) n gamma across.
Only 2(m-1)/m n bytes leave a group and as many come in, whatever its size. Inside a group, members that wait until the
first shard is sent wait (g-2) s beta, for segments of s bytes.

Groups of unequal size: the first member of each group leads it, sums all of it, and takes part in a ring of leaders:
2 (alpha + (g-1) n beta) + (g-1) n gamma for the largest group, and 2(m-1) (alpha + n/m beta) across.

Where the launcher knows the hosts, the groups are the hosts unless others are given, and nothing is sent inside a
group: for each segment one member sums its host's tensors, takes part in the ring of hosts, and writes the sum into
them. Hosts may then have any number of members.

Worth it where links inside a group are faster than between groups. Jia et al., 2018, arXiv:1807.11205.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, final

from podium.comm.moves import (
    Span,
    in_turn,
    require_permutation,
    require_positive,
    ring_inside,
    segments,
)
from podium.comm.rank_order import cut_alike
from podium.comm.schedule import Chain, Move, element_cuts
from podium.errors import ConfigError
from podium.exchange.collectives.base import Collective, Scheduled

if TYPE_CHECKING:
    from podium.comm.base import Communicator

Groups = tuple[tuple[int, ...], ...]


@final
@dataclass(frozen=True, kw_only=True)
class Hierarchical(Scheduled):
    """Two levels: inside groups and across them."""

    name: ClassVar[str] = "hierarchical"

    groups: tuple[tuple[int, ...], ...] | None = None
    """The members of each group; the first of each leads it where sizes differ."""
    group_size: int | None = None
    """Consecutive members per group; by host, or the divisor of their number nearest to its square root, when not
    given."""
    segment_bytes: int = 1 << 20
    """The largest message inside a group; across, messages are smaller by the number of groups."""

    def __post_init__(self) -> None:
        require_positive("hierarchical", segment_bytes=self.segment_bytes)
        if self.group_size is not None:
            require_positive("hierarchical", group_size=self.group_size)
        if self.groups is None:
            return
        if self.group_size is not None:
            raise ConfigError("hierarchical: give groups or group_size, got both")
        if not all(self.groups):
            raise ConfigError(f"hierarchical: each group must have members, got {self.groups}")
        members = [member for group in self.groups for member in group]
        require_permutation("hierarchical", "groups", members, len(members))

    def groups_of(self, size: int) -> Groups:
        """The members of each group."""
        if self.groups is not None:
            require_permutation("hierarchical", "groups", [member for g in self.groups for member in g], size)
            return self.groups
        step = self.group_size or nearest_divisor(size)
        return tuple(tuple(range(first, min(first + step, size))) for first in range(0, size, step))

    def prepare(self, comm: Communicator) -> Collective:
        comm.meet()
        if comm.generation == 0 and self.groups is not None:
            require_permutation(self.name, "groups", [member for group in self.groups for member in group], comm.size)
        if comm.generation == 0 and (self.group_size or 0) > comm.size:
            raise ConfigError(
                f"hierarchical: group_size must be at most the number of workers, {comm.size}, got {self.group_size}"
            )
        fits = self.groups is None or sum(map(len, self.groups)) == comm.size
        found = self if fits else replace(self, groups=None)  # some of the named members were lost
        if found.groups is None and found.group_size is None and comm.hosts:
            return ByHost(hosts=comm.hosts, segment_bytes=self.segment_bytes)
        return found

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        groups = self.groups_of(size)
        if size == 1:
            return []
        alike = len({len(group) for group in groups}) == 1
        cuts = element_cuts(numel, len(groups[0]) if alike else 1)
        cut = [
            [(place, span) for span in segments(cuts[place], cuts[place + 1], itemsize, self.segment_bytes)]
            for place in range(len(cuts) - 1)
        ]
        return [_two_levels(index, groups, place, span) for place, span in in_turn(cut)]


@final
@dataclass(frozen=True, kw_only=True)
class ByHost(Scheduled):
    """Inside hosts in shared memory, and around a ring of hosts."""

    name: ClassVar[str] = "hierarchical"

    hosts: Groups
    segment_bytes: int

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if size == 1 or numel == 0:
            return []
        cut = cut_alike(numel, itemsize, self.segment_bytes, max(map(len, self.hosts)))
        return [_by_host(index, self.hosts, n, span) for n, span in enumerate(cut)]

    def uses_memory(self, nbytes: int) -> bool:
        return any(len(host) > 1 for host in self.hosts)


def nearest_divisor(size: int) -> int:
    """The divisor nearest to the square root; of two equally near, the smaller."""
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - math.sqrt(size)))


def _two_levels(index: int, groups: Groups, place: int, span: Span) -> Chain:
    """Member `place` of each group sums this segment for its group."""
    mine = next(g for g, group in enumerate(groups) if index in group)
    heads = [group[place] for group in groups]
    last_round = 1 + 2 * (len(groups) - 1)
    if index != heads[mine]:
        return [Move("send", heads[mine], 0, *span), Move("put", heads[mine], last_round, *span)]
    others = [member for member in groups[mine] if member != index]
    gathered = [Move("add", peer, 0, *span) for peer in others]
    return gathered + ring_inside(mine, heads, span, 1) + [Move("send", peer, last_round, *span) for peer in others]


def _by_host(index: int, groups: Groups, n: int, span: Span) -> Chain:
    """In each group member n, counted round its members, sums this segment for its group."""
    mine = next(g for g, group in enumerate(groups) if index in group)
    heads = [group[n % len(group)] for group in groups]
    if index != heads[mine]:
        return []
    around = ring_inside(mine, heads, span, 0)
    if len(groups[mine]) == 1:
        return around
    own, others = (index,), tuple(member for member in groups[mine] if member != index)
    summed = [Move("fold", index, 0, *span, groups[mine]), Move("share", index, 0, *span, own)]
    return [*summed, *around, Move("share", index, 0, *span, others)]
