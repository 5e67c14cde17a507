"""The communicator: all that a strategy knows of the other ranks.

Ranks are endpoints. Workers are numbered first (0 … N-1), servers after them (N … N+M-1). Collectives run among the
workers that are members of the present generation; messages run between any two endpoints.

Rules that hold in every world:

- The buffer given to an exchange belongs to it until its handle is done.
- `send` and `reply` have taken the body when they return; a `call` has taken it when its reply is there, and until
  then the receiver may be looking at the caller's own memory.
- Collectives are issued in the same order by all members.
- No wait is without a deadline, and none is allowed inside a backward pass: a callback issues, it never waits.
- A collective that fails raises `Lost`; the group is then dead and only `regroup` helps.
- What workers draw from a counter is theirs alone; a new generation begins all counters anew.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from podium.errors import CommError, Lost

if TYPE_CHECKING:
    from podium.comm.clocks import Clock
    from podium.comm.network import Terrain
    from podium.comm.schedule import Chain

DEPARTED = "departed"
"""Kind of the message that tells a receiver that its source is gone."""

BUSY_DEADLINES = 12
"""How many deadlines ranks wait for one that is busy (with validation, say), or that may be."""

Meta = dict[str, Any]
"""Small facts that travel with a message: JSON types only."""


class Message(NamedTuple):
    """What arrived: from whom, what it asks, its small facts and its tensors."""

    source: int
    kind: str
    meta: Meta
    body: tuple[Tensor, ...] = ()
    call: int = 0  # names the call that waits for a reply; 0 when nobody does
    landing: tuple[Tensor, ...] | None = None  # the caller's own `into`, where its memory is shared with us


class Handle(ABC):
    """An exchange under way. Ask the communicator to wait for it."""

    @property
    @abstractmethod
    def done(self) -> bool: ...


@dataclass
class Traffic:
    """Bytes of tensors that this rank has sent and received, collectives counted by their ring formula."""

    sent: int = 0
    received: int = 0

    def count_all_reduce(self, nbytes: int, size: int) -> None:
        """A ring moves 2 (n - 1) / n of the buffer through every rank, each way."""
        moved = 2 * nbytes * (size - 1) // size
        self.sent += moved
        self.received += moved

    def count_all_gather(self, nbytes: int, size: int) -> None:
        """Each worker's part goes through every other."""
        self.sent += nbytes * (size - 1)
        self.received += nbytes * (size - 1)

    def count_broadcast(self, nbytes: int, is_source: bool, size: int) -> None:
        """The source sends one copy per receiver, as a flat broadcast would."""
        if is_source:
            self.sent += nbytes * (size - 1)
        else:
            self.received += nbytes


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    """Bytes of these tensors' elements."""
    return sum(t.numel() * t.element_size() for t in tensors)


class Counters:
    """What workers draw from: a counter for each turn, of which the last few are kept."""

    KEPT = 4

    def __init__(self, values: Mapping[tuple[int, int], int] | None = None) -> None:
        """`values`: how far each counter is, by generation and turn."""
        self.values = dict(values or {})

    def draw(self, generation: int, turn: int, count: int) -> int:
        """How far this counter was; it is `count` further now. Raises Lost where the turn is no longer kept."""
        key = generation, turn
        before = self.values.get(key)
        if before is None:
            if len(self.values) >= self.KEPT and key < min(self.values):
                raise Lost(f"turn {turn} of generation {generation} is over: other workers draw from a later one")
            before = 0
        self.values[key] = before + count
        if len(self.values) > self.KEPT:
            del self.values[min(self.values)]
        return before


class Ground(NamedTuple):
    """What a launcher knows of the machines beneath the ranks."""

    terrain: Terrain
    nodes: tuple[int, ...]
    """The node of every rank that the run began with."""
    here: int
    """The node of this rank."""


