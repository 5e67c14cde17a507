"""`podium bench ps`: round trips to an asynchronous parameter server, beside other systems' parameter servers.

Two workers and one server, each a process with one thread, on one machine. A round trip: a worker pushes a gradient of
the whole model's size, the server updates the parameters by plain SGD, and the worker copies the parameters into its
own buffers. No worker waits for the other. Each contender is written as its users would write it, in the best form
found; where it has several, all run and the fastest counts. After the last round every contender must prove that each
push was applied to each element once (`peers/work.py`), or the bench ends with an error.

In each round every contender is measured for a second or two, in an order that rotates. The others sleep; Ray's
helpers keep about a twentieth of a core busy even so. The first rounds warm buffers and are discarded.

`limit` is measured in the same rounds: in one process with one thread, per round trip the SGD update of all parameters
in place, in chunks of 2**19 elements, and one copy of them, all on warm buffers. It exchanges nothing. On a busy
machine three processes get more of the processors than this one, and the share of the limit means nothing.

`link` compares Podium with bare sockets where the network dominates: server and workers in network namespaces, the link
of each shaped to `link_gbits` each way. Bare: one TCP connection between the server and each worker, on which both ends
`sendall` 4 MB buffers and `recv_into` as large ones at the same time; the rate is the sum of the bytes that all three
received per second, which is the traffic of the server's link, in and out. Podium: two payloads, a gradient in and
parameters out, times round trips per second of both workers. Podium's time includes the SGD update, which the bare
sockets do not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from podium.errors import ConfigError
from podium.lab.bench.harness import check_names, compared, interleave, rate_or_reason, spread
from podium.lab.bench.peers.bare_sockets import BareStar
from podium.lab.bench.peers.limit import Limit
from podium.lab.bench.peers.place import places_on
from podium.lab.bench.peers.podium_ps import Podium
from podium.lab.bench.peers.rpc_ps import Rpc
from podium.lab.bench.peers.script import Script, need_module
from podium.lab.bench.peers.work import WORKERS, Contender, verify
from podium.launch.clusters.description import uniform
from podium.launch.clusters.namespaces import ShapedNetwork
from podium.launch.rendezvous import rendezvous_folder
from podium.task import load_task

PAYLOADS: dict[str, dict[str, Any]] = {
    "wide-mlp": {},
    "1m": {"features": 1000, "width": 500, "depth": 3},
    "10k": {"features": 100, "width": 64, "depth": 2},
}
"""Options of the task `wide-mlp` by name: 25 million parameters, one million, ten thousand."""
PEERS: dict[str, str | None] = {"rpc": None, "ray": "ray", "tensorflow": "tensorflow"}
"""Each peer, and the module that the peers' environment must have for it; None: part of torch."""

_WARMUP_ROUNDS = 3  # Ray's object store has all of its pages after about as many
_LINK_PAYLOAD = "wide-mlp"
_LINK_GBITS = 1.0
_LINK_ROUNDS = 3
_LINK_SECONDS = {"bare": 3.0, "podium": 8.0}  # a worker's round trip takes nearly two at 1 Gbit/s


def bench_ps(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    payloads: str = "wide-mlp,1m",
    seconds: float = 1.5,
    link_gbits: float | None = None,
) -> dict[str, Any]:
    """A row per payload: all rates, `vs_fastest_peer` and `share_of_limit` (higher is better), and their intervals.

    `link_gbits` is the rate of the shaped links, 0 for none; the default is 1 if this machine can shape links.
    """
    names = payloads.split(",")
    check_names("peer of bench ps", peers, PEERS)
    check_names("payload of bench ps", names, PAYLOADS)
    if not seconds > 0 or (link_gbits is not None and link_gbits < 0):
        raise ConfigError(f"bench ps: seconds must be above 0 and link_gbits at least 0, got {seconds}, {link_gbits}")
    for peer in peers:  # before minutes are spent on the others
        module = PEERS[peer]
        if module is not None:
            need_module(peer, module)
    rows = []
    for name in names:
        row = _row(name, peers, rounds or 7, seconds)
        if name == _LINK_PAYLOAD and link_gbits != 0:
            gbits, reason = rate_or_reason("link_gbits", link_gbits, _LINK_GBITS, WORKERS + 1, _LINK_GBITS * 1000)
            row["link"] = bench_link(gbits) if gbits else {"skipped": reason}
        rows.append(row)
    return {"bench": "ps", "peers": list(peers), "workers": WORKERS, "servers": 1, "seconds": seconds, "rows": rows}


