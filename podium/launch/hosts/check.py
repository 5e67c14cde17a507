"""`podium cluster check`: can these hosts train together, how fast are they and their links?

    from podium.launch.hosts.check import check_hosts
    found = check_hosts("hosts.txt", out="cluster.toml")

An agent is started on each host as a run would start it. Every host connects to every other at the address and with the
keys that a run would use; then pairs are measured one at a time, in both directions, so that no measurement disturbs
another. A host that cannot take part does not stop the check of the others.
"""

from __future__ import annotations

import contextlib
import math
import os
import platform
import random
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch

import podium
from podium.comm.base import Meta
from podium.config import ON_HOSTS, RunConfig, build
from podium.errors import ConfigError, PodiumError, UnknownName
from podium.launch.clusters.description import Cluster
from podium.launch.clusters.writing import write_cluster
from podium.launch.hosts.base import Starter
from podium.launch.hosts.entries import HostEntry
from podium.launch.hosts.failure import Failure
from podium.launch.hosts.invitation import Invitation, write_keys
from podium.launch.hosts.launcher import head_channel, keys_for, starter_of
from podium.launch.hosts.measured import SLOW, HostReport, LinkReport, slow_devices, to_cluster
from podium.launch.hosts.pool import HostPool, HostState
from podium.launch.hosts.probe import AT_ONCE, REACH_S, SAMPLE_S, SLOWEST_S
from podium.launch.rendezvous import rendezvous_folder

LINKS_S = 45.0
"""How long the measurements of links may take together."""
LONGEST_S, SHORTEST_S = 1.0, 0.1
"""How long one of them sends, at most and at least."""
_WAVES, _SAMPLES, _FEWER, _MOST_GPUS = 20, 5, 3, 16
_ANSWER_S = 30.0

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class ClusterCheck:
    """What was found."""

    head: dict[str, Any]
    """This machine: its address for the hosts, versions, and whether the channel uses TLS."""
    hosts: tuple[HostReport, ...]
    links: tuple[LinkReport, ...]
    cluster: Cluster | None
    """Those hosts, as a cluster file describes them."""
    file: str | None
    """The cluster file that was written."""

    @property
    def ok(self) -> bool:
        """Whether all hosts can take part, and reach each other."""
        return all(host.ok for host in self.hosts) and all(link.ok for link in self.links)

    @property
    def pairs(self) -> int:
        """Pairs of hosts that can take part."""
        return math.comb(sum(host.ok for host in self.hosts), 2)

    @property
    def pairs_measured(self) -> int:
        """Those of them that were measured: where they are many, some."""
        return len({frozenset((link.source, link.target)) for link in self.links if link.mbit is not None})

    def to_dict(self) -> dict[str, Any]:
        """Everything, in JSON types."""
        return {
            "ok": self.ok,
            "head": self.head,
            "hosts": [host.to_dict() for host in self.hosts],
            "slow_factor": SLOW,
            "links": [link.to_dict() for link in self.links],
            "pairs": self.pairs,
            "pairs_measured": self.pairs_measured,
            "cluster": None if self.cluster is None else self.cluster.to_dict(),
            "file": self.file,
        }


def check_hosts(
    hosts: str | None = None, *, launcher: str = "ssh", out: str | None = None, tell: Tell | None = None, **options: Any
) -> ClusterCheck:
    """Check hosts for runs with this launcher; takes about a minute at most.

    `hosts`: a file with a line per host, or names separated by commas. `out`: the cluster file to write. `tell` is
    called with what is done next. `options` are other fields of `RunConfig`, such as `head` and `tls`.
    """
    asked = {"launcher": launcher, "hosts": hosts, **options}
    return check_cluster(build(RunConfig, asked, who="cluster check"), out=out, tell=tell)


def check_cluster(config: RunConfig, *, out: str | None = None, tell: Tell | None = None) -> ClusterCheck:
    """As `check_hosts`, for the hosts and the settings of a run."""
    if config.launcher not in ON_HOSTS:
        raise UnknownName("launcher of hosts", config.launcher, ON_HOSTS)
    if config.launcher == "slurm" and "SLURM_JOB_ID" not in os.environ:
        raise ConfigError(
            "cluster check: under launcher slurm it checks the nodes of an allocation, and this process is in none: "
            "salloc --nodes=N podium cluster check --launcher slurm"
        )
    with contextlib.closing(starter_of(config, (), tell or _silent)) as starter:
        found = _Check(config, starter, starter.entries(0), tell or _silent).run()
    if out is not None and found.cluster is not None:
        write_cluster(out, found.cluster, _comments(found))
        found = replace(found, file=out)
    return found


