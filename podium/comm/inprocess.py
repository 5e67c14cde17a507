"""What the two worlds inside one process share: exchanges under way, sums, and finding ranks that hang."""

from __future__ import annotations

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from podium.comm.base import BUSY_DEADLINES, Handle, Message
from podium.comm.schedule import Key, Running
from podium.errors import CommError, DeadlineExceeded, Lost, PodiumError, RankFailed


@dataclass(eq=False)
class Pending(Handle):
    """An exchange that a rank has begun."""

    owner: int
    what: str  # for error messages
    into: Sequence[Tensor] | None = None
    result: Message | None = None
    error: CommError | None = None
    finished: bool = False

    @property
    def done(self) -> bool:
        return self.finished


@dataclass
class Round:
    """One collective: its members, the tensors of those that have joined, and where each wants the result."""

    members: Sequence[int] = ()
    tensors: dict[int, Tensor] = field(default_factory=dict)
    into: dict[int, Tensor] = field(default_factory=dict)
    handles: list[Pending] = field(default_factory=list)

    def join(self, rank: int, tensor: Tensor, into: Tensor | None, handle: Pending) -> None:
        self.tensors[rank], self.into[rank] = tensor, tensor if into is None else into
        self.handles.append(handle)


Number = tuple[int, int]
"""Identifies an exchange by schedule: generation, and its number in the generation."""


_ENDING_S = 10.0
"""How long the other ranks may take to end once a rank was given up."""


class Watch:
    """Detects a rank that hangs in its own code while other ranks wait for it; ranks are threads of this process.

    A thread cannot be ended from outside: it is abandoned, and the run ends with an error that names it.
    """

    def __init__(self, deadline_s: float, start_deadline_s: float = 60.0) -> None:
        self.deadline_s, self.start_deadline_s = deadline_s, start_deadline_s
        self.has_begun = False
        """Whether a step was made; until then the start deadline holds."""
        self.moved = time.monotonic()
        """When a rank last made progress."""
        self.failure: DeadlineExceeded | None = None
        self._busy: dict[int, str] = {}

    def busy(self, rank: int, what: str | None) -> None:
        """A rank does something that may take long; None: it is done."""
        self.moved = time.monotonic()
        if what is None:
            self._busy.pop(rank, None)
        else:
            self._busy[rank] = what

    @property
    def patience(self) -> int:
        """How many deadlines ranks wait for each other at present."""
        return BUSY_DEADLINES if self._busy else 1

    def hung(self, running: Collection[int]) -> bool:
        """Whether the ranks that compute have made no progress for longer than the other ranks wait."""
        limit_s = self.deadline_s * (BUSY_DEADLINES if self._busy.keys() & set(running) else 1)
        if not self.has_begun:
            limit_s = max(limit_s, self.start_deadline_s)
        return bool(running) and time.monotonic() - self.moved > limit_s

    def give_up(self, threads: Mapping[int, threading.Thread]) -> DeadlineExceeded:
        """Declare these ranks hung; returns and stores the error."""
        ranks = sorted(threads)
        who = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        places = "; ".join(place for rank in ranks if (place := _place_of(threads[rank])))
        self.failure = DeadlineExceeded(
            f"{who} hung for {time.monotonic() - self.moved:.1f} s while the others waited"
            f"{f' (at {places})' if places else ''}; if it only needs longer, raise deadline_s"
        )
        return self.failure

    def end(
        self, threads: Sequence[threading.Thread], hung: Collection[int], errors: Sequence[BaseException | None]
    ) -> list[BaseException | None]:
        """Wait for the other ranks to end; returns what each raised, without errors that the hung ranks caused."""
        until = time.monotonic() + _ENDING_S
        for rank, thread in enumerate(threads):
            if rank not in hung:
                thread.join(max(0.0, until - time.monotonic()))
        return [
            self.failure if rank in hung else None if isinstance(error, CommError) else error
            for rank, error in enumerate(errors)
        ]


def _place_of(thread: threading.Thread) -> str:
    """The line of code that a thread executes."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Exchanges:
    """Exchanges by schedule in one process: each rank's part, and which ranks have ended theirs."""

    def __init__(self) -> None:
        self.open: dict[tuple[int, Number], tuple[Pending, Running]] = {}
        self._members: dict[Number, Sequence[int]] = {}
        self._through: dict[Number, set[int]] = defaultdict(set)
        self._early: dict[tuple[int, Number], list[tuple[int, Key, Tensor]]] = defaultdict(list)

    def register(self, rank: int, number: Number, members: Sequence[int], handle: Pending, running: Running) -> None:
        """Call before `begin`."""
        self._members[number] = members
        self.open[rank, number] = handle, running

    def begin(self, rank: int, number: Number) -> None:
        """Start one rank's part, with messages that came early."""
        _, running = self.open[rank, number]
        running.start()
        for peer, name, part in self._early.pop((rank, number), []):
            running.arrived(peer, name, part)

    def bring(self, rank: int, number: Number, peer: int, name: Key, part: Tensor) -> None:
        """A message has arrived."""
        found = self.open.get((rank, number))
        if found is None:
            self._early[rank, number].append((peer, name, part))
        else:
            found[1].arrived(peer, name, part)

    def end(self, rank: int, number: Number) -> None:
        self._through[number].add(rank)
        self.open.pop((rank, number), None)
        if self._through[number] >= set(self._members[number]):
            del self._through[number], self._members[number]

    def missing(self, number: Number, members: Sequence[int], departed: set[int]) -> list[int]:
        """Members that are gone and had not ended this exchange."""
        return [rank for rank in members if rank in departed and rank not in self._through[number]]

    def without(self, rank: int) -> list[Pending]:
        """Handles of exchanges that cannot end now that this rank is gone."""
        return [
            handle
            for (_, number), (handle, _) in list(self.open.items())
            if rank in self._members[number] and rank not in self._through[number]
        ]


def taken(body: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copies of a message's tensors on the CPU, as a receiver in another process would get them."""
    return tuple(t.clone() if t.device.type == "cpu" else t.cpu() for t in body)


def gathered(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors)


def sum_in_order(tensors: list[Tensor]) -> Tensor:
    """The sum, always in rank order, so that it has the same bits in every run."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def land(body: Sequence[Tensor], into: Sequence[Tensor] | None) -> tuple[Tensor, ...]:
    """A reply's tensors, copied to `into` or to new tensors; an empty reply leaves `into` alone."""
    if into is None or not body:
        return tuple(t.clone() for t in body)
    for mine, theirs in zip(into, body, strict=True):
        mine.copy_(theirs)
    return tuple(into)


def raise_first(errors: Sequence[BaseException | None]) -> None:
    """Raise the cause: a rank's own error before the `Lost` that it caused on other ranks."""
    failed = [(rank, error) for rank, error in enumerate(errors) if error is not None]
    if not failed:
        return
    rank, error = next(((r, e) for r, e in failed if not isinstance(e, Lost)), failed[0])
    if isinstance(error, PodiumError) or not isinstance(error, Exception):
        raise error
    raise RankFailed(f"rank {rank}: {type(error).__name__}: {error}") from error
