"""What the two worlds inside one process share: exchanges under way, and how their tensors come together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from podium.comm.base import Handle, Message
from podium.errors import CommError


@dataclass(eq=False)
class Pending(Handle):
    """An exchange that a rank has begun and perhaps waits for."""

    owner: int
    what: str  # for messages to people
    into: Sequence[Tensor] | None = None
    result: Message | None = None
    error: CommError | None = None
    finished: bool = False

    @property
    def done(self) -> bool:
        return self.finished


@dataclass
class Round:
    """One collective: who has come, with which tensor."""

    tensors: dict[int, Tensor] = field(default_factory=dict)
    handles: list[Pending] = field(default_factory=list)


def sum_in_order(tensors: list[Tensor]) -> Tensor:
    """The sum, always added up in rank order, so that it has the same bits in every run."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def land(body: Sequence[Tensor], into: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """A reply's tensors in the buffers made ready for them, or in fresh ones."""
    if into is None:
        return tuple(t.clone() for t in body)
    for mine, theirs in zip(into, body, strict=True):
        mine.copy_(theirs)
    return tuple(into)
