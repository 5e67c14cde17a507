"""`podium bench collectives`: all-reduce by each collective, beside gloo and the bandwidth of the link.

Every worker is a process with one thread. `host`: the workers share one machine, so Podium may use shared memory;
`link`: each runs in its own network namespace, whose link is shaped to `link_gbits` each way. Podium's workers and
gloo's are different processes, set up as their users have them; on the host gloo is also measured with the allocator
setting of Podium's ranks (`podium.engine.allocator`), so that its effect is not mistaken for better communication. Each
collective must first prove that it computes the sum (`peers/summing.py`).

In each round all contenders are measured, in an order that rotates; the others sleep. Small messages are repeated
within a round. Ratios are taken round by round.

    vs_gloo              gloo's time / that of the collective (`auto` at the top of the document); above 1 is faster
    share_of_bandwidth   2(p-1)/p n beta / the time of the collective: the part of the time that no algorithm can save

beta is measured in the same rounds: the same number of bytes around a ring of bare sockets, all links both ways at once
(`peers/bare_sockets.py`). The burst that a token bucket lets through unshaped benefits both alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from podium.config import parse_spec
from podium.errors import ConfigError
from podium.exchange.collectives import find_collective
from podium.lab.bench.harness import check_names, compared, interleave, rate_or_reason, spread_ms
from podium.lab.bench.peers.bare_sockets import BareRing
from podium.lab.bench.peers.gloo import KEEPING_MEMORY, PLAIN, Gloo
from podium.lab.bench.peers.place import Place, places_on
from podium.lab.bench.peers.podium_sums import OUTSIDE, PodiumSums
from podium.lab.bench.peers.summing import ITEM_BYTES, Summing
from podium.launch.clusters.description import uniform
from podium.launch.clusters.namespaces import ShapedNetwork
from podium.launch.rendezvous import rendezvous_folder

PEERS = ("gloo",)
SIZES = (1_000, 4_000, 64_000, 1_000_000, 25_000_000, 100_000_000)
COLLECTIVES = ("auto", "backend", "shared", "ring", "halving-doubling", "task-graph")
_LINK_GBITS = 1.0
_LINK_ROUNDS = 3
_MOST_REPEATS = 200
_HOST_BYTES, _LINK_BYTES = 64_000_000, 16_000_000  # of a round, which has at least one message
_BARE = "bare sockets"
_LARGE_BYTES = 16_000_000  # from this size on, bandwidth dominates


class Setting(NamedTuple):
    """What is measured on one set of workers."""

    where: str
    workers: int
    sizes: tuple[int, ...]
    collectives: tuple[str, ...]
    peers: tuple[str, ...]
    rounds: int
    round_bytes: int

    def repeats(self, nbytes: int) -> int:
        return max(1, min(_MOST_REPEATS, self.round_bytes // nbytes))


def bench_collectives(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    sizes: tuple[int, ...] = SIZES,
    collectives: tuple[str, ...] = COLLECTIVES,
    workers: tuple[int, ...] = (2,),
    link_workers: tuple[int, ...] = (2, 4),
    link_gbits: float | None = None,
    link_rounds: int = _LINK_ROUNDS,
) -> dict[str, Any]:
    """Rows by where, workers, size and collective: times, `vs_gloo` and, over links, `share_of_bandwidth`.

    `workers` and `link_workers` are numbers of workers on the host and over links. `link_gbits` is the rate of the
    links, 0 for none; the default is 1 if this machine can shape links.
    """
    _check(peers, sizes, collectives, (*workers, *link_workers), link_gbits)
    on_host, on_link = ((PLAIN, KEEPING_MEMORY), (PLAIN,)) if peers else ((), ())
    rows: list[dict[str, Any]] = []
    for count in workers:
        names = tuple(n for name in collectives for n in ((name, OUTSIDE) if name == "shared" else (name,)))
        rows += _host(Setting("host", count, sizes, names, on_host, rounds or 9, _HOST_BYTES))
    document: dict[str, Any] = {"bench": "collectives", "peers": list(peers), "rows": rows}
    gbits, reason = 0.0, "link_workers is empty"
    if link_workers:
        gbits, reason = rate_or_reason("link_gbits", link_gbits, _LINK_GBITS, 2, _LINK_GBITS * 1000)
    if gbits:
        between = tuple(name for name in collectives if name != "shared")
        for count in link_workers:
            rows += _link(Setting("link", count, sizes, between, on_link, rounds or link_rounds, _LINK_BYTES), gbits)
    document["link"] = {"gbits": gbits} if gbits else {"skipped": reason}
    return {**document, **_summary(rows)}


def _check(
    peers: Sequence[str],
    sizes: Sequence[int],
    collectives: Sequence[str],
    workers: Sequence[int],
    link_gbits: float | None,
) -> None:
    check_names("peer of bench collectives", peers, PEERS)
    for name in collectives:
        find_collective(parse_spec(name)[0])
    if not sizes or min(sizes) < ITEM_BYTES:
        raise ConfigError(f"bench collectives: sizes must be at least {ITEM_BYTES} bytes each, got {list(sizes)}")
    if not workers or min(workers) < 2:
        raise ConfigError(f"bench collectives: workers must be at least 2, got {list(workers)}")
    if link_gbits is not None and link_gbits < 0:
        raise ConfigError(f"bench collectives: link_gbits must be at least 0, got {link_gbits}")


def _host(setting: Setting) -> list[dict[str, Any]]:
    with rendezvous_folder() as folder, _contenders(setting, folder, (Place(),) * setting.workers) as contenders:
        return _rows(setting, contenders)


def _link(setting: Setting, gbits: float) -> list[dict[str, Any]]:
    with rendezvous_folder() as folder, ShapedNetwork(uniform(setting.workers, mbit=gbits * 1000), folder) as network:
        places = places_on(network)
        bare = BareRing(folder, places)
        try:
            with _contenders(setting, folder, places) as contenders:
                return _rows(setting, contenders, bare)
        finally:
            bare.end()


@contextmanager
def _contenders(setting: Setting, folder: Path, places: tuple[Place, ...]) -> Iterator[dict[str, Summing]]:
    """Each contender's workers by its name, ready to be measured; all processes end with the block."""
    with ExitStack() as ends:
        podium = PodiumSums(folder, places, setting.collectives)
        ends.callback(podium.end)
        contenders: dict[str, Summing] = dict.fromkeys(setting.collectives, podium)
        for name in setting.peers:
            contenders[name] = Gloo(folder, places, keeping_memory=name == KEEPING_MEMORY)
            ends.callback(contenders[name].end)
        yield contenders


