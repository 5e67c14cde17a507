"""Double tree: two binary trees, each of which sums one half of the tensor upwards and broadcasts it downwards.

A member that is a leaf of one tree is an inner node of the other, so links are used alike. n bytes in segments of s,
p members, trees of depth d <= log2(p) + 1: about 2 d (alpha + s beta) + 2 n beta + n gamma; two members need n beta.
The latency grows with log2(p) only, for large tensors too; a ring sends (p-1)/p as much.

Sanders, Speck and Träff, 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple, final

from podium.comm.moves import Span, in_turn, in_window, require_positive, segments
from podium.comm.schedule import Chain, Move
from podium.exchange.collectives.base import Scheduled


class Place(NamedTuple):
    """A member's neighbours in one tree."""

    parent: int | None
    children: tuple[int, ...]


@final
@dataclass(frozen=True, kw_only=True)
class DoubleTree(Scheduled):
    """Two complementary binary trees."""

    name: ClassVar[str] = "tree"

    segment_bytes: int = 256 << 10
    """The largest message. Smaller ones fill the trees sooner and cost more latency."""
    window: int = 32
    """Segments in flight, of both trees. Without a bound, the way up fills the links and the way down waits."""

    def __post_init__(self) -> None:
        require_positive("tree", segment_bytes=self.segment_bytes, window=self.window)

    def schedule(self, index: int, size: int, numel: int, itemsize: int) -> list[Chain]:
        if size == 1:
            return []
        places = both_places(index, size)
        halves = ((0, numel // 2), (numel // 2, numel))
        cut = [[(t, span) for span in segments(*half, itemsize, self.segment_bytes)] for t, half in enumerate(halves)]
        return in_window([_up_and_down(places[t], span) for t, span in in_turn(cut)], self.window, rounds=2)


def both_places(index: int, size: int) -> tuple[Place, Place]:
    """A member's neighbours in each of the two trees.

    The second tree is the mirror image of the first where that turns even into odd, else it is shifted by one.
    """
    first = _place(index, size)
    if size % 2 == 0:
        return first, _renamed(_place(size - 1 - index, size), [size - 1 - role for role in range(size)])
    return first, _renamed(_place((index - 1) % size, size), [(role + 1) % size for role in range(size)])


def depth_of(size: int) -> int:
    """Edges from the root to the farthest leaf."""
    depth, row = 0, list(_children(0, size))
    while row:
        depth, row = depth + 1, [child for role in row for child in _children(role, size)]
    return depth


def _place(role: int, size: int) -> Place:
    """A role's neighbours in one tree. Role 0 is the root, with one child; even roles have children, odd ones none."""
    parent, node = None, 0
    while node != role:
        children = _children(node, size)
        parent, node = node, children[0] if role < node else children[-1]
    return Place(parent, _children(role, size))


def _children(role: int, size: int) -> tuple[int, ...]:
    """A role with k trailing zero bits is the root of the roles less than 2^k away: half on each side."""
    reach = (role & -role) // 2 or (size if role == 0 else 0)
    right = next((role + (1 << j) for j in reversed(range(reach.bit_length())) if role + (1 << j) < size), None)
    left = (role - reach,) if role and reach else ()
    return left if right is None else (*left, right)


def _renamed(place: Place, names: list[int]) -> Place:
    parent = None if place.parent is None else names[place.parent]
    return Place(parent, tuple(names[child] for child in place.children))


def _up_and_down(place: Place, span: Span) -> Chain:
    moves = [Move("add", child, 0, *span) for child in place.children]
    if place.parent is not None:
        moves += [Move("send", place.parent, 0, *span), Move("put", place.parent, 1, *span)]
    return moves + [Move("send", child, 1, *span) for child in place.children]
