"""Building blocks of schedules: segments, a star around one member, a ring inside a chain, members folded to pairs.

Chains of one exchange touch different elements, so each segment can be a chain of its own: while one segment is being
added the next is on the wire.

A move never adds to elements that were sent before, since a message may be read from the tensor until it has arrived.
The exception is recursive doubling, which adds to them in the very next move, so a copy of them must be sent.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain as joined
from itertools import pairwise, zip_longest
from typing import Literal

from podium.comm.schedule import Chain, Move, element_cuts
from podium.errors import ConfigError

Span = tuple[int, int]
"""Elements from the first up to the second; never empty."""


def require_positive(who: str, **values: int) -> None:
    """Refuse sizes below one."""
    for name, value in values.items():
        if value < 1:
            raise ConfigError(f"{who}: {name} must be at least 1, got {value}")


def require_permutation(who: str, what: str, members: Sequence[int], size: int) -> None:
    """Refuse lists that do not name each of `size` members once."""
    if sorted(members) != list(range(size)):
        raise ConfigError(f"{who}: {what} must name each of the members 0 to {size - 1} once, got {list(members)}")


def spans(start: int, stop: int, parts: int) -> list[Span]:
    """Parts that differ by one element at most; those without elements are left out."""
    cuts = [start + cut for cut in element_cuts(stop - start, parts)]
    return [(a, b) for a, b in pairwise(cuts) if a < b]


def segments(start: int, stop: int, itemsize: int, segment_bytes: int) -> list[Span]:
    """Equal segments of at most this many bytes, and of one element at least."""
    per_segment = max(1, segment_bytes // itemsize)
    return spans(start, stop, max(1, -(-(stop - start) // per_segment)))


def fewer_parts(parts: int, nbytes: int, least_bytes: int) -> int:
    """The number of parts, or fewer where they would be smaller than `least_bytes`: each part costs messages."""
    return max(1, min(parts, nbytes // least_bytes))


def in_turn(lists: Iterable[Sequence[tuple[int, Span]]]) -> Iterator[tuple[int, Span]]:
    """The first of each list, then the second of each …

    Members begin chains in list order. Interleaved, they send to one owner after the other, and no owner's link is idle
    while another's is flooded.
    """
    return (item for item in joined.from_iterable(zip_longest(*lists)) if item is not None)


def in_window(chains: Sequence[Chain], window: int, rounds: int) -> list[Chain]:
    """Keep at most `window` chains in flight: append each further chain to the one `window` places before it.

    For algorithms with more than one phase: if members begin all chains at once, the first phase fills their links and
    the second has to wait. `rounds` is the number of rounds of each chain.
    """
    return [
        [
            move._replace(round=turn * rounds + move.round)
            for turn, chain in enumerate(chains[w::window])
            for move in chain
        ]
        for w in range(min(window, len(chains)))
    ]


def star(index: int, size: int, hub: int, span: Span, *, rotated: bool = False) -> Chain:
    """All send to the hub, which adds in member order (`rotated`: from its successor on) and sends back."""
    if index != hub:
        return [Move("send", hub, 0, *span), Move("put", hub, 1, *span)]
    around = [(hub + i) % size for i in range(1, size)]
    adding = around if rotated else sorted(around)
    return [Move("add", peer, 0, *span) for peer in adding] + [Move("send", peer, 1, *span) for peer in around]


def ring_inside(at: int, members: Sequence[int], span: Span, first_round: int) -> Chain:
    """A ring all-reduce within one chain, in 2(m-1) rounds. `at` is this member's index in `members`."""
    m = len(members)
    cuts = [span[0] + cut for cut in element_cuts(span[1] - span[0], m)]
    after, before = members[(at + 1) % m], members[(at - 1) % m]
    moves = Chain()
    for step in range(2 * (m - 1)):
        # Send the chunk received last; after m - 1 steps chunks are complete and replace instead of being added.
        out, into = (at - step) % m, (at - step - 1) % m
        kind: Literal["add", "put"] = "add" if step < m - 1 else "put"
        moves.append(Move("send", after, first_round + step, cuts[out], cuts[out + 1]))
        moves.append(Move(kind, before, first_round + step, cuts[into], cuts[into + 1]))
    return [move for move in moves if move.start < move.stop]


def folded(size: int) -> list[tuple[int, int]]:
    """Fold the members to a power of two of nodes: the first nodes are pairs, the others single members."""
    power = 1 << (size.bit_length() - 1)
    extra = size - power
    pairs = [(2 * v, 2 * v + 1) for v in range(extra)]
    return pairs + [(v + extra, v + extra) for v in range(extra, power)]