class _Check:
    """One check: what failed and what was measured, by the hosts' names as the user has listed them."""

    def __init__(self, config: RunConfig, starter: Starter, entries: Sequence[HostEntry], tell: Tell) -> None:
        self._config, self._starter, self._entries, self._tell = config, starter, list(entries), tell
        self._failures: dict[str, Failure] = {}
        self._states: dict[str, HostState] = {}
        self._computed: dict[str, Meta] = {}
        self._links: dict[tuple[str, str], LinkReport] = {}

    def run(self) -> ClusterCheck:
        address, tls = self._address(), False
        if address is not None:
            with self._pool(address) as (pool, tls):
                self._meet(pool)
                self._compute(pool)
                self._connect(pool)
                for state in (state for state in pool.hosts.values() if state.gone is not None):
                    self._lose(state, state.gone or "")
        return self._report({"address": address, "tls": tls, **_versions()})

    def _address(self) -> str | None:
        """This machine's address for the hosts; None where it has none for any of them."""
        if self._config.head is not None:
            return self._config.head
        for entry in self._entries:
            if (failure := self._starter.unknown(entry)) is not None:
                self._failures[entry.target] = failure
        named = self._left()
        try:
            return self._starter.head_address(named) if named else None
        except PodiumError as error:
            self._failures |= {e.target: Failure(str(error), "give it: --set head=ADDRESS") for e in named}
            return None

    def _left(self) -> list[HostEntry]:
        """Hosts that nothing is known against."""
        return [entry for entry in self._entries if entry.target not in self._failures]

    @contextmanager
    def _pool(self, address: str) -> Iterator[tuple[HostPool, bool]]:
        config, secret = self._config, secrets.token_bytes(32)
        with rendezvous_folder() as folder:
            keys = keys_for(config, address)
            tls = None if keys is None else write_keys(keys, folder)
            channel = head_channel(address, secret, tls)
            invitation = Invitation(channel.address, secret, None, keys, config.start_deadline_s, for_run=False)
            pool = HostPool(channel, self._starter, invitation)
            try:
                yield pool, tls is not None
            finally:
                pool.close()

    def _meet(self, pool: HostPool) -> None:
        """Start the agents, and wait until each is ready or known to have failed."""
        entries = self._left()
        self._tell(f"starting an agent on {_count(len(entries), 'host')}")
        for number, failure in pool.settle(pool.start(entries)).items():
            state = pool.hosts[number]
            self._states[state.label] = state
            if failure is not None:
                self._failures[state.label] = failure

    def _able(self) -> dict[int, str]:
        """Hosts that can take part: the names by their agents' numbers."""
        able = [state for name, state in self._states.items() if name not in self._failures]
        return {state.number: state.label for state in able}

    def _ask(self, pool: HostPool, kind: str, asked: Mapping[int, Meta], deadline_s: float) -> dict[int, Meta]:
        """Answers of the agents, without those of agents that are lost: they can take part no more."""
        answers = pool.call_all(kind, asked, deadline_s)
        for number, answer in answers.items():
            if "lost" in answer:
                self._lose(pool.hosts[number], answer["lost"])
        return {number: answer for number, answer in answers.items() if "lost" not in answer}

    def _lose(self, state: HostState, why: str) -> None:
        self._fail(state.label, f"its agent was lost: {why}", self._starter.advice(state.entry))

    def _compute(self, pool: HostPool) -> None:
        """One host at a time, or where they are many some at a time, since several may be one machine's."""
        able = self._able()
        if not able:
            return
        self._tell(f"computing on {_count(len(able), 'host')}")
        samples, at_once = (_SAMPLES if len(able) <= _WAVES else _FEWER), math.ceil(len(able) / _WAVES)
        numbers = list(able)
        for first in range(0, len(numbers), at_once):
            wave = numbers[first : first + at_once]
            limit = _ANSWER_S + _MOST_GPUS * samples * SAMPLE_S
            for number, answer in self._ask(pool, "compute", {n: {"samples": samples} for n in wave}, limit).items():
                if "error" in answer:
                    self._fail(able[number], f"it cannot compute: {answer['error']}", "podium doctor, on that host")
                else:
                    self._computed[able[number]] = answer

    def _fail(self, host: str, what: str, fix: str) -> None:
        self._failures.setdefault(host, Failure(what, fix))

    def _connect(self, pool: HostPool) -> None:
        """Every host to every other; then measure pairs."""
        able = self._able()
        if len(able) < 2:
            return
        self._tell(f"connecting {len(able)} hosts with each other")
        addresses: dict[int, str] = {}
        for number, answer in self._ask(pool, "listen", {n: {} for n in able}, _ANSWER_S).items():
            if "error" in answer:
                self._fail(able[number], f"it cannot listen: {answer['error']}", "is that address its own? ip addr")
            else:
                addresses[number] = answer["address"]
        asked = {n: {"peers": {str(m): addresses[m] for m in addresses if m != n}} for n in addresses}
        limit = REACH_S * math.ceil(len(able) / AT_ONCE) + _ANSWER_S
        for number, answer in self._ask(pool, "reach", asked, limit).items():
            for peer in (m for m in addresses if m != number):
                why = answer["error"] if "error" in answer else answer["failed"].get(str(peer))
                self._link(pool, number, peer, why)
        self._measure(pool, addresses)

    def _link(self, pool: HostPool, source: int, target: int, why: str | None, **measured: float) -> None:
        a, b = pool.hosts[source], pool.hosts[target]
        failure = None
        if why is not None:
            what = f"no connection to {b.label}: {why}"
            failure = Failure(what, _open_ports(a, b))
        self._links[a.label, b.label] = LinkReport(source=a.label, target=b.label, failure=failure, **measured)

    def _measure(self, pool: HostPool, addresses: Mapping[int, str]) -> None:
        reached = {(link.source, link.target) for link in self._links.values() if link.ok}
        names = {number: pool.hosts[number].label for number in addresses}
        linked = [
            (a, b) for a, b in combinations(addresses, 2) if {(names[a], names[b]), (names[b], names[a])} <= reached
        ]
        chosen = choose_pairs(linked, most=int(LINKS_S / SHORTEST_S / 2))
        if not chosen:
            return
        budget_s = min(LONGEST_S, LINKS_S / len(chosen) / 2)
        self._tell(f"measuring {_count(len(chosen), 'pair')} of hosts, {budget_s:.1f} s each way")
        for pair in chosen:
            for source, target in (pair, pair[::-1]):
                if not all(pool.hosts[n].is_up for n in pair):
                    continue
                meta = {"peer": target, "address": addresses[target], "budget_s": budget_s}
                limit = REACH_S + SLOWEST_S + 4 * budget_s
                for answer in self._ask(pool, "measure", {source: meta}, limit).values():
                    why = answer.pop("error", None)
                    self._link(pool, source, target, why, **answer)

    def _report(self, head: dict[str, Any]) -> ClusterCheck:
        computed = {name: answer for name, answer in self._computed.items() if name not in self._failures}
        slow = slow_devices(
            {name: answer["cpu_ms"] for name, answer in computed.items()},
            {name: answer["gpus_ms"] for name, answer in computed.items()},
        )
        hosts = []
        for entry in self._entries:
            name, state = entry.target, self._states.get(entry.target)
            answer = self._computed.get(name, {})
            hosts.append(
                HostReport(
                    host=name,
                    failure=self._failures.get(name),
                    facts=None if state is None else state.facts,
                    clock_skew_s=None if state is None else state.clock_skew_s,
                    cpu_ms=answer.get("cpu_ms"),
                    gpus_ms=tuple(answer.get("gpus_ms", ())),
                    slow=slow.get(name, ()),
                )
            )
        able = {host.host for host in hosts if host.ok}
        links = tuple(link for ends, link in self._links.items() if able.issuperset(ends))
        return ClusterCheck(
            head=head,
            hosts=tuple(hosts),
            links=links,
            cluster=to_cluster(hosts, links),
            file=None,
        )


