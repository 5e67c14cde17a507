"""Ranks on hosts: which host each runs on, and what its agent reports of it."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, final

from podium.comm.base import Meta
from podium.config import devices_in
from podium.errors import CommError, ConfigError, PodiumError, RankFailed
from podium.launch.hosts.entries import HostEntry, divide, parse_entry
from podium.launch.hosts.pool import HostPool, HostState
from podium.launch.process import NodeSpec
from podium.launch.rank_processes import Ranks

_END_S = 10.0
_NO_LIMIT = 1 << 16


def place(entries: Sequence[HostEntry], endpoints: Sequence[tuple[int, ...]], workers: int) -> dict[int, int]:
    """The host of each process of a run, by the process's number.

    Servers are spread over the hosts first, one by one, so that a server and the copy of it that the next one holds are
    on different hosts. Workers fill what is left, in order.
    """
    room = divide(entries, len(endpoints))
    placed: dict[int, int] = {}
    turn = 0
    for rank in (e[0] for e in endpoints if e[0] >= workers):
        while not room[turn % len(room)]:
            turn += 1
        placed[rank] = turn % len(room)
        room[turn % len(room)] -= 1
        turn += 1
    for rank in (e[0] for e in endpoints if e[0] < workers):
        host = next(n for n, left in enumerate(room) if left)
        placed[rank] = host
        room[host] -= 1
    return placed


@final
class HostRanks(Ranks):
    """The processes of a run, on the hosts of a pool."""

    def __init__(
        self, pool: HostPool, placed: dict[int, int], script: Meta | None = None, *, threads: int | None = None
    ) -> None:
        """`script`: the user's script and its arguments, where the training loop is its own.

        `threads`: of a rank, where the run sets none; None: the host's cores divided by its ranks.
        """
        self._pool, self._placed, self._script, self._threads = pool, placed, script, threads
        self._where: dict[int, int] = {}
        self._nth: dict[int, int] = {}
        """Each worker's place among those of its host with the same device, which decides its GPU.

        The place of a lost worker is free again.
        """
        self._starting: set[int] = set()
        """Hosts that were added during the run and are not ready yet."""

    def add_hosts(self, lines: Sequence[str]) -> int:
        entries = [parse_entry(line) for line in lines]
        known = {state.entry.target for state in self._pool.hosts.values() if state.is_up and state.answers}
        if again := [entry.target for entry in entries if entry.target in known]:
            raise ConfigError(f"scale: host {again[0]} takes part already")
        self._starting.update(self._pool.start(entries))
        return sum(entry.slots or 1 for entry in entries)

    def launch(self, spec: NodeSpec) -> None:
        pool, rank = self._pool, spec.rank
        with pool.changed:
            first = rank not in self._where and not spec.late and not spec.replaces
            host = pool.hosts[self._placed[rank]] if first else self._least_loaded()
            self._where[rank] = host.number
            host.ended.pop(rank, None)
            host.running[rank] = True
            host.starts[rank] = host.starts.get(rank, 0) + 1
            here = [r for r in self._living(host) if r != rank]
            if spec.role == "worker":
                devices = devices_in(spec.config["device"])
                mine = devices[rank % len(devices)]
                alike = [r for r in here if r in self._nth and devices[r % len(devices)] == mine]
                self._nth[rank] = min(set(range(len(alike) + 1)) - {self._nth[r] for r in alike})
        spec = dataclasses.replace(
            spec,
            secret="",  # the agent has it; without TLS, this order can be read on the way
            config={**spec.config, "threads": spec.config["threads"] or self._threads},
        )
        order = {
            "spec": dataclasses.asdict(spec),
            "script": self._script,
            "start": host.starts[rank],
            "nth": self._nth.get(rank),
            "gpus": host.entry.gpus,
            "placed": max(len(here) + 1, self._planned(host)),
        }
        if host.ready:
            self._send(host, order)
        else:
            threading.Thread(target=self._send_when_ready, args=(host, order), name="late-host", daemon=True).start()

    def _send(self, host: HostState, order: Meta) -> None:
        try:
            self._pool.send(host.number, "start", order)
        except CommError as error:
            rank = order["spec"]["rank"]
            raise RankFailed(f"rank {rank} could not be started on host {host.label}: {error}") from error

    def _send_when_ready(self, host: HostState, order: Meta) -> None:
        """A rank on a host that was added a moment ago: if the host cannot take part, the rank has ended."""
        try:
            self._pool.wait_ready([host.number])
            self._send(host, order)
        except PodiumError as error:
            with self._pool.changed:
                host.ended[int(order["spec"]["rank"])] = str(error)
                self._pool.changed.notify_all()
        self._starting.discard(host.number)

    def _living(self, host: HostState) -> list[int]:
        """Ranks that were started on this host and have not ended."""
        return [rank for rank, number in self._where.items() if number == host.number and rank not in host.ended]

    def _planned(self, host: HostState) -> int:
        """How many ranks of the run the host is to have: they share its cores."""
        return max(1, sum(number == host.number for number in self._placed.values()))

    def _least_loaded(self) -> HostState:
        """The host with most free slots, for a rank that joins or replaces another."""
        there = [state for state in self._pool.hosts.values() if state.gone is None]
        up = [state for state in there if state.number in self._starting or (state.is_up and state.answers)]
        up = up or [state for state in there if state.ready]  # none was heard a moment ago: this machine was busy
        if not up:
            raise RankFailed("no host is left that could start a rank")
        load = {state.number: len(self._living(state)) for state in up}
        return min(up, key=lambda s: (load[s.number] >= (s.entry.slots or _NO_LIMIT), load[s.number], s.number))

    def kill(self, rank: int) -> None:
        state = self._state(rank)
        if state is not None and state.is_up:
            try:
                self._pool.send(state.number, "kill", {"rank": rank})
            except CommError:  # the host is gone, and the rank with it
                return

    def how_it_ended(self, rank: int, wait_s: float) -> str | None:
        state = self._state(rank)
        if state is None:
            return "it was never started"
        with self._pool.changed:
            self._pool.changed.wait_for(lambda: rank in state.ended or state.gone is not None, wait_s)
            if rank in state.ended:
                return f"on host {state.label}: {state.ended[rank]}"
        why = state.why_gone()  # without the lock: what the agent printed last may take a moment
        return None if why is None else f"its host {state.label} is lost: {why}"

    def where(self, rank: int) -> str:
        state = self._state(rank)
        return "" if state is None else state.label

    def is_running(self, rank: int) -> bool:
        state = self._state(rank)
        if state is None or not state.is_up or rank in state.ended:
            return False
        return state.answers and state.running.get(rank, True)

    def join(self) -> None:
        self._wait_for_ends()

    def end(self) -> None:
        for rank in self._where:
            if self._state(rank) is not None and rank not in self._pool.hosts[self._where[rank]].ended:
                self.kill(rank)
        self._wait_for_ends()

    def _wait_for_ends(self) -> None:
        def over() -> bool:
            states = ((rank, self._pool.hosts[number]) for rank, number in self._where.items())
            return all(rank in state.ended or not state.answers for rank, state in states)

        with self._pool.changed:
            self._pool.changed.wait_for(over, _END_S)

    def _state(self, rank: int) -> HostState | None:
        number = self._where.get(rank)
        return None if number is None else self._pool.hosts[number]

    def describe(self) -> dict[str, Any]:
        """Where each rank ran, for the manifest."""
        return {str(rank): self._pool.hosts[number].label for rank, number in sorted(self._where.items())}
