"""gloo as a plain script has it: `torch.distributed.all_reduce`, one after the other, each waited for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from podium.engine.allocator import keep_freed_memory
from podium.lab.bench.peers.podium_ps import Place
from podium.lab.bench.peers.summing import Summing, Sums
from podium.lab.bench.peers.team import Team, answer
from podium.launch.clusters.namespaces import enter_namespace

PLAIN, KEEPING_MEMORY = "gloo", "gloo-keeping-memory"


class Gloo(Summing):
    """The ranks of a script that calls gloo; `keeping_memory` gives them the allocator's switch that Podium's have."""

    def __init__(
        self, folder: Path, places: tuple[Place, ...], interfaces: Sequence[str] = (), *, keeping_memory: bool = False
    ) -> None:
        """`interfaces`: of each place's namespace."""
        name, size = KEEPING_MEMORY if keeping_memory else PLAIN, len(places)
        ranks = enumerate(zip(places, interfaces or [""] * size, strict=True))
        members = [partial(_rank, rank, size, folder / name, *where, name) for rank, where in ranks]
        super().__init__(name, Team(name, members), size)


def _rank(rank: int, size: int, store: Path, place: Place, interface: str, name: str, pipe: Connection) -> None:
    if name == KEEPING_MEMORY:
        keep_freed_memory()
    if place.namespace is not None:
        enter_namespace(place.namespace)
        os.environ["GLOO_SOCKET_IFNAME"] = interface  # else it looks for the host's name, which is not known here
    dist.init_process_group("gloo", store=FileStore(str(store), size), rank=rank, world_size=size)
    answer(pipe, Sums(rank, size, dist.barrier, {name: dist.all_reduce}, torch.zeros).answers)
