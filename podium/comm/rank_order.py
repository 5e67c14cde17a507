"""Sums in rank order: ((x0 + x1) + x2) + …, to the bits of the sum in shared memory, whatever hosts the members are on.

Floats do not add alike in another order, so any other sum over three or more members depends on where they run. With
this one, the same run gives the same parameters on one host and on many.

n bytes, p members, and hosts whose members read and write each other's tensors:

    small tensors     all send to the first member, which adds in order and returns the sum: 2 alpha + 2(p-1) n beta
    a member a host   segments have owners; each member sends its elements to their owners, which add in order and
                      return the sum: 2 alpha + 2(p-1)/p n beta + (p-1)/p n gamma, as a ring does
    otherwise         a segment visits the hosts in rank order. At each, one member adds the elements of all members
                      of that host to what has come; the last host has the sum, and it goes back the same way: 2(m-1)
                      alpha + 2 n beta for m hosts (n beta for two, since the two directions overlap) + n gamma

Between two hosts the last is as little as any algorithm can send. Between more, the hosts in the middle send 2 n, and
a ring of hosts (`hierarchical`) 2(m-1)/m n. Sums inside a later host cannot be made before what comes is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from podium.comm.moves import Span, fewer_parts, segments, spans
from podium.comm.schedule import Chain, Move

SEGMENT_BYTES = 4 << 20
"""The largest message; half of it where segments visit hosts. Each costs about 0.1 ms on both sides."""
LEAST_BYTES = 128 << 10
"""Segments that visit hosts are not made smaller than this to be several."""
_SEGMENTS = 4  # that visit hosts, at least: one is on its way there while another returns
SMALL_BYTES = 16 << 10
"""Up to this size the first member adds for all."""

Hosts = tuple[tuple[int, ...], ...]
"""The members of each host, in order; of hosts whose members cannot share memory, each member alone."""


class Visit(NamedTuple):
    """Members of one host whose ranks follow one another: what a sum in rank order adds in one place."""

    host: int
    members: tuple[int, ...]


def each_alone(size: int) -> Hosts:
    return tuple((member,) for member in range(size))


def uses_memory(hosts: Hosts, nbytes: int) -> bool:
    """Whether members of one host use each other's tensors in a sum of this size."""
    return nbytes > SMALL_BYTES and any(len(host) > 1 for host in hosts)


@lru_cache(maxsize=1024)
def sum_in_rank_order(
    index: int, hosts: Hosts, numel: int, itemsize: int, segment_bytes: int = SEGMENT_BYTES
) -> list[Chain]:
    """The moves of member `index`."""
    size = sum(map(len, hosts))
    if size == 1 or numel == 0:
        return []
    if numel * itemsize <= SMALL_BYTES:
        return [_at_owner(index, size, 0, span) for span in segments(0, numel, itemsize, segment_bytes)]
    if len(hosts) == size:
        cut = cut_alike(numel, itemsize, segment_bytes, size)
        return [_at_owner(index, size, n % size, span) for n, span in enumerate(cut)]
    several = fewer_parts(_SEGMENTS, numel * itemsize, LEAST_BYTES)
    cut = cut_alike(numel, itemsize, segment_bytes // 2, max(map(len, hosts)), several)
    visits = visits_of(hosts)
    return [_along(index, hosts, visits, n, span) for n, span in enumerate(cut)]


def cut_alike(numel: int, itemsize: int, segment_bytes: int, workers: int, least: int = 1) -> list[Span]:
    """Segments of at most this many bytes, at least `least` of them, and as many for each worker."""
    needed = max(least, len(segments(0, numel, itemsize, segment_bytes)))
    return spans(0, numel, -(-needed // workers) * workers)


def visits_of(hosts: Hosts) -> list[Visit]:
    """The hosts in rank order; a host whose ranks do not follow one another is visited several times."""
    host_of = {member: h for h, host in enumerate(hosts) for member in host}
    return [Visit(h, tuple(members)) for h, members in groupby(sorted(host_of), key=host_of.__getitem__)]


def _at_owner(index: int, size: int, owner: int, span: Span) -> Chain:
    """All send to the owner, which adds in order and sends back."""
    if index != owner:
        return [Move("send", owner, 0, *span), Move("put", owner, 1, *span)]
    others = [member for member in range(size) if member != owner]
    back = [Move("send", peer, 1, *span) for peer in others]
    if owner <= 1:  # two numbers add alike in both orders
        return [*(Move("add", peer, 0, *span) for peer in others), *back]
    before = [Move("hold", peer, 0, *span) for peer in range(owner)]
    after = [Move("hold", peer, 0, *span) for peer in range(owner + 1, size)]
    own = (owner,)
    return [*before, Move("fold", owner, 0, *span, own), *after, Move("share", owner, 0, *span, own), *back]


def _along(index: int, hosts: Hosts, visits: Sequence[Visit], n: int, span: Span) -> Chain:
    """A segment's way through the hosts and back. At each host member n, counted round its members, works for all."""
    workers = [host[n % len(host)] for host in hosts]
    mine = next(h for h, host in enumerate(hosts) if index in host)
    if workers[mine] != index:
        return []
    last, moves = len(visits) - 1, Chain()
    for v in (v for v, visit in enumerate(visits) if visit.host == mine):
        before = workers[visits[v - 1].host] if v > 0 else None
        after = workers[visits[v + 1].host] if v < last else None
        moves += _there(index, visits[v].members, before, after, v, span)
    # Back along the hosts in the order of their last visits.
    way = list(dict.fromkeys(visit.host for visit in reversed(visits)))
    at = way.index(mine)
    if at > 0:
        moves.append(Move("put", workers[way[at - 1]], last + at - 1, *span))
    if hosts[mine] != (index,):
        moves.append(Move("share", index, 0, *span, hosts[mine]))
    if at < len(way) - 1:
        moves.append(Move("send", workers[way[at + 1]], last + at, *span))
    return moves


def _there(index: int, members: tuple[int, ...], before: int | None, after: int | None, v: int, span: Span) -> Chain:
    """Get the sum of all before, add the elements of the members of visit `v`, and pass the sum on."""
    onwards = [] if after is None else [Move("send", after, v, *span)]
    if members == (index,) and before is not None:
        return [Move("add", before, v - 1, *span), *onwards]
    held = [] if before is None else [Move("hold", before, v - 1, *span)]
    folds = [] if members == (index,) else [Move("fold", index, 0, *span, members)]
    return [*held, *folds, *onwards]
