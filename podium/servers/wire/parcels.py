"""A server's state in messages of bounded size: parameters and optimizer state, unit by unit.

A server's state in a single message would be bounded by the largest frame, 4 GiB: 358 million parameters with Adam. So
it travels in parcels: with a seed, to the workers at the end, to the server that holds a copy and back from there. A
parcel holds neighbouring tensors of neighbouring units; its end is a place, (unit, tensor), where the next parcel
begins. Sender and receiver hold one parcel and one unit in memory beside the state itself. A state that fits into one
parcel, as of any small model, travels in one message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from podium.errors import CommError

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Meta

PARCEL_BYTES = 64 << 20
"""Bytes of state in one message; a single tensor may be larger."""
MOST_TENSORS, _MOST_UNITS = 512, 128
"""Limits of one parcel: a header of 64 KiB must describe them."""

Place = tuple[int, int]
START: Place = (0, 0)


class Kept(NamedTuple):
    """One unit's parameters and its optimizer state, packed by `moments.pack`."""

    params: Sequence[Tensor]
    kinds: Meta
    state: Sequence[Tensor]


class Described(Protocol):
    """A message with a parcel."""

    @property
    def at(self) -> Sequence[int] | None:
        """The place of its first tensor."""

    @property
    def units(self) -> Sequence[Any]:
        """Unit, tensors, parameters and kinds of each unit that it has a part of."""

    @property
    def next(self) -> Sequence[int] | None:
        """Where the next parcel begins; None: this was the last."""


class Parcel(NamedTuple):
    """A part of a state: facts for the message (`at`, `units`, `next`), and tensors."""

    meta: Meta
    body: list[Tensor]

    @property
    def next(self) -> Place | None:
        return place_of(self.meta["next"])


def place_of(plain: Any) -> Place | None:
    """A place from a message."""
    return None if plain is None else (int(plain[0]), int(plain[1]))


def parcel_bytes(comm: Communicator) -> int:
    """Bytes of one parcel: less where the world's messages must be smaller."""
    return PARCEL_BYTES if comm.message_bytes is None else min(PARCEL_BYTES, comm.message_bytes)


def cut(unit_of: Callable[[int], Kept], units: int, place: Place, most_bytes: int) -> Parcel:
    """The parcel that begins at this place; `unit_of` returns one unit of the state, and is called for few of them."""
    (unit, at), total = place, 0
    described: list[list[Any]] = []
    body: list[Tensor] = []
    after: Place | None = None
    while unit < units and after is None:
        kept = unit_of(unit)
        tensors = [*kept.params, *kept.state]
        first = at
        while at < len(tensors) and after is None:
            if body and (total + tensors[at].nbytes > most_bytes or len(body) == MOST_TENSORS):
                after = unit, at
            else:
                body.append(tensors[at])
                total += tensors[at].nbytes
                at += 1
        if at > first or not tensors:
            described.append([unit, len(tensors), len(kept.params), kept.kinds])
        if after is None:
            unit, at = unit + 1, 0
            if len(described) == _MOST_UNITS and unit < units:
                after = unit, at
    return Parcel({"at": list(place), "units": described, "next": None if after is None else list(after)}, body)


class Assembly:
    """Joins parcels, in order, into whole units."""

    def __init__(self) -> None:
        self.expects: Place | None = START
        """Where the next parcel must begin; None: all have arrived."""
        self._part: list[Tensor] = []

    def take(self, facts: Described, body: Sequence[Tensor]) -> list[tuple[int, Kept]]:
        """The units that this parcel completes."""
        at = place_of(facts.at)
        if self.expects is not None and at == (self.expects[0], 0):
            self._part = []  # this unit was moved while it was being sent, and is sent again
        elif at is None or at != self.expects:
            raise CommError(f"a parcel of a server's state must begin at {self.expects}, got {at}")
        rest, whole = list(body), []
        for unit, count, params, kinds in facts.units:
            missing = count - len(self._part)
            self._part += rest[:missing]
            rest = rest[missing:]
            if len(self._part) == count:
                whole.append((int(unit), Kept(self._part[:params], kinds, self._part[params:])))
                self._part = []
        if rest:
            raise CommError(f"a parcel of a server's state must hold what it says, got {len(rest)} tensors more")
        self.expects = place_of(facts.next)
        return whole
