"""The processes of a run, and which of their ranks are workers and which are servers.

Roles are sets, never ranges of numbers: a run begins with workers 0 … N-1 and servers N … N+M-1, but ranks join and
leave, and a new rank gets a number that no rank had before. The standing of a member:

    settled     it takes part: a worker of the present generation, a server, or a worker with servers beside it
    newcomer    it was requested during the run, and no plan has named it yet
    retired     a plan left it out: it ends by itself, and no rank waits for it
"""

from __future__ import annotations

from collections.abc import Iterable

from podium.comm.base import Message
from podium.comm.clocks import Clock
from podium.comm.real.sockets import Address
from podium.errors import ConfigError
from podium.launch.coordination.members import Kind, Member, Start
from podium.launch.coordination.rules import FIRST_RESERVED, Role, Rules


class Roster:
    """The processes of a run and the roles of their ranks."""

    def __init__(self, rules: Rules, clock: Clock) -> None:
        self._clock = clock
        self.members: dict[int, Member] = {}
        self.workers = set(range(rules.workers))
        """Workers of the present generation, until they are lost or retired."""
        self.servers = set(range(rules.workers, rules.workers + rules.servers))
        """Servers that the workers use, also one that is being replaced."""
        self.starting: dict[int, Start] = {}
        for rank in rules.ranks:
            self.begin((rank,), "first", "worker" if rank in self.workers else "server")
        self.known: set[int] = set()
        """All processes that ever joined."""
        self.addresses: dict[int, Address] = {}
        """The last known address of each endpoint."""
        self.since_start: set[int] = set()
        """Endpoints that joined later, so that the first members did not get their address when they joined."""
        self._next = rules.workers + rules.servers

    @property
    def all_joined(self) -> bool:
        """Whether all processes that the run begins with have joined."""
        return not any(start.kind == "first" for start in self.starting.values())

    def numbers(self, count: int) -> list[int]:
        """This many numbers that no rank had before."""
        if self._next + count > FIRST_RESERVED:
            raise ConfigError(f"scale: ranks must be numbered below {FIRST_RESERVED}, and {self._next} are used up")
        self._next += count
        return list(range(self._next - count, self._next))

    def begin(self, endpoints: tuple[int, ...], kind: Kind, role: Role) -> None:
        """A process is started now. The servers beside the first workers become known when these join."""
        self.starting[endpoints[0]] = Start(endpoints, kind, role, self._clock.now_s())

    def begin_run(self) -> None:
        """Reset the start time of all starting processes to now."""
        for start in self.starting.values():
            start.since = self._clock.now_s()

    def admit(self, message: Message) -> Member | None:
        """Make a process that joins a member; returns None for one that was given up before."""
        start = self.starting.pop(message.source, None)
        if start is None:
            return None
        gpu = str(message.meta.get("gpu", ""))
        member = Member(message.source, tuple(message.meta["endpoints"]), start, self._clock.now_s(), gpu)
        if start.kind == "newcomer":
            member.standing = "newcomer"
        self.members[member.rank] = member
        self.known.add(member.rank)
        addresses: dict[str, Address] = message.meta["addresses"]
        self.addresses.update({int(rank): address for rank, address in addresses.items()})
        if start.kind != "first":
            self.since_start.update(member.endpoints)
        return member

    def forget(self, rank: int) -> None:
        """This process is gone, whether it had joined or not."""
        self.starting.pop(rank, None)
        if self.members.pop(rank, None) is not None:
            self.workers.discard(rank)

    def retire(self, ranks: Iterable[int]) -> None:
        """The run continues without these ranks."""
        for rank in ranks:
            self.workers.discard(rank)
            self.servers.discard(rank)
            if rank in self.members:
                self.members[rank].retire(self._clock.now_s())

    def settle_newcomers(self, steps: int) -> None:
        """Newcomers take part from now on, and must copy a state of this many steps."""
        for member in self.newcomers():
            member.settle(steps)
            (self.workers if member.role == "worker" else self.servers).add(member.rank)

    # Queries.

    def active(self) -> list[Member]:
        return [member for member in self.members.values() if member.active]

    def live_workers(self) -> list[Member]:
        """Workers of the present generation that have neither ended nor failed, in order."""
        return [m for rank, m in sorted(self.members.items()) if m.active and rank in self.workers]

    def newcomers(self) -> list[Member]:
        return [m for _, m in sorted(self.members.items()) if m.standing == "newcomer" and m.active]

    def servers_of(self, member: Member) -> list[int]:
        """The servers in its process that the run uses."""
        return [e for e in member.endpoints if e in self.servers]

    def present_address(self, server: int) -> Address | None:
        """Where a live server listens; None for one that is gone or not restarted yet."""
        lives = any(server in m.endpoints and m.active for m in self.members.values())
        return self.addresses.get(server) if lives else None

    def address_book(self, reader: Member | None) -> dict[str, object]:
        """All addresses and roles. A new server's list of servers has itself and those that start with it, too."""
        servers = self.servers
        if reader is not None and reader.standing == "newcomer" and reader.role == "server":
            starts = [*self.starting.values(), *(m.start for m in self.newcomers())]
            servers = servers | {s.rank for s in starts if s.kind == "newcomer" and s.role == "server"}
        return {
            "addresses": {str(rank): address for rank, address in self.addresses.items()},
            "workers": sorted(self.workers),
            "servers": sorted(servers),
            "lost": self._lost(),
        }

    def gpus(self, workers: Iterable[int]) -> list[str]:
        """The names of these workers' own GPUs; empty for a worker that has none."""
        return [self.members[rank].gpu if rank in self.members else "" for rank in workers]

    def _lost(self) -> list[int]:
        """Endpoints that have an address and no process: nobody should wait for an answer from there."""
        present = {e for member in self.members.values() for e in member.endpoints}
        present |= {e for start in self.starting.values() for e in start.endpoints}
        return sorted(self.addresses.keys() - present)

    @property
    def replacing(self) -> bool:
        """Whether the replacement of a lost server does not serve yet."""
        return any(s.kind == "replacement" for s in self.starting.values()) or any(
            m.start.kind == "replacement" and m.active and not m.begun for m in self.members.values()
        )
