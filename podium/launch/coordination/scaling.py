"""More or fewer ranks, requested during the run.

Newcomers start while the run continues. Once all are ready, the coordinator announces the change: the workers end their
segment at a step they agree on, and the next plan includes the newcomers. The ranks with the highest numbers retire
first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from podium.comm.base import Message, Meta
from podium.errors import ConfigError, PodiumError
from podium.launch.coordination.context import RunContext
from podium.launch.coordination.members import Member
from podium.launch.coordination.owner import ProcessOwner
from podium.launch.coordination.roster import Roster
from podium.launch.coordination.rules import MOST_RANKS, Role, Rules


@dataclass
class Change:
    """A requested change, and the newcomers it waits for."""

    workers: int
    servers: int
    awaited: set[int] = field(default_factory=set)
    """Newcomers, until they are in a plan or are given up."""
    announced: bool = False
    """Whether it was announced to the workers, so that their next plan makes the change."""


class Scaling:
    """The change under way, if there is one."""

    def __init__(self, run: RunContext) -> None:
        self._run = run
        self._current: Change | None = None
        self.announced = 0
        """How many times the workers were called to a plan."""

    @property
    def due(self) -> Change | None:
        """The change that the next plan makes."""
        return self._current if self._current is not None and self._current.announced else None

    def request(self, message: Message, *, ending: bool) -> None:
        """Answer a request: which ranks start and retire, or why not."""
        post = self._run.post
        try:
            if ending:
                raise ConfigError("scale: the run must not be ending, and is")
            begun = self._begin(message.meta)
        except (PodiumError, OSError) as error:  # a request that cannot be met costs the run nothing
            post.answer(message, {"refused": str(error)})
            return
        if begun["starting"] or begun["retiring"]:
            added = {"hosts": message.meta["hosts"]} if message.meta.get("hosts") else {}
            post.record("scaled", workers=begun["workers"], servers=begun["servers"], **added)
            post.tell({"event": "scale", **begun})
        post.answer(message, begun)
        self.advance()

    def _begin(self, asked: Meta) -> Meta:
        roster = self._run.roster
        live = roster.live_workers()
        if not roster.all_joined or not all(member.begun for member in live):
            raise ConfigError("scale: the run must have begun, and is still starting; ask again in a moment")
        if not live:
            raise ConfigError("scale: the run must not be ending, and is")
        if self._current is not None:
            raise ConfigError("scale: one change at a time, and one is under way; ask again once it is done")
        processes = self._run.processes
        if processes is None:
            raise ConfigError("scale: the launcher must be able to start ranks, and this one is not")
        if asked.get("hosts"):
            slots = self._add_hosts(processes, asked["hosts"])
            asked = {**asked, "workers": len(live) + slots if asked.get("workers") is None else asked["workers"]}
        target = target_of(self._run.rules, roster, asked)
        starting: dict[int, Role] = dict.fromkeys(roster.numbers(target.more_workers), "worker")
        starting.update(dict.fromkeys(roster.numbers(target.more_servers), "server"))
        if starting or target.retiring:
            self._start_all(processes, starting)
            self._current = Change(target.workers, target.servers, set(starting))
        return {
            "workers": target.workers,
            "servers": target.servers,
            "starting": list(starting),
            "retiring": target.retiring,
        }

    def _add_hosts(self, processes: ProcessOwner, lines: object) -> int:
        if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
            raise ConfigError(f"scale: hosts must be a list of lines, got {lines!r}")
        target_of(self._run.rules, self._run.roster, {})  # refuse what cannot be scaled before a host is added
        return processes.add_hosts(lines)

    def _start_all(self, processes: ProcessOwner, roles: dict[int, Role]) -> None:
        roster = self._run.roster
        for rank, role in roles.items():
            roster.begin((rank,), "newcomer", role)
            try:
                processes.start(role, rank)
            except PodiumError as error:  # the run itself loses nothing
                roster.forget(rank)
                for started in [r for r in roles if r in roster.starting]:
                    processes.kill(started)
                    roster.forget(started)
                raise ConfigError(f"scale: {error}") from error

    def advance(self) -> None:
        """Call the workers to a plan once all newcomers are ready."""
        change, roster = self._current, self._run.roster
        if change is None or change.announced:
            return
        if not change.awaited <= {member.rank for member in roster.newcomers() if member.ready}:
            return
        too_many = len(roster.live_workers()) > change.workers or len(roster.servers) > change.servers
        if not change.awaited and not too_many:
            self._current = None  # only newcomers were requested, and all of them were given up
            return
        change.announced = True
        self.call_workers()

    def call_workers(self) -> None:
        """Ask all workers to end their segment and wait for the next plan."""
        self.announced += 1
        for member in self._run.roster.live_workers():
            self._run.post.send(member, "change", {"number": self.announced})

    def drop(self, rank: int) -> None:
        """This newcomer was given up."""
        if self._current is not None:
            self._current.awaited.discard(rank)
            self.advance()

    def cancel(self) -> None:
        self._current = None

    def carry_out(self, steps: int) -> None:
        """Retire and settle ranks as requested; newcomers must copy a state of this many steps."""
        change, roster = self.due, self._run.roster
        assert change is not None
        live = [member.rank for member in roster.live_workers()]
        roster.retire([*live[change.workers :], *sorted(roster.servers)[change.servers :]])
        roster.settle_newcomers(steps)
        self._current = None


class Target(NamedTuple):
    """The requested numbers of workers and servers, and which ranks retire."""

    workers: int
    servers: int
    more_workers: int
    more_servers: int
    retiring: list[int]


def target_of(rules: Rules, roster: Roster, asked: Meta) -> Target:
    """The change that a request means; raises ConfigError where it is impossible."""
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
    return Target(
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
    """A server in a worker's process can neither be added nor retire."""
    if servers != len(roster.servers) and any(roster.servers_of(m) for m in live):
        raise ConfigError(
            f"scale: servers must stay {len(roster.servers)}, since they live in the workers' processes, got {servers}"
        )
    for member in leaving:
        if roster.servers_of(member):
            raise ConfigError(f"scale: {member} cannot retire: the server is needed")