def _row(name: str, peers: Sequence[str], rounds: int, seconds: float) -> dict[str, Any]:
    sizes = sizes_of(name)
    with _contenders(name, peers, sizes) as contenders:
        measures: dict[str, Callable[[], float]] = {
            variant: partial(c.measure, variant, seconds) for c in contenders for variant in c.variants
        }
        rates = interleave(measures, rounds, _WARMUP_ROUNDS)
        for contender in contenders:
            for variant in contender.variants:
                verify(variant, contender.tally(variant))
        unavailable = {variant: why for c in contenders for variant, why in c.unavailable.items()}
    limit = rates.pop("limit")
    gb = 2 * 4 * sum(sizes) / 1e9
    row: dict[str, Any] = {
        "payload": name,
        "parameters": sum(sizes),
        "rounds": rounds,
        "round_trips_per_s": {variant: spread(each) for variant, each in rates.items()},
        "gb_per_s": {variant: spread([rate * gb for rate in each]) for variant, each in rates.items()},
        "limit": spread(limit),
        **compared("share_of_limit", rates["podium"], limit),
    }
    if len(rates) > 1:
        fastest = max((v for v in rates if v != "podium"), key=lambda variant: np.median(rates[variant]))
        row |= {"fastest_peer": fastest, **compared("vs_fastest_peer", rates["podium"], rates[fastest])}
    if unavailable:
        row["unavailable"] = unavailable
    return row


@contextmanager
def _contenders(name: str, peers: Sequence[str], sizes: Sequence[int]) -> Iterator[list[Contender]]:
    """Podium, the limit and the peers, ready to be measured; all processes end with the block."""
    with rendezvous_folder() as folder, ExitStack() as ends:
        makers: list[Callable[[], Contender]] = [
            lambda: Podium(PAYLOADS[name], folder),
            lambda: Limit(sum(sizes)),
            *(partial(_make_peer, peer, sizes, folder) for peer in peers),
        ]
        contenders = []
        for make in makers:
            contenders.append(make())
            ends.callback(contenders[-1].end)
        yield contenders


def _make_peer(peer: str, sizes: Sequence[int], folder: Path) -> Contender:
    module = PEERS[peer]
    if module is None:
        return Rpc(sum(sizes), folder)
    own = folder / peer
    own.mkdir()
    return Script(peer, module, sizes, own)


def sizes_of(name: str) -> list[int]:
    """Elements of each tensor of a payload."""
    return [p.numel() for p in load_task("wide-mlp", PAYLOADS[name]).model().parameters()]


def bench_link(
    gbits: float,
    payload: str = _LINK_PAYLOAD,
    rounds: int = _LINK_ROUNDS,
    seconds: Mapping[str, float] = _LINK_SECONDS,
) -> dict[str, Any]:
    """Podium and bare sockets over links shaped to this rate, as the module's docstring explains. Needs root."""
    nodes = WORKERS + 1
    with (
        rendezvous_folder() as folder,
        ShapedNetwork(uniform(nodes, mbit=gbits * 1000), folder) as network,
        ExitStack() as end,
    ):
        places = places_on(network)
        bare = BareStar(folder, places)
        end.callback(bare.end)
        podium = Podium(PAYLOADS[payload], folder, places)
        end.callback(podium.end)
        gb = 2 * 4 * sum(sizes_of(payload)) / 1e9
        rates = interleave(
            {
                "bare": lambda: bare.measure(seconds["bare"]) / 1e9,
                "podium": lambda: podium.measure("podium", seconds["podium"]) * gb,
            },
            rounds,
        )
        verify("podium", podium.tally("podium"))
    return {
        "gbits": gbits,
        "rounds": rounds,
        "bare_gb_per_s": float(np.median(rates["bare"])),
        "podium_gb_per_s": float(np.median(rates["podium"])),
        **compared("share_of_bare", rates["podium"], rates["bare"]),
    }
