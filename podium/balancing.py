"""Who does how much of a global step, while training goes on.

Every worker learns its own speed from its own passes. Every few steps they tell each other what they know, in one small
exchange that lies behind the next step; then all ask the balancer the same question, get the same answer, and take it
up with the step after, if it promises enough. Nothing else of this is shared or saved: whoever joins is taken to be
like the others until it has told, and after a resume all learn anew.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from podium.balance.base import Balancer, Learning, Member, finish_s
from podium.balance.memory import Memory
from podium.balance.speed import Speed, SpeedModel

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.measure.records import Recorder
    from podium.worker import Worker

SURE = 2.0
"""How many standard errors a promised gain must be beyond."""
PATIENCE = 3
"""Looks after which a worker that has nothing to do is tried again, at the earliest."""
CURIOSITY = 0.02
"""What part of the time may go into trying workers again that have nothing to do."""


class Decision(NamedTuple):
    """Another division of steps."""

    counts: list[int]
    why: Literal["gain", "memory", "look"]
    """It saves time; or somebody had more than fits; or somebody who had nothing is tried again."""
    before_s: float
    after_s: float
    """What a step is thought to take, now and then."""
    least: float
    """What part of a step had to be saved."""


class Balancing:
    """One worker's part in dividing global steps."""

    def __init__(self, balancer: Balancer, worker: Worker, recorder: Recorder) -> None:
        self.balancer, self.worker, self._recorder = balancer, worker, recorder
        self.model = SpeedModel()
        self.memory = Memory(worker.device)
        self._members: list[Member] = []
        self._counts: list[int] = []
        """Each worker's part of a whole global step, by place."""
        self._idle: list[int] = []
        """Looks since each had nothing to do, by place."""
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

    def saw_step(self, samples: int, seconds: float, *, may_tell: bool = True) -> None:
        """This worker's pass over so many samples took so long. `may_tell`: all workers are at this point."""
        if not self.learns:
            return
        if samples:
            self.model.observe(samples, seconds)
            self.memory.observe(-(-samples // self._parts))
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
        self._decide()

    def drop(self) -> None:
        """What was told is lost with whom it was told to."""
        self._told, self._steps = None, 0

    # Inside.

    @property
    def _parts(self) -> int:
        """Passes that a step of this worker is made of: what fits at a time fits into each."""
        return self.worker.accumulate

    def _meet(self) -> None:
        """Where others are there than before, all begin as equals, but for what they go on to tell."""
        ranks, batch_size = list(self.worker.comm.workers), self.worker.batch_size
        if [member.rank for member in self._members] != ranks:
            self._members = [Member(rank, UNKNOWN, self._limit(rank)) for rank in ranks]
        elif sum(self._counts) == batch_size:
            return
        self._counts = self.balancer.divide(batch_size, self._members)
        self._idle = [0] * len(ranks)

    def _limit(self, rank: int) -> int | None:
        """What the user says that a worker can hold, in a whole step."""
        limit = self.balancer.limit(rank) if isinstance(self.balancer, Learning) else None
        return None if limit is None else limit * self._parts

    def _tell(self) -> None:
        comm, speed, most = self.worker.comm, self.model.speed, self.memory.most
        limits = [self._limit(comm.rank), None if most is None else most * self._parts]
        limit = min((each for each in limits if each is not None), default=-1)
        told = torch.zeros(comm.size, len(speed) + 2, dtype=torch.float64)
        told[comm.index] = torch.tensor([*speed, limit, self.worker.exchange_s], dtype=told.dtype)
        self._told = (told, comm.all_reduce(told))

    def _decide(self) -> None:
        assert isinstance(self.balancer, Learning)
        self._idle = [0 if count else idle + 1 for count, idle in zip(self._counts, self._idle, strict=True)]
        found = decide(self.balancer, self.worker.batch_size, self._counts, self._members, self._idle)
        if found is not None:
            before, self._counts = self._counts, found.counts
            self._record(before, found)

    def _record(self, before: Sequence[int], found: Decision) -> None:
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
            after=list(found.counts),
            why=found.why,
            predicted_s={"before": found.before_s, "after": found.after_s},
            least=found.least,
            members=[
                {**member.speed._asdict(), "most": member.most, "exchange_s": member.exchange_s}
                for member in self._members
            ],
        )


def decide(
    balancer: Learning, count: int, now: Sequence[int], members: Sequence[Member], idle: Sequence[int]
) -> Decision | None:
    """Whether to divide steps of `count` samples otherwise than `now`, and how.

    A change must promise to save the balancer's `gain` and more than what may be noise: `SURE` standard errors of what
    is known of those whom it concerns. Somebody's memory being too small needs no promise.

    Whoever has nothing to do is no longer seen. So one sample is left where that costs less than `gain`; otherwise it
    gets one now and then, the more seldom the more that costs. `idle`: looks since each had nothing to do.
    """
    if not any(member.speed.passes for member in members):
        return None
    wanted = _leave_one(balancer.divide(count, members), now, members, balancer.gain)
    before_s, after_s = finish_s(now, members), finish_s(wanted, members)
    least = max(balancer.gain, SURE * _error(now, wanted, members, balancer.gain))
    if wanted != list(now):
        if any(m.most is not None and have > m.most for m, have in zip(members, now, strict=True)):
            return Decision(wanted, "memory", before_s, after_s, least)
        if before_s > 0 and 1 - after_s / before_s >= least:
            return Decision(wanted, "gain", before_s, after_s, least)
    tried = _look(now, members, idle, before_s)
    return None if tried == list(now) else Decision(tried, "look", before_s, finish_s(tried, members), least)


def _look(now: Sequence[int], members: Sequence[Member], idle: Sequence[int], before_s: float) -> list[int]:
    """The same, with a sample for those without any whose turn it is; for others too, if they need no longer for it."""
    without = [i for i, member in enumerate(members) if now[i] == 0 and member.most != 0 and before_s > 0]
    costs = {i: members[i].finish_s(1) / before_s - 1 for i in without}
    due = [costs[i] for i in without if idle[i] >= max(PATIENCE, costs[i] / CURIOSITY)]
    counts = list(now)
    for i in without:
        if due and costs[i] <= max(due) and max(counts) > 1:
            counts = _give_one(counts, i)
    return counts


def _leave_one(wanted: list[int], now: Sequence[int], members: Sequence[Member], gain: float) -> list[int]:
    """The same, but that whoever would lose its last sample keeps one, where that costs next to nothing."""
    end_s = finish_s(wanted, members)
    for i, member in enumerate(members):
        if wanted[i] == 0 < now[i] and member.finish_s(1) <= (1 + gain) * end_s:
            wanted = _give_one(wanted, i)
    return wanted


def _give_one(counts: Sequence[int], i: int) -> list[int]:
    """One sample to worker i from whoever has most."""
    giver = max(range(len(counts)), key=lambda k: (counts[k], -k))
    return [count + (k == i) - (k == giver) for k, count in enumerate(counts)]


def _error(now: Sequence[int], wanted: Sequence[int], members: Sequence[Member], gain: float) -> float:
    """How well the speed is known of those whom a change concerns: the last one, and all who would take longer or less.

    Somebody who seems to be faster than it is would be the last one then.
    """
    last = max(range(len(now)), key=lambda i: members[i].finish_s(now[i]))
    return max(
        member.speed.error
        for i, member in enumerate(members)
        if i == last or abs(member.finish_s(wanted[i]) - member.finish_s(now[i])) > gain * member.finish_s(now[i])
    )


UNKNOWN = Speed(0.0, 1.0)
"""What is thought of all as long as nothing is known of anybody: only proportions matter."""


def members_of(ranks: Sequence[int], told: Sequence[Sequence[float]]) -> list[Member]:
    """What all have told; one that knows nothing of itself yet is taken to be like the others."""
    speeds = [Speed(row[0], row[1], row[2], row[3], int(row[4]), int(row[5])) for row in told]
    known = [speed for speed in speeds if speed.passes]
    like = UNKNOWN
    if known:
        like = Speed(statistics.median(s.fixed_s for s in known), statistics.median(s.per_sample_s for s in known))
    return [
        Member(rank, speed if speed.passes else like, None if row[6] < 0 else int(row[6]), row[7])
        for rank, speed, row in zip(ranks, speeds, told, strict=True)
    ]
