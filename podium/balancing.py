"""Who does how much of a global step, while training goes on.

Every worker learns its own speed from its own passes. Every few steps they tell each other what they know, in one small
exchange that lies behind the next step; then all ask the balancer the same question, get the same answer, and take it
up with the step after, if it promises enough. Nothing else of this is shared or saved: whoever joins is taken to be
like the others until it has told, and after a resume all learn anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from podium.balance.base import Balancer, Learning, Member, finish_s
from podium.balance.memory import most_samples
from podium.balance.speed import Speed, SpeedModel

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.measure.records import Recorder
    from podium.worker import Batch, Worker

SURE = 2.0
"""How many standard errors a promised gain must be beyond."""


class Balancing:
    """One worker's part in dividing global steps."""

    def __init__(self, balancer: Balancer, worker: Worker, recorder: Recorder) -> None:
        self.balancer, self.worker, self._recorder = balancer, worker, recorder
        self.model = SpeedModel()
        self._members: list[Member] = []
        self._counts: list[int] = []
        """Each worker's part of a whole global step, by place."""
        self._steps = 0  # since the last exchange
        self._told: tuple[Tensor, Handle] | None = None

    @property
    def learns(self) -> bool:
        return isinstance(self.balancer, Learning) and self.worker.comm.size > 1

    def counts(self, count: int) -> list[int]:
        """How many of a step's `count` samples each worker takes, by place."""
        self._meet()
        if self.learns and count == self.worker.batch_size:
            return self._counts
        return self.balancer.divide(count, self._members)

    def saw_step(self, batch: Batch, seconds: float, *, may_tell: bool = True) -> None:
        """This worker's pass over the batch took so long. `may_tell`: all workers are at this point."""
        if not self.learns:
            return
        if batch.samples:
            self.model.observe(batch.samples, seconds)
        self._steps += 1
        if not may_tell:
            return
        self.settle()
        assert isinstance(self.balancer, Learning)
        if self._steps >= self.balancer.every:
            self._steps = 0
            self._tell()

    def settle(self) -> None:
        """Hear what the others have told, where they have, and decide. Collective."""
        if self._told is None:
            return
        (told, handle), self._told = self._told, None
        self.worker.comm.wait(handle)
        self._members = members_of(self.worker.comm.workers, told.tolist())
        if any(member.speed.passes for member in self._members):
            self._decide()

    def drop(self) -> None:
        """What was told is lost with whom it was told to."""
        self._told, self._steps = None, 0

    # Inside.

    def _meet(self) -> None:
        """Where others are there than before, all begin as equals, but for what they go on to tell."""
        ranks = list(self.worker.comm.workers)
        if [member.rank for member in self._members] != ranks:
            unknown = Speed(0.0, 1.0)
            self._members = [Member(rank, unknown) for rank in ranks]
            self._counts = self.balancer.divide(self.worker.batch_size, self._members)

    def _tell(self) -> None:
        comm, speed = self.worker.comm, self.model.speed
        told = torch.zeros(comm.size, 7, dtype=torch.float64)
        most = most_samples(self.worker)
        told[comm.index] = torch.tensor(
            [*speed, -1 if most is None else most, self.worker.exchange_s], dtype=told.dtype
        )
        self._told = (told, comm.all_reduce(told))

    def _decide(self) -> None:
        assert isinstance(self.balancer, Learning)
        now, members = self._counts, self._members
        wanted = self.balancer.divide(self.worker.batch_size, members)
        before_s, after_s = finish_s(now, members), finish_s(wanted, members)
        saves = 1 - after_s / before_s if before_s else 0.0
        least = max(self.balancer.gain, SURE * self._error(now))
        if wanted != now and (saves >= least or self._is_forced(now)):
            self._counts = wanted
            self._record(now, before_s, after_s, least)

    def _error(self, counts: Sequence[int]) -> float:
        """How well it is known when the last is through."""
        last = max(range(len(counts)), key=lambda i: self._members[i].finish_s(counts[i]))
        return self._members[last].speed.error

    def _is_forced(self, counts: Sequence[int]) -> bool:
        """Whether somebody has more than fits."""
        return any(m.most is not None and count > m.most for m, count in zip(self._members, counts, strict=True))

    def _record(self, before: Sequence[int], before_s: float, after_s: float, least: float) -> None:
        worker = self.worker
        if worker.comm.index != 0:
            return
        self._recorder.write(
            "balance",
            worker.comm.clock.now_ns(),
            step=worker.steps_done,
            position=worker.position,
            balancer=self.balancer.name,
            ranks=[member.rank for member in self._members],
            before=list(before),
            after=list(self._counts),
            predicted_s={"before": before_s, "after": after_s},
            least=least,
            members=[
                {**member.speed._asdict(), "most": member.most, "exchange_s": member.exchange_s}
                for member in self._members
            ],
        )


def members_of(ranks: Sequence[int], told: Sequence[Sequence[float]]) -> list[Member]:
    """What all have told; one that knows nothing of itself yet is taken to be like the others."""
    speeds = [Speed(row[0], row[1], row[2], row[3], int(row[4])) for row in told]
    known = [speed for speed in speeds if speed.passes]
    if known:
        like = Speed(statistics.median(s.fixed_s for s in known), statistics.median(s.per_sample_s for s in known))
        speeds = [speed if speed.passes else like for speed in speeds]
    return [
        Member(rank, speed, None if row[5] < 0 else int(row[5]), row[6])
        for rank, speed, row in zip(ranks, speeds, told, strict=True)
    ]
