"""The communicator: all that a strategy knows of the other ranks.

Ranks are endpoints. Workers are numbered first (0 … N-1), servers after them (N … N+M-1). Collectives run among the
workers that are members of the present generation; messages run between any two endpoints.

Rules that hold in every world:

- The buffer given to an exchange belongs to it until its handle is done.
- After `send` and `reply` return, the body may change. The body of a `call` must not change before its reply has
  arrived: until then the receiver may read the caller's own memory.
- All members issue collectives in the same order.
- Every wait has a deadline, and none is allowed inside a backward pass: a callback issues, it never waits.
- A collective that fails raises `Lost`; the group is then dead and only `regroup` helps.
- No two workers draw the same number from a counter; a new generation resets all counters.
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
"""Kind of the message that a receiver gets when its source is gone."""

BUSY_DEADLINES = 12
"""How many deadlines ranks wait for a rank that is or may be busy, for example with validation."""

Meta = dict[str, Any]
"""Small facts that travel with a message: JSON types only."""


class Message(NamedTuple):
    """A received message: its source, its kind, its small facts and its tensors."""

    source: int
    kind: str
    meta: Meta
    body: tuple[Tensor, ...] = ()
    call: int = 0  # identifies the call that waits for a reply; 0 when none does
    landing: tuple[Tensor, ...] | None = None  # the caller's own `into`, where its memory is shared with us


class Handle(ABC):
    """An exchange under way, for `Communicator.wait`."""

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
        """Each worker's part passes through every other worker."""
        self.sent += nbytes * (size - 1)
        self.received += nbytes * (size - 1)

    def count_broadcast(self, nbytes: int, is_source: bool, size: int) -> None:
        """The source sends one copy per receiver, as a flat broadcast would."""
        if is_source:
            self.sent += nbytes * (size - 1)
        else:
            self.received += nbytes


def nbytes_of(tensors: Sequence[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


class Counters:
    """Counters that workers draw numbers from: one per turn, of which the last few are kept."""

    KEPT = 4

    def __init__(self, values: Mapping[tuple[int, int], int] | None = None) -> None:
        """`values`: each counter's value, by generation and turn."""
        self.values = dict(values or {})

    def draw(self, generation: int, turn: int, count: int) -> int:
        """Add `count` and return the value before. Raises Lost where the turn is no longer kept."""
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
    """What a launcher knows of the machines that ranks run on."""

    terrain: Terrain
    nodes: tuple[int, ...]
    """The node of every rank that the run began with."""
    here: int
    """The node of this rank."""


@dataclass(eq=False)
class Communicator(ABC):
    """One rank's view of the other ranks."""

    rank: int
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    clock: Clock
    generation: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    deadline_s: float = 60.0
    """The default deadline of every wait."""
    in_backward: bool = False
    waited_ns: int = 0
    """Time spent waiting for other ranks, on the world's clock."""
    ground: Ground | None = None
    """The machines and links, where the launcher has a description of them."""

    message_bytes: int | None = None
    """Largest body of one message; None: no limit."""

    shares_memory = False
    """Whether messages to ranks of this host copy no bytes."""
    talks = True
    """Whether workers can send each other messages, and so exchange by schedule."""
    shares_host = False
    """Whether all workers of the present generation can reach each other's memory."""
    hosts: tuple[tuple[int, ...], ...] = ()
    """Indices of the members by host, for those that can use each other's memory; empty where hosts are not known."""
    sums_in_rank_order = False
    """Whether `all_reduce` across hosts adds in rank order, as it does in shared memory, over the channel."""
    shares_process = False
    """Whether other ranks compute in this process, so that torch's global generator has to be swapped."""
    shares_disk = False
    """Whether all ranks are known to see the same files, so that no exchange is needed to find out."""

    def allocate(self, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Zeros, in memory that this world can exchange cheaply."""
        return torch.zeros(numel, dtype=dtype, device=device)

    @property
    def size(self) -> int:
        return len(self.workers)

    @property
    def index(self) -> int:
        """This worker's index among the members of the present generation."""
        return self.workers.index(self.rank)

    @property
    def near(self) -> tuple[int, ...]:
        """Indices of the other members of this host, as in `hosts`."""
        return next((tuple(m for m in host if m != self.index) for host in self.hosts if self.index in host), ())

    # Collectives, among the workers.

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Handle:
        """Sum over the workers, in place, by this world's own method: shared memory where they share a host."""

    @abstractmethod
    def broadcast(self, tensor: Tensor, source: int) -> Handle:
        """Copy from rank `source`, in place."""

    @abstractmethod
    def all_gather(self, tensor: Tensor, into: Tensor) -> Handle:
        """Every worker's flat tensor, in order of their indices, into one `size` times as long."""

    @abstractmethod
    def exchange(self, chains: Sequence[Chain], tensor: Tensor, near: Sequence[int] = ()) -> Handle:
        """Run this rank's part of a schedule on a flat tensor. Issued in the same order by all, like collectives.

        `near`: the other members of this host, as in `hosts`, where the schedule uses their tensors. All members of a
        host name each other.
        """

    def meet(self) -> None:
        """Connect to all other workers, so that the first exchange does not have to. Collective."""

    # A counter, shared by the workers.

    @contextmanager
    def backward_pass(self) -> Iterator[None]:
        """Inside, an exchange may be issued, and any wait raises."""
        self.in_backward = True
        try:
            yield
        finally:
            self.in_backward = False

    def draw(self, turn: int, count: int = 1) -> int:
        """Take the next `count` numbers of this turn and return the first. No two workers get the same number.

        The first draw of a turn returns 0. Turns go up; the last few are kept, so workers may be a turn apart, and a
        new generation resets them. Waits for an answer, but for no other worker; raises Lost where the counter cannot
        be reached.
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
        """One way; the body may change once this returns."""

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
        """Send a request; `wait` returns the reply, whose tensors land in `into`, where given.

        `more`: another call to the same rank follows at once, and this one may travel with it.
        """

    @abstractmethod
    def reply(self, to: Message, meta: Meta, body: Sequence[Tensor] = (), more: bool = False) -> None:
        """Answer a call; the body may change once this returns. `more`: as with `call`.

        `to.landing`, where it is not None, is the caller's `into`: a body that was written there is not copied.
        """

    @abstractmethod
    def recv(self, deadline_s: float | None = None) -> Message:
        """The next message from any rank, in order of arrival. A departure is a message."""

    def poll(self, *calls: Handle, deadline_s: float | None = None) -> Message | None:
        """The next message, if one has arrived; otherwise None, at once.

        With `calls`: waits for a message or for all of these calls, whichever is first, and returns None if it was the
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
        """Where other endpoints listen, in worlds that have addresses."""
        return {}

    def introduce(self, addresses: Mapping[int, str]) -> None:
        """Learn where other endpoints listen."""

    def watch(self, ranks: Sequence[int]) -> None:
        """Make `recv` report the departure of these ranks, also of one that never sends a message."""

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
        """Drop every exchange and the group, so that members that have not noticed the loss yet notice it."""

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
        """Every worker's flat tensor, one row each, for checks: not counted as traffic, takes no simulated time.

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
        """Return once every worker has called this."""
        self.wait(self.all_reduce(torch.zeros(1)))
