"""`podium bench hosts`: one training step of all-reduce across hosts, beside DistributedDataParallel over gloo.

Hosts are namespaces of this machine that share nothing (`podium.testing.Hosts`): it needs root. Links between them are
shaped to `gbits` each way, or as fast as the kernel (0). Podium sums in rank order, in shared memory inside a host and
over its channel between hosts; DDP sums through gloo's flat ring over all ranks. `podium` sends in clear, as DDP cannot
but do; `podium_tls` encrypts what leaves a host, as `podium train` does by default.

All train the same model from the same start on the same batches. Each contender has its own ranks, one thread each;
contenders take turns in rounds of a few steps, and those that are not measured wait. A round's time is the slowest
rank's. `barrier_only` is a plain step on every rank and a barrier: no synchronous exchange can beat it, and with more
ranks than cores most of a step may be that. `exchange_ms` is the time of a step beyond it. At the end `difference`
compares all parameters: the contenders must have done the same work. The burst that a token bucket lets through
unshaped makes small messages faster than on a real link, for all alike.

`start_up` holds the seconds from command to first step of 8 ranks on 3 hosts, by launcher (`start_up.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from podium.comm.real.certificates import run_keys
from podium.engine.files import load_tensors
from podium.errors import ConfigError
from podium.lab.bench.harness import check_at_least, check_names, interleave, ratio, spread_ms
from podium.lab.bench.peers.ddp import DDP_OPTIONS, DDP_TUNED
from podium.lab.bench.peers.host_rank import BARRIER_ONLY, PODIUM_TLS, Rank
from podium.lab.bench.peers.host_team import HostTeam
from podium.lab.bench.start_up import LAUNCHERS, start_up
from podium.lab.bench.step import TASKS, difference
from podium.launch.hosts.invitation import write_keys
from podium.testing.hosts import Hosts, why_not

PEERS = ("ddp", "none")
_FIRST_PORT = 29600


class Setting(NamedTuple):
    """What is measured on one set of hosts."""

    task: str
    data_dir: str
    hosts: int
    ranks_per_host: int
    gbits: float
    steps: int
    rounds: int


def bench_hosts(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    tasks: tuple[str, ...] = TASKS,
    gbits: tuple[float, ...] = (1.0, 10.0, 0.0),
    ranks_per_host: tuple[int, ...] = (1, 2),
    hosts: int = 2,
    steps: int = 3,
    collectives: tuple[str, ...] = ("default",),
    launchers: tuple[str, ...] = LAUNCHERS,
    start_rounds: int = 3,
    data_dir: str = ".",
) -> dict[str, Any]:
    """Rows by task, ranks per host and rate of the links: times, and `ratio`, Podium's time / the faster DDP's.

    `peers`: DDP unless `none`. `gbits`: rates of each host's link; 0: not shaped. `collectives`: Podium's; `ratio`
    is about the first of them. `launchers`: whose start-up is measured, `start_rounds` times each; `none`: no one's.
    """
    peers = peers or PEERS[:1]
    check_names("launcher of bench hosts", launchers, (*LAUNCHERS, "none"))
    _check(peers, tasks, gbits, ranks_per_host, hosts, steps, collectives)
    rows = [
        _row(Setting(task, data_dir, hosts, each, rate, steps, rounds or 9), tuple(collectives), "ddp" in peers)
        for task in tasks
        for each in ranks_per_host
        for rate in gbits
    ]
    return {
        "bench": "hosts",
        "peers": list(peers),
        "hosts": hosts,
        "steps_per_round": steps,
        "rows": rows,
        "start_up": start_up(
            tuple(name for name in launchers if name != "none"), hosts=3, ranks=8, rounds=start_rounds
        ),
    }


def _check(
    peers: Sequence[str],
    tasks: Sequence[str],
    gbits: Sequence[float],
    ranks_per_host: Sequence[int],
    hosts: int,
    steps: int,
    collectives: Sequence[str],
) -> None:
    check_names("peer of bench hosts", peers, PEERS)
    check_at_least("hosts", 1, steps=steps, ranks_per_host=min(ranks_per_host, default=0), tasks=len(tasks))
    check_at_least("hosts", 2, hosts=hosts)
    check_at_least("hosts", 0, gbits=min(gbits, default=-1))
    if not collectives:
        raise ConfigError("bench hosts: collectives must name at least one, got none")
    if reason := why_not():
        raise ConfigError(f"bench hosts cannot run here: {reason}")


def _row(setting: Setting, collectives: tuple[str, ...], with_peers: bool) -> dict[str, Any]:
    ours = (*("podium" if name == "default" else f"podium:{name}" for name in collectives), PODIUM_TLS)
    peers = tuple(DDP_OPTIONS) if with_peers else ()
    names = (*ours, *peers, BARRIER_ONLY)
    with Hosts(setting.hosts, mbit=setting.gbits * 1000 or None) as hosts, ExitStack() as ends:
        keys = _hand_out_keys(hosts)
        teams: dict[str, HostTeam] = {}
        for n, name in enumerate(names):
            teams[name] = HostTeam(list(hosts), _ranks(setting, hosts, name, _FIRST_PORT + n, keys))
            ends.callback(teams[name].end)
        times = interleave(
            {name: partial(_measure, team, setting.steps) for name, team in teams.items()}, setting.rounds, warmup=2
        )
        finals = {}
        for n, name in enumerate((*ours, *peers)):
            teams[name].ask("save", members=[0], path=f"/tmp/final-{n}.safetensors")
            finals[name] = load_tensors(hosts[0].folder / f"final-{n}.safetensors")
    spread = {name: spread_ms(measured) for name, measured in times.items()}
    row: dict[str, Any] = {**setting._asdict(), "step_ms": spread}
    row["difference"] = max((difference(finals[ours[0]], other) for other in finals.values()), default=0.0)
    floor = spread[BARRIER_ONLY]["median"]
    row["exchange_ms"] = {name: spread[name]["median"] - floor for name in finals}
    if peers:
        as_started = min(set(peers) - {DDP_TUNED}, key=lambda name: spread[name]["median"])
        tuned = min(peers, key=lambda name: spread[name]["median"])
        row |= {**ratio(times[ours[0]], times[as_started]), "against": as_started}
        row["ratio_to_fastest_ddp"] = {**ratio(times[ours[0]], times[tuned]), "against": tuned}
        row["ratio_with_tls"] = ratio(times[PODIUM_TLS], times[as_started])
        row["ratio_of_barrier_only"] = ratio(times[BARRIER_ONLY], times[as_started])
    return row


def _hand_out_keys(hosts: Hosts) -> tuple[str, str, str]:
    """Give every host the keys of one run, as a launcher does; returns their paths there."""
    keys = run_keys()
    for host in hosts:
        (folder := host.folder / "keys").mkdir(mode=0o700)
        files = write_keys(keys, folder)
    cert, key, ca = (f"/tmp/keys/{Path(path).name}" for path in (files.cert, files.key, files.ca))
    return cert, key, ca


def _ranks(setting: Setting, hosts: Hosts, contender: str, port: int, keys: tuple[str, str, str]) -> list[Rank]:
    size, first = len(hosts) * setting.ranks_per_host, hosts[0].address
    own = keys if contender == PODIUM_TLS else None
    return [
        Rank(contender, n, size, host.name, host.address, first, port, setting.task, setting.data_dir, own)
        for n, host in enumerate(host for host in hosts for _ in range(setting.ranks_per_host))
    ]


def _measure(team: HostTeam, steps: int) -> float:
    """One round: seconds per step of the slowest rank."""
    return max(float(took) for took in team.ask("round", steps=steps))
