"""How much of the parameters each server holds, and how long a worker's own link delays an exchange with servers.

Server m moves a part f_m of n bytes. N workers push it and N pull it, through a link of b_m bytes per second in each
direction (the slower of the two counts), and it goes k times through memory at c_m bytes per second, once for each
update. That is f_m n (N / b_m + k / c_m) seconds, and all servers finish together where

    f_m = w_m / (w_1 + … + w_M),    w_m = 1 / (N / b_m + k / c_m)

The model ignores other traffic on the server's machine, and overlap.

This module knows no cluster file and no strategy; it gets the machines' speeds from the communicator.
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
    """The path between a worker and a server: rates in bytes per second, and latency."""

    up: float
    """The worker sends."""
    taken: float
    """The server receives."""
    given: float
    """The server sends."""
    down: float
    """The worker receives."""
    latency_s: float


class Parcel(NamedTuple):
    """Bytes for one server, and the part of the backward pass after which they can be sent."""

    server: int
    nbytes: int
    ready: float


# How much each server holds.


def check_ranges(who: str, ranges: str, servers: int) -> None:
    """Raise ConfigError unless `ranges` is `equal`, `speed` or one number per server."""
    if ranges in ("equal", "speed"):
        return
    if not re.fullmatch(f"{_NUMBER}([,/]{_NUMBER})*", ranges) or min(_numbers_in(ranges)) <= 0:
        raise ConfigError(f"{who}: ranges must be equal, speed or numbers above 0 such as 2/1/1, got {ranges!r}")
    if len(_numbers_in(ranges)) != servers:
        raise ConfigError(f"{who}: ranges must have one number per server ({servers}), got {ranges!r}")


def weights_of(who: str, ranges: str, comm: Communicator, updates: int) -> tuple[float, ...] | None:
    """How much of the parameters each server holds, in the order of `comm.servers`; None: equal parts.

    The same on all workers. A server that joined later counts like the last one that the run began with. `updates`: how
    often a server updates its part while every worker pushes once.
    """
    servers = comm.servers
    if ranges == "equal" or not servers:
        return None
    first = min(servers)  # the run began with this many workers, numbered before the servers
    if ranges == "speed":
        if comm.ground is None:
            raise ConfigError(
                f"{who}: ranges=speed needs a cluster file (launcher virtual or shaped) with the speeds of servers "
                "and links; without one give numbers, such as ranges=2/1"
            )
        began = speed_weights(comm.ground, first, comm.size, updates)
    else:
        began = _numbers_in(ranges)
    found = tuple(began[min(server - first, len(began) - 1)] for server in servers)
    return None if len(set(found)) == 1 else found


def speed_weights(ground: Ground, first: int, workers: int, updates: int) -> list[float]:
    """The weights of the servers that the run began with, whose ranks start at `first`."""
    weights = []
    for node in ground.nodes[first:]:
        link, memory = min(ground.terrain.rates(node)), ground.terrain.nodes[node].memory_gbs * 1e9
        weights.append(1 / (workers / link + updates / memory))
    return weights


def _numbers_in(ranges: str) -> list[float]:
    return [float(number) for number in re.split(r"[,/]", ranges)]


# The delay of a worker's own link.


def ways_from(ground: Ground, servers: Sequence[int]) -> list[Way]:
    """From this rank to each of these servers; one that joined later is assumed to be where the last one is."""
    ways = []
    for server in servers:
        node = ground.nodes[min(server, len(ground.nodes) - 1)]
        up, taken, there_ns = ground.terrain.path(ground.here, node)
        given, down, back_ns = ground.terrain.path(node, ground.here)
        ways.append(Way(up, taken, given, down, (there_ns + back_ns) / 2e9))
    return ways


def exposed_s(push: Sequence[Parcel], pull: Sequence[Parcel], ways: Sequence[Way], backward_s: float) -> float:
    """Seconds from the end of a backward pass until all answers have arrived, if no other worker used the servers.

    `push` is in sending order; each parcel leaves once its part of the pass is done, and sending during the pass is
    hidden. Parcels go one after the other through the worker's link and through each server's. Answers are sent when
    all parcels have arrived, and nothing hides them. `Parcel.server` is an index into `ways`.
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
