"""gloo as in a plain script: blocking calls of `torch.distributed.all_reduce`, one after the other."""

from __future__ import annotations

from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist

from podium.lab.bench.peers.ddp import join_gloo
from podium.lab.bench.peers.place import Place
from podium.lab.bench.peers.summing import Summing, Sums
from podium.lab.bench.peers.team import Team, answer

PLAIN, KEEPING_MEMORY = "gloo", "gloo-keeping-memory"


class Gloo(Summing):
    """The ranks of a script that calls gloo; `keeping_memory` gives them the allocator setting of Podium's ranks."""

    def __init__(self, folder: Path, places: tuple[Place, ...], *, keeping_memory: bool = False) -> None:
        name, size = KEEPING_MEMORY if keeping_memory else PLAIN, len(places)
        members = [partial(_rank, rank, size, folder / name, place, name) for rank, place in enumerate(places)]
        super().__init__(name, Team(name, members), size)


def _rank(rank: int, size: int, store: Path, place: Place, name: str, pipe: Connection) -> None:
    place.enter(keeping_memory=name == KEEPING_MEMORY)
    join_gloo(rank, size, store)
    answer(pipe, Sums(rank, size, dist.barrier, {name: dist.all_reduce}, torch.zeros).answers)
