"""The workers measure latency and bandwidth of the links between them.

Every pair plays ping-pong, once with a few bytes and once with many, all pairs of a round at the same time, in p - 1
rounds (p when p is odd). So a measurement takes the time of a few messages per worker, under the same load on the
network as an exchange between all workers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from podium.comm.schedule import Chain, Move

if TYPE_CHECKING:
    from podium.comm.base import Communicator

LARGE_BYTES = 256 << 10
"""Size of the larger message: 20 ms over 100 Mbit/s."""
_TRIES = 3


class Links(NamedTuple):
    """Seconds by sender and receiver, by index among the members."""

    small: tuple[tuple[float, ...], ...]
    """For a message of a few bytes, one way."""
    large: tuple[tuple[float, ...], ...]
    """For one of `LARGE_BYTES`."""

    @property
    def bandwidth(self) -> tuple[float, ...]:
        """Bytes per second of each member's link: its best over all partners."""
        places = range(len(self.large))
        rates = [
            [LARGE_BYTES / max(1e-9, self.large[i][j] - self.small[i][j]) for j in places if j != i] for i in places
        ]
        return tuple(max(row, default=1.0) for row in rates)


def measure(comm: Communicator) -> Links:
    """Measure all links among the workers. Collective."""
    size, me = comm.size, comm.index
    mine = torch.zeros(2, size, dtype=torch.float64)
    for partner in partners(me, size):
        for first in (True, False):  # each of the two measures once
            for row, numel in enumerate((1, LARGE_BYTES // 4)):
                seconds = min(_ping(comm, partner, first == (me < partner), numel) for _ in range(_TRIES))
                if partner >= 0 and first == (me < partner):
                    mine[row, partner] = seconds
    everyone = torch.empty(size * mine.numel(), dtype=torch.float64)
    comm.wait(comm.all_gather(mine.view(-1), everyone))
    found = everyone.view(size, 2, size)
    # A ping-pong is two small messages, or a large one and a small one back.
    small = found[:, 0] / 2
    large = found[:, 1] - small.T
    return Links(_rows(small), _rows(large))


def partners(index: int, size: int) -> list[int]:
    """This member's partner in each round of a round-robin tournament; -1: it sits the round out."""
    seats = size + size % 2
    found = []
    for round_ in range(seats - 1):
        if index == seats - 1:
            other = next(i for i in range(seats - 1) if 2 * i % (seats - 1) == round_)
        else:
            other = (round_ - index) % (seats - 1)
            other = seats - 1 if other == index else other
        found.append(other if other < size else -1)
    return found


def _ping(comm: Communicator, partner: int, asks: bool, numel: int) -> float:
    """Seconds to send `numel` elements to the partner and one back; the partner calls it with `asks` false."""
    tensor = torch.zeros(numel)
    there, back = ("send", "put") if asks else ("put", "send")
    chain = [Move(there, partner, 0, 0, numel), Move(back, partner, 1, 0, 1)]  # type: ignore[arg-type]  # two kinds
    chains: list[Chain] = [chain] if partner >= 0 else []
    comm.barrier()
    began = comm.clock.now_ns()
    comm.wait(comm.exchange(chains, tensor))
    return (comm.clock.now_ns() - began) / 1e9


def _rows(table: torch.Tensor) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(max(0.0, seconds) for seconds in row) for row in table.tolist())
