"""Who takes part in a run: its processes, and which of their ranks are workers and which are servers.

Roles are sets, never ranges of numbers: a run begins with workers 0 … N-1 and servers N … N+M-1, but ranks come and
go, and whoever comes gets a number that nobody had before. A process that was started is first *starting*, then, once
it has joined, a *member*:

    settled     it takes part: a worker of the present generation, a server, or a worker with servers beside it
    newcomer    it was asked for while the run was under way, and no plan has named it yet
    retired     a plan left it out: it ends by itself, and nobody waits for it
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from podium.comm.base import Message
from podium.comm.sockets import Address
from podium.errors import ConfigError

Role = Literal["worker", "server"]
Kind = Literal["first", "replacement", "newcomer"]
"""Why a process was started: the run began with it, a server was lost, or more ranks were asked for."""
MOST_RANKS = 4096
"""Of each role, at the same time."""
FIRST_RESERVED = 0xFFFE
"""Numbers from here on are no rank's: the coordinator has one, and so has whoever asks for a change."""


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Who takes part, how long each may take, and what a loss means."""

    workers: int
    servers: int = 0
    ranks: tuple[int, ...]
    """The number of each process: its worker's, or its server's where it has none."""
    survives_loss: bool
    """Whether the workers can go on in other numbers than they are."""
    replaces_servers: bool = False
    """Whether a lost server is started anew, and gets its state back from others."""
    fixed: str = ""
    """Why nobody may join or retire, where the strategy could bear it; empty if one may."""
    most_workers: int = MOST_RANKS
    heartbeat_s: float
    deadline_s: float
    start_deadline_s: float


@dataclass
class Start:
    """A process that was started and has not joined."""

    endpoints: tuple[int, ...]
    kind: Kind
    role: Role
    """What its number is; the other endpoints are servers."""
    since: float = field(default_factory=time.monotonic)

    @property
    def rank(self) -> int:
        """The number of the process is that of its first endpoint."""
        return self.endpoints[0]


@dataclass
class Member:
    """What the coordinator knows of one process that has joined."""

    rank: int
    endpoints: tuple[int, ...]
    start: Start
    standing: Literal["settled", "newcomer", "retired"] = "settled"
    seen: float = field(default_factory=time.monotonic)
    busy: float = 0.0
    """When it last said that it had something to do which takes as long as it takes."""
    begun: bool = False
    waits: bool = False
    """Whether it waits for a plan."""
    step: int = 0
    moved: float = 0.0
    """When it was first heard that it had come to this step."""
    finished: bool = False
    failed: bool = False
    owes: int = 0
    """Steps that were done before it came: one that has fewer has not taken over anybody's state yet."""
    left_out: float = 0.0
    """When it was retired."""

    @property
    def role(self) -> Role:
        return self.start.role

    @property
    def active(self) -> bool:
        return not self.finished and not self.failed

    @property
    def ready(self) -> bool:
        """Whether it has all it needs of its own, and only others are waited for."""
        needs_plan = self.standing == "newcomer" and self.role == "worker"
        return self.begun and (self.waits or not needs_plan)


