"""What the two worlds inside one process share: exchanges under way, and how their tensors come together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from podium.comm.base import Handle, Message
from podium.comm.schedule import Key, Running
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
    """One collective: among whom, who has come, with which tensor, and where each wants the result."""

    members: Sequence[int] = ()
    tensors: dict[int, Tensor] = field(default_factory=dict)
    into: dict[int, Tensor] = field(default_factory=dict)
    handles: list[Pending] = field(default_factory=list)

    def join(self, rank: int, tensor: Tensor, into: Tensor | None, handle: Pending) -> None:
        self.tensors[rank], self.into[rank] = tensor, tensor if into is None else into
        self.handles.append(handle)


Number = tuple[int, int]
"""Names an exchange by schedule: generation, and which of it."""


class Exchanges:
    """Exchanges by schedule under way in one process: who is at which, and who is through."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, Number], tuple[Pending, Running]] = {}
        self._members: dict[Number, Sequence[int]] = {}
        self._through: dict[Number, set[int]] = defaultdict(set)
        self._early: dict[tuple[int, Number], list[tuple[int, Key, Tensor]]] = defaultdict(list)

    def register(self, rank: int, number: Number, members: Sequence[int], handle: Pending, running: Running) -> None:
        """One rank is about to begin its part."""
        self._members[number] = members
        self.open[rank, number] = handle, running

    def begin(self, rank: int, number: Number) -> None:
        """Start one rank's part, with what came before."""
        _, running = self.open[rank, number]
        running.start()
        for peer, name, part in self._early.pop((rank, number), []):
            running.arrived(peer, name, part)

    def bring(self, rank: int, number: Number, peer: int, name: Key, part: Tensor) -> None:
        """A message is here."""
        found = self.open.get((rank, number))
        if found is None:
            self._early[rank, number].append((peer, name, part))
        else:
            found[1].arrived(peer, name, part)

    def end(self, rank: int, number: Number) -> None:
        """One rank's part is through."""
        self._through[number].add(rank)
        self.open.pop((rank, number), None)
        if self._through[number] >= set(self._members[number]):
            del self._through[number], self._members[number]

    def missing(self, number: Number, members: Sequence[int], departed: set[int]) -> list[int]:
        """Members that are gone without having been through with this exchange."""
        return [rank for rank in members if rank in departed and rank not in self._through[number]]

    def without(self, rank: int) -> list[Pending]:
        """Handles that wait in vain now that this rank is gone."""
        return [
            handle
            for (_, number), (handle, _) in list(self.open.items())
            if rank in self._members[number] and rank not in self._through[number]
        ]


def taken(body: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """A message's tensors as its receiver gets them: copies, on the CPU, as between processes."""
    return tuple(t.clone() if t.device.type == "cpu" else t.cpu() for t in body)


def gathered(tensors: list[Tensor]) -> Tensor:
    """All of them, one after the other."""
    return torch.cat(tensors)


def sum_in_order(tensors: list[Tensor]) -> Tensor:
    """The sum, always added up in rank order, so that it has the same bits in every run."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def land(body: Sequence[Tensor], into: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """A reply's tensors in the buffers made ready for them, or in fresh ones; none at all leaves the buffers alone."""
    if into is None or not body:
        return tuple(t.clone() for t in body)
    for mine, theirs in zip(into, body, strict=True):
        mine.copy_(theirs)
    return tuple(into)