@dataclass(eq=False)
class Communicator(ABC):
    """One rank's view of the others."""

    rank: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    clock: Clock
    generation: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    deadline_s: float = 60.0
    """How long any wait may take unless it says otherwise."""
    in_backward: bool = False
    waited_ns: int = 0
    """Time spent waiting for others, on the world's clock."""
    ground: Ground | None = None
    """The machines and links beneath, where the launcher has a description of them."""

    message_bytes: int | None = None
    """How much one message may hold at most; None: as much as one likes."""

    shares_memory = False
    """Whether messages to ranks of this host move no bytes."""
    talks = True
    """Whether workers can send each other messages, and so exchange by schedule."""
    shares_host = False
    """Whether all workers of the present generation can reach each other's memory."""
    shares_process = False
    """Whether other ranks compute in this process, so that torch's global generator has to be swapped."""
    shares_disk = False
    """Whether all ranks are known to see the same files, so that nobody has to ask."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, in memory from which exchanges of this rank are cheap."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def index(self) -> int:
        """This worker's place among the members of the present generation."""
        return self.workers.index(self.rank)

    # Collectives, among the workers.

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum over the workers, in place, by what this world has for it: shared memory where they share a host."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Copy from rank `source`, in place."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        """Every worker's flat tensor, in order of their places, into one `size` times as long."""

    @abstractmethod
    def exchange(self, chains: Sequence[Chain], tensor: Tensor) -> Handle:
        """Carry out our part of a schedule on a flat tensor. Issued in the same order by all, like collectives."""

    def meet(self) -> None:
        """Connect to all other workers, so that the first exchange does not have to. Collective."""

    # A counter, shared by the workers.

    def draw(self, turn: int, count: int = 1) -> int:
        """Take the next `count` numbers of this turn; the first of them. No two workers get the same.

        A turn begins at 0 with the first worker that draws. Turns go up; the last few are kept, so workers may be a
        turn apart, and a new generation begins them anew. Waits for an answer, but for no other worker; raises Lost
        where the counter is out of reach.
        """
        if self.in_backward:
            raise CommError(f"rank {self.rank}: drawing inside a backward pass is not allowed")
        if count < 1:
            raise CommError(f"rank {self.rank}: draw at least 1 number, got {count}")
        before = self.clock.now_ns()
        try:
            return self._draw(turn, count)
        finally:
            self.waited_ns += self.clock.now_ns() - before

    @abstractmethod
    def _draw(self, turn: int, count: int) -> int: ...

    # Messages, between any two endpoints.

    @abstractmethod
    def send(self, to: int, kind: str, meta: Meta, body: Sequence[Tensor] = ()) -> None:
        """One way; has taken the body when it returns."""

    @abstractmethod
    def call(
        self,
        to: int,
        kind: str,
        meta: Meta,
        body: Sequence[Tensor] = (),
        into: Sequence[Tensor] | None = None,
        more: bool = False,
    ) -> Handle:
        """Ask and expect a reply, which `wait` returns; its tensors land in `into`, where given.

        `more`: another call to the same rank follows at once, and this one may travel with it.
        """

    @abstractmethod
    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        """Answer a call; has taken the body when it returns. `more`: as with `call`.

        What the caller gave as `into` may be here as `to.landing`, to be written to before; a body that lies there is
        not copied.
        """

    @abstractmethod
    def recv(self, deadline_s: float | None = None) -> Message:
        """The next message from anyone, in order of arrival. A departure is a message."""

    def poll(self, *calls: Handle, deadline_s: float | None = None) -> Message | None:
        """The next message, if one is here now; otherwise None, at once.

        With `calls`: waits for a message or for all of these calls, whichever is first, and is None if it was the
        calls; one that failed counts as done. In virtual time, now is this rank's own clock, which polling does not
        move: a rank that has nothing to compute must wait, not poll again.
        """
        if self.in_backward:
            raise CommError(f"rank {self.rank}: polling inside a backward pass is not allowed")
        before = self.clock.now_ns()
        message = self._poll(calls, self.deadline_s if deadline_s is None else deadline_s)
        self.waited_ns += self.clock.now_ns() - before if calls else 0
        return message

    @abstractmethod
    def _poll(self, calls: Sequence[Handle], deadline_s: float) -> Message | None: ...

    @property
    def addresses(self) -> Mapping[int, str]:
        """Where other endpoints listen, in worlds where that has to be known."""
        return {}

    def introduce(self, addresses: Mapping[int, str]) -> None:
        """Learn where others listen."""

    def watch(self, ranks: Sequence[int]) -> None:
        """See to it that `recv` tells of the departure of these, also of one that never says a word to us."""

    # Waiting.

    def wait(self, *handles: Handle, deadline_s: float | None = None) -> list[Message | None]:
        """Block until all are done; one result each, None for a collective."""
        if self.in_backward:
            raise CommError(f"rank {self.rank}: waiting inside a backward pass is not allowed; issue there, wait after")
        before = self.clock.now_ns()
        try:
            return self._wait(handles, self.deadline_s if deadline_s is None else deadline_s)
        finally:
            self.waited_ns += self.clock.now_ns() - before

    @abstractmethod
    def _wait(self, handles: Sequence[Handle], deadline_s: float) -> list[Message | None]: ...

    def abandon(self) -> None:
        """Let go of every exchange and of the group, so that members who do not know of the loss yet learn of it."""

    @abstractmethod
    def regroup(
        self,
        generation: int,
        members: Sequence[int],
        servers: Sequence[int] | None = None,
        addresses: Mapping[int, str] | None = None,
    ) -> None:
        """Drop every handle and the old group; form a new one of these workers.

        `servers`, where they change too; `addresses` of endpoints that are new.
        """

    def close(self) -> None:
        """Leave for good."""

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Around forward and backward; where ranks share a process, one computes at a time."""
        yield

    def gather_aside(self, tensor: Tensor) -> Tensor:
        """Every worker's flat tensor, one row each: a check, which counts as no traffic and takes no simulated time.

        Collective.
        """
        sent, received = self.traffic.sent, self.traffic.received
        into = torch.empty(self.size * tensor.numel(), dtype=tensor.dtype)
        self.wait(self._gather_aside(tensor, into))
        self.traffic.sent, self.traffic.received = sent, received
        return into.view(self.size, -1)

    def _gather_aside(self, tensor: Tensor, into: Tensor) -> Handle:
        return self.all_gather(tensor, into)

    def barrier(self) -> None:
        """Return once every worker has come here."""
        self.wait(self.all_reduce(torch.zeros(1)))
