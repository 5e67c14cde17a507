"""The network namespaces of a contender's ranks, and how Podium's ranks connect."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from podium.comm.clocks import WallClock
from podium.comm.real.arena import Arena
from podium.comm.real.channel import Channel
from podium.comm.real.communicator import RealCommunicator
from podium.comm.real.process_group import Group, file_store, look_up, publish
from podium.engine.allocator import keep_freed_memory
from podium.lab.bench.peers.work import DEADLINE_S
from podium.launch.clusters.namespaces import ShapedNetwork, enter_namespace


class Place(NamedTuple):
    """A rank's network namespace and address; without one, the rank runs on this host with the other ranks."""

    namespace: str | None = None
    host: str | None = None
    interface: str = ""
    """Of the namespace."""

    def enter(self, *, keeping_memory: bool = True) -> None:
        """Move this process into the place. `keeping_memory`: with the allocator setting of Podium's ranks."""
        if keeping_memory:
            keep_freed_memory()
        if self.namespace is not None:
            enter_namespace(self.namespace)
            os.environ["GLOO_SOCKET_IFNAME"] = self.interface  # else gloo resolves the host name, unknown in here


def places_on(network: ShapedNetwork) -> tuple[Place, ...]:
    """One place per node of a shaped network."""
    nodes = zip(network.namespaces, network.addresses, network.interfaces, strict=True)
    return tuple(Place(*node) for node in nodes)


def connect(
    rank: int, workers: int, folder: Path, place: Place, *, servers: Sequence[int] = (), shares_tensors: bool = True
) -> RealCommunicator:
    """A communicator as in `podium train`: Unix sockets and shared memory on one host, TCP between namespaces.

    `shares_tensors`: whether collectives may use shared memory, too.
    """
    listen, arena = (f"unix:{folder}/c{rank}", Arena()) if place.host is None else (f"tcp:{place.host}:0", None)
    channel = Channel(rank, secret=b"of this bench", listen=listen, deadline_s=DEADLINE_S, arena=arena)
    store = file_store(folder / "store")
    publish(store, f"listens-{rank}", channel.address)
    channel.introduce({r: look_up(store, f"listens-{r}", DEADLINE_S) for r in (*range(workers), *servers)})
    group = Group(store, host=place.host or "127.0.0.1", deadline_s=DEADLINE_S) if rank < workers else None
    return RealCommunicator(
        rank,
        range(workers),
        servers,
        WallClock(),
        group=group,
        channel=channel,
        deadline_s=DEADLINE_S,
        arena=arena if shares_tensors else None,
    )