class Roster:
    """The processes of a run and the roles of their ranks."""

    def __init__(self, rules: Rules) -> None:
        self.members: dict[int, Member] = {}
        self.workers = set(range(rules.workers))
        """Those of the present generation, until they are lost or retired."""
        self.servers = set(range(rules.workers, rules.workers + rules.servers))
        """Those that the workers use; one that is being replaced stays among them."""
        self.starting: dict[int, Start] = {}
        for rank in rules.ranks:
            self.begin((rank,), "first", "worker" if rank in self.workers else "server")
        self.known: set[int] = set()
        """All that ever joined."""
        self.addresses: dict[int, Address] = {}
        """Where each endpoint listens, or did when it was last heard of."""
        self.since_start: set[int] = set()
        """Endpoints whose address was not in the book that the first ones got."""
        self._next = rules.workers + rules.servers

    @property
    def all_joined(self) -> bool:
        """Whether those that the run begins with are there."""
        return not any(start.kind == "first" for start in self.starting.values())

    def numbers(self, count: int) -> list[int]:
        """That many numbers which nobody had."""
        if self._next + count > FIRST_RESERVED:
            raise ConfigError(f"scale: ranks must be numbered below {FIRST_RESERVED}, and {self._next} are used up")
        self._next += count
        return list(range(self._next - count, self._next))

    def begin(self, endpoints: tuple[int, ...], kind: Kind, role: Role) -> None:
        """A process is started now. Which servers live beside the first workers is known once they join."""
        self.starting[endpoints[0]] = Start(endpoints, kind, role)

    def admit(self, message: Message) -> Member | None:
        """Whoever joins becomes a member; None for one that was given up before."""
        start = self.starting.pop(message.source, None)
        if start is None:
            return None
        member = Member(message.source, tuple(message.meta["endpoints"]), start)
        if start.kind == "newcomer":
            member.standing = "newcomer"
        self.members[member.rank] = member
        self.known.add(member.rank)
        addresses: dict[str, Address] = message.meta["addresses"]
        self.addresses.update({int(rank): address for rank, address in addresses.items()})
        if start.kind != "first":
            self.since_start.update(member.endpoints)
        return member

    def remove(self, member: Member) -> None:
        del self.members[member.rank]
        self.workers.discard(member.rank)

    def retire(self, ranks: Iterable[int]) -> None:
        """These are left out from now on."""
        for rank in ranks:
            self.workers.discard(rank)
            self.servers.discard(rank)
            if rank in self.members:
                self.members[rank].standing, self.members[rank].left_out = "retired", time.monotonic()

    def settle(self, newcomers: Iterable[Member], steps: int) -> None:
        """These take part from now on, and are to take over a state of that many steps."""
        for member in newcomers:
            member.standing, member.owes = "settled", steps
            (self.workers if member.role == "worker" else self.servers).add(member.rank)

    # Who is there.

    def live_workers(self) -> list[Member]:
        """Those of the present generation that have neither ended nor failed, in order."""
        return [m for rank, m in sorted(self.members.items()) if m.active and rank in self.workers]

    def newcomers(self) -> list[Member]:
        return [m for _, m in sorted(self.members.items()) if m.standing == "newcomer" and m.active]

    def coming_servers(self) -> set[int]:
        """Those that are starting or have joined, and no plan has named yet."""
        starts = [*self.starting.values(), *(m.start for m in self.newcomers())]
        return {start.rank for start in starts if start.kind == "newcomer" and start.role == "server"}

    def servers_of(self, member: Member) -> list[int]:
        """The servers in its process that the run uses."""
        return [e for e in member.endpoints if e in self.servers]

    def present_address(self, server: int) -> Address | None:
        """Where a server listens that is there now; None for one that is gone or not back yet."""
        there = any(server in m.endpoints and m.active for m in self.members.values())
        return self.addresses.get(server) if there else None

    @property
    def replacing(self) -> bool:
        """Whether a server that is to replace a lost one is not serving yet."""
        return any(s.kind == "replacement" for s in self.starting.values()) or any(
            m.start.kind == "replacement" and m.active and not m.begun for m in self.members.values()
        )

    @staticmethod
    def describe(member: Member) -> str:
        """`worker 0 with server 2`."""
        if member.role == "server":
            return name_ranks(member.endpoints, "server")
        beside = [e for e in member.endpoints if e != member.rank]
        return f"worker {member.rank}" + (f" with {name_ranks(beside, 'server')}" if beside else "")


def name_ranks(ranks: Iterable[int], what: str = "rank") -> str:
    """`rank 2`, or `ranks 2, 3`."""
    numbers = list(ranks)
    return f"{what}{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
