"""Podium's collectives, in processes and on communicators as in `podium train`.

On one host the workers use shared memory, and Unix sockets for messages; in namespaces everything goes over TCP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from torch import Tensor

from podium.config import parse_spec
from podium.exchange.collectives import make_collective
from podium.exchange.collectives.auto import Measured
from podium.exchange.collectives.base import Collective
from podium.lab.bench.peers.place import Place, connect
from podium.lab.bench.peers.summing import Summing, Sums
from podium.lab.bench.peers.team import Team, answer

OUTSIDE = "shared (own memory)"
"""Collective `shared` on a tensor outside shared memory."""


class PodiumSums(Summing):
    """Workers with all of these collectives prepared."""

    def __init__(self, folder: Path, places: tuple[Place, ...], collectives: Sequence[str]) -> None:
        size, names = len(places), tuple(collectives)
        members = [partial(_rank, rank, size, folder, place, names) for rank, place in enumerate(places)]
        super().__init__("podium", Team("podium", members), size)

    def chosen(self, how: str, nbytes: int) -> str:
        """The collective used for `nbytes`: `auto` decides by size."""
        return str(self.ask("chosen", how, nbytes)[0])


def _rank(rank: int, size: int, folder: Path, place: Place, collectives: tuple[str, ...], pipe: Connection) -> None:
    place.enter()
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
