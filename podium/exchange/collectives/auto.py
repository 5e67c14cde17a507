"""`default` and `auto`: choose one of the other collectives.

`default` takes shared memory where all workers share a host, and `rank-order` where the launcher knows the hosts: sums
then have the same bits wherever the workers run. Elsewhere it takes the backend. Nothing is measured, so a repeated run
sums in the same order, to the same bits.

`auto` takes shared memory on one host too, and elsewhere the candidate measured as fastest for each size: the present
members try each candidate at a few sizes, once per generation. All workers take the same one, by the slowest worker's
time; between two tried sizes the nearer one (by ratio) decides. On another day it may choose differently, and then
round differently with more than two workers.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, final

import torch
from torch import Tensor

from podium.exchange.collectives.backend import Backend
from podium.exchange.collectives.base import Collective, Native, Transport
from podium.exchange.collectives.halving_doubling import HalvingDoubling
from podium.exchange.collectives.hierarchical import Hierarchical
from podium.exchange.collectives.rank_order import RankOrder
from podium.exchange.collectives.ring import Ring
from podium.exchange.collectives.shared import Shared

if TYPE_CHECKING:
    from podium.comm.base import Communicator, Handle

SIZES = (4 << 10, 64 << 10, 1 << 20)
"""Sizes in bytes that are tried; a link of 100 Mbit/s takes 0.1 s for the largest."""
_TRIES = (10, 10, 3)
"""Tries at each size; the median counts, since gloo's best try is far from its usual one."""


@final
@dataclass(frozen=True, kw_only=True)
class Default(Native):
    """Shared memory on one host; rank order across known hosts; the backend elsewhere."""

    name: ClassVar[str] = "default"

    def transport(self, same_host: bool) -> Transport:
        return "memory" if same_host else "hosts"

    def prepare(self, comm: Communicator) -> Collective:
        if comm.sums_in_rank_order:
            return RankOrder().prepare(comm)
        return Shared() if comm.size > 1 and comm.shares_host else Backend()


@final
@dataclass(frozen=True, kw_only=True)
class Auto(Native):
    """The fastest of the other collectives in a short measurement."""

    name: ClassVar[str] = "auto"

    def transport(self, same_host: bool) -> Transport:
        return "memory" if same_host else "both"

    def prepare(self, comm: Communicator) -> Collective:
        if comm.size == 1 or comm.shares_process:
            return Backend()
        if comm.shares_host:
            return Shared()
        if not comm.talks:
            return Backend()
        comm.meet()
        candidates = [Backend(), Ring(measure=True).prepare(comm), HalvingDoubling()]
        if len(comm.hosts) < comm.size and comm.hosts:
            candidates += [RankOrder().prepare(comm), Hierarchical().prepare(comm)]
        return Measured(candidates=tuple(candidates), seconds=_measure(comm, candidates))


@final
@dataclass(frozen=True, kw_only=True)
class Measured(Collective):
    """The fastest candidate for each size."""

    name: ClassVar[str] = "auto"
    candidates: tuple[Collective, ...]
    seconds: tuple[tuple[float, ...], ...]
    """By size of `SIZES`, then by candidate."""

    def choice(self, nbytes: int) -> Collective:
        """The candidate for a tensor of this size."""
        near = min(range(len(SIZES)), key=lambda i: abs(math.log(max(1, nbytes) / SIZES[i])))
        times = self.seconds[near]
        return self.candidates[times.index(min(times))]

    def all_reduce(self, comm: Communicator, tensor: Tensor) -> Handle:
        return self.choice(tensor.nbytes).all_reduce(comm, tensor)


def _measure(comm: Communicator, candidates: list[Collective]) -> tuple[tuple[float, ...], ...]:
    """Seconds of each candidate at each size: the median of a few tries, of the slowest worker."""
    mine = torch.zeros(len(SIZES), len(candidates))
    for i, (nbytes, tries) in enumerate(zip(SIZES, _TRIES, strict=True)):
        tensor = torch.zeros(nbytes // 4)
        for n, candidate in enumerate(candidates):
            times = []
            for _ in range(tries):
                comm.barrier()
                began = comm.clock.now_ns()
                comm.wait(candidate.all_reduce(comm, tensor))
                times.append((comm.clock.now_ns() - began) / 1e9)
            mine[i, n] = statistics.median(times)
    everyone = torch.empty(comm.size * mine.numel())
    comm.wait(comm.all_gather(mine.view(-1), everyone))
    slowest = everyone.view(comm.size, len(SIZES), len(candidates)).amax(dim=0)
    return tuple(tuple(row) for row in slowest.tolist())
