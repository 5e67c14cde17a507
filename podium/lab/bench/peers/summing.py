"""The work of every contender of `podium bench collectives`, and the proof that it was done.

All workers have a tensor of the same size; afterwards each has the sum of all. A round is several all-reduces in
sequence, from a barrier to the end of the last; its time is the slowest worker's. For the proof, worker r starts from
(r + 1) times a pattern in which neighbouring elements differ, in numbers whose sums float32 represents exactly.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from podium.errors import RankFailed
from podium.lab.bench.peers.team import Team
from podium.lab.bench.peers.work import pattern

ITEM_BYTES = 4


class Summing:
    """A team of workers that can sum tensors."""

    def __init__(self, name: str, team: Team, size: int) -> None:
        self.name, self._team, self._members = name, team, range(size)

    def measure(self, how: str, nbytes: int, repeats: int) -> float:
        """Seconds per all-reduce, of the slowest worker."""
        return max(float(took) for took in self.ask("round", how, nbytes, repeats))

    def prove(self, how: str, nbytes: int) -> None:
        """Raise unless every worker ends with the sum."""
        for rank, wrong in enumerate(self.ask("prove", how, nbytes)):
            if wrong:
                raise RankFailed(
                    f"bench collectives: {how} ({self.name}) must give the sum, got {wrong} wrong elements of "
                    f"{nbytes // ITEM_BYTES} on rank {rank}"
                )

    def ask(self, what: str, *details: Any) -> list[Any]:
        return self._team.ask(what, *details, members=self._members)

    def end(self) -> None:
        self._team.end()


class Sums:
    """One worker, in its process."""

    def __init__(
        self,
        rank: int,
        size: int,
        barrier: Callable[[], object],
        ways: Mapping[str, Callable[[Tensor], object]],
        allocate: Callable[[int], Tensor] | Mapping[str, Callable[[int], Tensor]],
    ) -> None:
        """`ways`: each sums a tensor over the workers, in place and blocking.

        `allocate`: makes the tensors, one function for all ways or one by the name of each.
        """
        self._rank, self._size, self._barrier, self._ways = rank, size, barrier, ways
        self._allocate = allocate if isinstance(allocate, Mapping) else dict.fromkeys(ways, allocate)
        self._buffers: dict[int, Tensor] = {}
        self.answers: dict[str, Callable[..., Any]] = {"round": self.round, "prove": self.prove}

    def round(self, how: str, nbytes: int, repeats: int) -> float:
        way, tensor = self._ways[how], self._tensor(how, nbytes).zero_()  # a sum of zeros never overflows
        self._barrier()
        began = time.perf_counter()
        for _ in range(repeats):
            way(tensor)
        return (time.perf_counter() - began) / repeats

    def prove(self, how: str, nbytes: int) -> int:
        """How many elements are wrong."""
        tensor = self._tensor(how, nbytes)
        start = pattern(tensor.numel())
        tensor.copy_(start * (self._rank + 1))
        self._barrier()
        self._ways[how](tensor)
        return int((tensor != start * (self._size * (self._size + 1) // 2)).sum())

    def _tensor(self, how: str, nbytes: int) -> Tensor:
        """The first `nbytes` bytes of a buffer that is reused, since new memory is slow."""
        allocate, numel = self._allocate[how], max(1, nbytes // ITEM_BYTES)
        kept = self._buffers.get(id(allocate), torch.empty(0))
        if kept.numel() < numel:
            kept = self._buffers[id(allocate)] = allocate(numel)
        return kept[:numel]