def choose_pairs(pairs: Sequence[tuple[int, int]], most: int) -> list[tuple[int, int]]:
    """All pairs, or as many as may be measured: each host with the next one, and others at random."""
    if len(pairs) <= most:
        return list(pairs)
    ring = [(a, b) for a, b in pairs if b == a + 1]
    others = [pair for pair in pairs if pair not in set(ring)]
    drawn = random.Random(0).sample(others, max(0, most - len(ring)))
    return sorted([*ring[:most], *drawn])


def _open_ports(source: HostState, target: HostState) -> str:
    """What to do where one host cannot connect to another."""
    assert source.facts is not None and target.facts is not None
    return (
        f"on {target.label}: let {source.facts.address} connect to {target.facts.address} (ranks listen at ports that "
        "the kernel chooses: cat /proc/sys/net/ipv4/ip_local_port_range)"
    )


def _versions() -> dict[str, str]:
    return {"podium": podium.__version__, "torch": torch.__version__, "python": platform.python_version()}


def _comments(found: ClusterCheck) -> list[str]:
    """What a reader of the cluster file should know."""
    able = [host.host for host in found.hosts if host.ok]
    left = [host.host for host in found.hosts if not host.ok]
    how = "with TLS" if found.head["tls"] else "without TLS"
    lines = [
        f"Measured by `podium cluster check` {podium.__version__} on {time.strftime('%Y-%m-%d')}: {', '.join(able)}.",
        f"Rates and latencies are those of the channel, {how}; {found.pairs_measured} of {found.pairs} pairs measured.",
        "Speed 1 is the fastest of these hosts, by a product of matrices. What a sample of your task takes there is",
        "`seconds_per_sample` in [cluster].",
    ]
    return lines + ([f"Not part of it, since they failed: {', '.join(left)}."] if left else [])


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"


def _silent(_text: str) -> None:
    pass
