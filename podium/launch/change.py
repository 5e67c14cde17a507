"""A change of who takes part, asked for while the run is under way.

Newcomers are started beside the run, which does not wait for them. Once all are ready, the workers are told that a
change is wanted, end their stretch at a step they agree on, and meet the newcomers in the next plan. Whoever has to go
has the highest number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podium.comm.base import Meta
from podium.errors import ConfigError, PodiumError
from podium.launch.roster import MOST_RANKS, Member, Role, Roster, Rules


@dataclass
class Change:
    """What was asked for, and who is awaited before the workers are told."""

    workers: int
    servers: int
    awaited: set[int] = field(default_factory=set)
    """Newcomers, until they are in a plan or are given up."""
    announced: bool = False
    """Whether the workers were told, so that their next plan is to carry it out."""


class Changes:
    """The change that is under way, if one is."""

    def __init__(
        self,
        rules: Rules,
        roster: Roster,
        *,
        start: Callable[[Role, int], None] | None,
        give_up: Callable[[int], None],
        announce: Callable[[int], None],
    ) -> None:
        """`start(role, rank)` starts a process, `give_up(rank)` ends it; `announce(number)` tells the workers."""
        self._rules, self._roster = rules, roster
        self._start, self._give_up, self._announce = start, give_up, announce
        self.present: Change | None = None
        self.announced = 0
        """How many changes the workers were told of."""

    @property
    def due(self) -> Change | None:
        """What the next plan is to carry out."""
        return self.present if self.present is not None and self.present.announced else None

    def begin(self, asked: Meta) -> Meta:
        """Take up a request: says who comes and who goes, or refuses."""
        live = self._roster.live_workers()
        if not self._roster.all_joined or not all(member.begun for member in live):
            raise ConfigError("scale: the run must have begun, and is still starting; ask again in a moment")
        if not live:
            raise ConfigError("scale: the run must not be ending, and is")
        if self.present is not None:
            raise ConfigError("scale: one change at a time, and one is under way; ask again once it is done")
        if self._start is None:
            raise ConfigError("scale: the launcher must be able to start ranks, and this one is not")
        wanted = wanted_of(self._rules, self._roster, asked)
        starting: dict[int, Role] = dict.fromkeys(self._roster.numbers(wanted.more_workers), "worker")
        starting.update(dict.fromkeys(self._roster.numbers(wanted.more_servers), "server"))
        if starting or wanted.retiring:
            self._start_all(starting, self._start)
            self.present = Change(wanted.workers, wanted.servers, set(starting))
        return {
            "workers": wanted.workers,
            "servers": wanted.servers,
            "starting": list(starting),
            "retiring": wanted.retiring,
        }

    def _start_all(self, roles: dict[int, Role], start: Callable[[Role, int], None]) -> None:
        for rank, role in roles.items():
            self._roster.begin((rank,), "newcomer", role)
            try:
                start(role, rank)
            except PodiumError as error:  # the run is none the worse for it
                del self._roster.starting[rank]
                for started in [r for r in roles if r in self._roster.starting]:
                    self._give_up(started)
                raise ConfigError(f"scale: {error}") from error

    def move_on(self) -> None:
        """Once no newcomer is awaited any more, call the workers together."""
        change, roster = self.present, self._roster
        if change is None or change.announced:
            return
        if not change.awaited <= {member.rank for member in roster.newcomers() if member.ready}:
            return
        too_many = len(roster.live_workers()) > change.workers or len(roster.servers) > change.servers
        if not change.awaited and not too_many:
            self.present = None  # all that was wanted were newcomers, and none of them came to anything
            return
        change.announced = True
        self.announced += 1
        self._announce(self.announced)

    def call_together(self) -> None:
        """Somebody waits for a plan: let the others end their stretch and come for it, too."""
        self.announced += 1
        self._announce(self.announced)

    def drop(self, rank: int) -> None:
        """This newcomer will not come."""
        if self.present is not None:
            self.present.awaited.discard(rank)
            self.move_on()

    def carry_out(self, steps: int) -> None:
        """Roles are as asked for from here on, and newcomers take over a state of that many steps."""
        change, roster = self.due, self._roster
        assert change is not None
        live = [member.rank for member in roster.live_workers()]
        roster.retire([*live[change.workers :], *sorted(roster.servers)[change.servers :]])
        roster.settle(roster.newcomers(), steps)
        self.present = None


class Wanted(NamedTuple):
    """How many of each there are to be, and who would have to go for that."""

    workers: int
    servers: int
    more_workers: int
    more_servers: int
    retiring: list[int]


def wanted_of(rules: Rules, roster: Roster, asked: Meta) -> Wanted:
    """What a request comes to; refuses what cannot be."""
    if not rules.survives_loss:
        raise ConfigError("scale: the strategy must survive the loss of a worker, and this run's does not")
    if rules.fixed:
        raise ConfigError(f"scale: {rules.fixed}")
    live = roster.live_workers()
    workers = _count("workers", asked.get("workers"), len(live), rules.most_workers)
    if asked.get("servers") is not None and not roster.servers:
        raise ConfigError(f"scale: servers must not be given, since the strategy has none, got {asked['servers']!r}")
    servers = len(roster.servers)
    if servers:
        servers = _count("servers", asked.get("servers"), servers, MOST_RANKS)
    leaving, left_over = live[workers:], sorted(roster.servers)[servers:]
    _check_beside(roster, live, leaving, servers)
    return Wanted(
        workers,
        servers,
        max(0, workers - len(live)),
        max(0, servers - len(roster.servers)),
        [*(m.rank for m in leaving), *left_over],
    )


def _count(name: str, asked: object, now: int, most: int) -> int:
    if asked is None:
        return now
    if not isinstance(asked, int) or isinstance(asked, bool) or not 1 <= asked <= most:
        why = "" if most == MOST_RANKS else ", as many as a global step has samples or the strategy takes"
        raise ConfigError(f"scale: {name} must be a whole number from 1 to {most}{why}, got {asked!r}")
    return asked


def _check_beside(roster: Roster, live: Sequence[Member], leaving: Sequence[Member], servers: int) -> None:
    """A server in a worker's process can neither be added nor go."""
    if servers != len(roster.servers) and any(roster.servers_of(m) for m in live):
        raise ConfigError(
            f"scale: servers must stay {len(roster.servers)}, since they live in the workers' processes, got {servers}"
        )
    for member in leaving:
        if roster.servers_of(member):
            raise ConfigError(f"scale: {roster.describe(member)} cannot retire: the server is needed")