def _rows(setting: Setting, contenders: dict[str, Summing], bare: BareRing | None = None) -> list[dict[str, Any]]:
    return [row for nbytes in setting.sizes for row in _rows_of(setting, nbytes, contenders, bare)]


def _rows_of(
    setting: Setting, nbytes: int, contenders: dict[str, Summing], bare: BareRing | None
) -> Iterator[dict[str, Any]]:
    """One row per contender for messages of this size."""
    measures: dict[str, Callable[[], float]] = {}
    for name, team in contenders.items():
        team.prove(name, nbytes)
        measures[name] = partial(team.measure, name, nbytes, setting.repeats(nbytes))
    if bare is not None and nbytes >= _LARGE_BYTES:
        measures[_BARE] = partial(bare.measure, 2 * (setting.workers - 1) * nbytes // setting.workers)
    times = interleave(measures, setting.rounds)
    for name, team in contenders.items():
        row: dict[str, Any] = {
            "where": setting.where,
            "workers": setting.workers,
            "nbytes": nbytes,
            "collective": name,
            "ms": spread_ms(times[name]),
        }
        if isinstance(team, PodiumSums):
            row["chosen"] = team.chosen(name, nbytes)
            for peer in setting.peers:
                row |= compared(f"vs_{peer.replace('-', '_')}", times[peer], times[name])
        if _BARE in times:
            row["bandwidth_ms"] = spread_ms(times[_BARE])
            row |= compared("share_of_bandwidth", times[_BARE], times[name])
        yield row


def _summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The rows' ratios of `auto` to gloo, by size, and of each collective to the link's bandwidth."""
    found: dict[str, Any] = {}
    settings = list(dict.fromkeys((row["where"], row["workers"]) for row in rows))
    tables = []
    for where, workers in settings:
        own = [row for row in rows if (row["where"], row["workers"]) == (where, workers)]
        table = {"where": where, "workers": workers, **_of_auto(own)}
        shares: dict[str, dict[str, float]] = {}
        for row in own:
            if "share_of_bandwidth" in row:
                shares.setdefault(row["collective"], {})[str(row["nbytes"])] = row["share_of_bandwidth"]
        tables.append({**table, "share_of_bandwidth": shares} if shares else table)
    if tables and tables[0]["where"] == "host":
        found = {key: value for key, value in tables[0].items() if key.startswith("vs_gloo")}
    return {**found, "tables": tables}


def _of_auto(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    auto = [row for row in rows if row["collective"] == "auto" and "vs_gloo" in row]
    keys = [key for key in (auto[0] if auto else {}) if key.startswith("vs_")]
    return {key: {str(row["nbytes"]): row[key] for row in auto} for key in keys}
