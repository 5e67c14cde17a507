"""Podium's own collectives, in processes and on communicators as `podium train` has them.

On one host the workers meet in shared memory, and messages go over Unix sockets; in namespaces all goes over TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from podium.comm.arena import Arena
from podium.comm.channel import Channel
from podium.comm.memory import WallClock
from podium.comm.real import RealCommunicator
from podium.comm.torch_dist import Group, file_store, look_up, publish
from podium.config import parse_spec
from podium.engine.allocator import keep_freed_memory
from podium.exchange.collectives import make_collective
from podium.exchange.collectives.auto import Measured
from podium.exchange.collectives.base import Collective
from podium.lab.bench.peers.podium_ps import Place
from podium.lab.bench.peers.summing import Summing, Sums
from podium.lab.bench.peers.team import Team, answer
from podium.lab.bench.peers.work import DEADLINE_S
from podium.launch.clusters.namespaces import enter_namespace

OUTSIDE = "shared (own memory)"
"""Collective `shared` on a tensor that does not lie in shared memory."""


class PodiumSums(Summing):
    """Workers that have all of these collectives ready."""

    def __init__(self, folder: Path, places: tuple[Place, ...], collectives: Sequence[str]) -> None:
        size, names = len(places), tuple(collectives)
        members = [partial(_rank, rank, size, folder, place, names) for rank, place in enumerate(places)]
        super().__init__("podium", Team("podium", members), size)

    def chosen(self, how: str, nbytes: int) -> str:
        """Which collective is used for so many bytes: for `auto`, which decides."""
        return str(self.ask("chosen", how, nbytes)[0])


def _rank(rank: int, size: int, folder: Path, place: Place, collectives: tuple[str, ...], pipe: Connection) -> None:
    keep_freed_memory()
    if place.namespace is not None:
        enter_namespace(place.namespace)
    comm = connect(rank, size, folder, place)
    ready = {name: make_collective(*parse_spec(_spec(name))).prepare(comm) for name in collectives}

    def way(collective: Collective) -> Callable[[Tensor], object]:
        return lambda tensor: comm.wait(collective.all_reduce(comm, tensor))

    def allocated(numel: int) -> Tensor:
        return comm.allocate(numel, torch.float32, torch.device("cpu"))

    def outside(numel: int) -> Tensor:
        return torch.zeros(numel)

    def chosen(how: str, nbytes: int) -> str:
        collective = ready[how]
        return collective.choice(nbytes).name if isinstance(collective, Measured) else collective.name

    ways = {name: way(collective) for name, collective in ready.items()}
    sums = Sums(rank, size, comm.barrier, ways, {name: outside if name == OUTSIDE else allocated for name in ways})
    answer(pipe, {**sums.answers, "chosen": chosen})
    comm.close()


def _spec(name: str) -> str:
    return "shared" if name == OUTSIDE else name


def connect(rank: int, size: int, folder: Path, place: Place) -> RealCommunicator:
    listen, arena = (f"unix:{folder}/c{rank}", Arena()) if place.host is None else (f"tcp:{place.host}:0", None)
    channel = Channel(rank, secret=b"of this bench", listen=listen, deadline_s=DEADLINE_S, arena=arena)
    store = file_store(folder / "store")
    publish(store, f"listens-{rank}", channel.address)
    channel.introduce({r: look_up(store, f"listens-{r}", DEADLINE_S) for r in range(size)})
    group = Group(store, host=place.host or "127.0.0.1", deadline_s=DEADLINE_S)
    return RealCommunicator(
        rank, range(size), (), WallClock(), group=group, channel=channel, deadline_s=DEADLINE_S, arena=arena
    )
