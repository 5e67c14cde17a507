"""How much of the parameters each server holds, and what of an exchange with servers a worker's own link takes.

Server m moves a part f_m of n bytes. N workers push it and N take it home, through a link of b_m bytes per second in
each direction (the slower of the two counts), and it goes k times through memory at c_m bytes per second, once for each
update. That is f_m n (N / b_m + k / c_m) seconds, and all servers finish together where

    f_m = w_m / (w_1 + … + w_M),    w_m = 1 / (N / b_m + k / c_m)

What other ranks on the server's machine send meanwhile is left out, and so is what runs behind something else.

This module knows no cluster file and no strategy; it gets what a launcher knows of the machines from the communicator.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from podium.errors import ConfigError

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Ground

_NUMBER = r"(\d+(\.\d*)?|\.\d+)"


class Way(NamedTuple):
    """What lies between a worker and a server: bytes per second, and seconds."""

    up: float
    """What the worker can send."""
    taken: float
    """What the server can receive."""
    given: float
    """What the server can send."""
    down: float
    """What the worker can receive."""
    latency_s: float


class Parcel(NamedTuple):
    """Bytes for one server, and which part of the backward pass must be done before they can leave."""

    server: int
    nbytes: int
    ready: float


# How much each server holds.


def check_ranges(who: str, ranges: str, servers: int) -> None:
    """Raise ConfigError unless `ranges` says how much each of this many servers holds."""
    if ranges in ("equal", "speed"):
        return
    if not re.fullmatch(f"{_NUMBER}([,/]{_NUMBER})*", ranges) or min(_numbers_in(ranges)) <= 0:
        raise ConfigError(f"{who}: ranges must be equal, speed or numbers above 0 such as 2/1/1, got {ranges!r}")
    if len(_numbers_in(ranges)) != servers:
        raise ConfigError(f"{who}: ranges must have one number per server ({servers}), got {ranges!r}")


def weights_of(who: str, ranges: str, comm: Communicator, updates: int) -> tuple[float, ...] | None:
    """How much of the whole each server holds, in the order of `comm.servers`; None: equally much.

    The same on all workers. A server that came later is like the last one that the run began with. `updates`: how
    often a server moves its part while every worker pushes once.
    """
    servers = comm.servers
    if ranges == "equal" or not servers:
        return None
    first = min(servers)  # the run began with this many workers, numbered before the servers
    if ranges == "speed":
        if comm.ground is None:
            raise ConfigError(
                f"{who}: ranges=speed needs a cluster file (launcher virtual or shaped), which says how fast servers "
                "and their links are; without one give numbers, such as ranges=2/1"
            )
        began = speed_weights(comm.ground, first, comm.size, updates)
    else:
        began = _numbers_in(ranges)
    found = tuple(began[min(server - first, len(began) - 1)] for server in servers)
    return None if len(set(found)) == 1 else found


def speed_weights(ground: Ground, first: int, workers: int, updates: int) -> list[float]:
    """The weights of the servers that the run began with, which follow after the rank `first`."""
    weights = []
    for node in ground.nodes[first:]:
        link, memory = min(ground.terrain.rates(node)), ground.terrain.nodes[node].memory_gbs * 1e9
        weights.append(1 / (workers / link + updates / memory))
    return weights


def _numbers_in(ranges: str) -> list[float]:
    return [float(number) for number in re.split(r"[,/]", ranges)]


# What a worker's own link takes.


def ways_from(ground: Ground, servers: Sequence[int]) -> list[Way]:
    """From this rank to each of these servers; one that came later is taken to be where the last one is."""
    ways = []
    for server in servers:
        node = ground.nodes[min(server, len(ground.nodes) - 1)]
        up, taken, there_ns = ground.terrain.path(ground.here, node)
        given, down, back_ns = ground.terrain.path(node, ground.here)
        ways.append(Way(up, taken, given, down, (there_ns + back_ns) / 2e9))
    return ways


def exposed_s(push: Sequence[Parcel], pull: Sequence[Parcel], ways: Sequence[Way], backward_s: float) -> float:
    """Seconds from the end of a backward pass until all that was pushed is answered, had the worker the servers alone.

    `push` is in the order in which it leaves, each parcel once its part of the pass is done: what is on its way before
    the pass ends is hidden. Parcels go one after the other through the worker's own link and through each server's.
    The answers come when all is there, and nothing hides them. Numbers of servers are places in `ways`.
    """
    if not ways:
        return 0.0
    sent, there = 0.0, [0.0] * len(ways)
    for parcel in push:
        way, ready = ways[parcel.server], parcel.ready * backward_s
        began = max(sent, ready)
        sent = began + parcel.nbytes / way.up
        there[parcel.server] = max(there[parcel.server], began) + parcel.nbytes / way.taken
    back = [0.0] * len(ways)
    for parcel in pull:
        back[parcel.server] += parcel.nbytes / ways[parcel.server].given
    down = math.fsum(parcel.nbytes / ways[parcel.server].down for parcel in pull)
    latency = 2 * max(way.latency_s for way in ways)
    return max(0.0, max(sent, *there) - backward_s) + max(down, *back) + latency
