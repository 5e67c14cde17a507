"""The balancer at run time: which worker does how much of a global step.

Every worker learns its own speed from its own passes. Every few steps the workers exchange their speeds, in one small
message that travels during the next step. Then all workers call the balancer with the same arguments, get the same
division, and use it from the step after, if it promises enough. Nothing else is shared or saved: a worker that joins is
assumed to be like the others until it has sent its speed, and after a resume all workers learn again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from podium.balance.base import Balancer, Learning, Member, finish_s
from podium.balance.memory import Memory
from podium.balance.speed import UNKNOWN_NOISE, Speed, SpeedModel

if TYPE_CHECKING:
    from podium.comm.base import Handle
    from podium.engine.worker import Worker
    from podium.records.recorder import Recorder

SURE = 2.0
"""A predicted gain must exceed this many standard errors."""
PATIENCE = 3
"""Decisions after which a worker without samples is tried again, at the earliest."""
CURIOSITY = 0.02
"""The part of the time that may be spent on trying workers without samples again."""
DOUBT = 24
"""Decisions after which such a worker is tried again at any cost: its speed may have been misjudged. Doubles after each
failed try."""
SEEN, KNOWN = 16, 0.05
"""A worker loses its last sample only after this many passes, and below this standard error of its speed."""


class Decision(NamedTuple):
    """A new division of steps."""

    counts: list[int]
    why: Literal["gain", "memory", "look"]
    """It saves time; or a worker had more samples than fit; or a worker without samples is tried again."""
    before_s: float
    after_s: float
    """Predicted seconds of a step, before and after."""
    least: float
    """The part of a step that had to be saved."""


class Balancing:
    """One worker's part in dividing global steps."""

    def __init__(self, balancer: Balancer, worker: Worker, recorder: Recorder) -> None:
        self.balancer, self.worker, self._recorder = balancer, worker, recorder
        self.model = SpeedModel()
        self.memory = Memory(worker.replica.device)
        self._members: list[Member] = []
        self._counts: list[int] = []
        """Each worker's part of a whole global step, by index."""
        self._idle: list[int] = []
        """Decisions since each worker last had samples, by index."""
        self._vain: list[int] = []
        """How often each worker was tried again and failed, by index."""
        self._steps = 0  # since the last exchange
        self._steps_s = 0.0  # seconds of these
        self._step_s = 0.0  # seconds of a step, the same on all workers
        self._told: tuple[Tensor, Handle] | None = None

    @property
    def learns(self) -> bool:
        return isinstance(self.balancer, Learning) and self.worker.comm.size > 1

    def counts(self, count: int) -> list[int]:
        """How many of a step's `count` samples each worker takes, by index."""
        self._meet()
        if self.learns and count == self.worker.progress.batch_size:
            return self._counts
        return self.balancer.divide(count, self._members)

    def saw_step(self, samples: int, seconds: float, step_s: float = 0.0, *, may_tell: bool = True) -> None:
        """This worker took `seconds` for a pass over `samples`, their loading included, and `step_s` for the step.

        `may_tell`: all workers call it at this point, so that they may exchange speeds.
        """
        if not self.learns:
            return
        if samples:
            self.model.observe(samples, seconds)
            self.memory.observe(-(-samples // self._parts))
        self._steps, self._steps_s = self._steps + 1, self._steps_s + step_s
        if not may_tell:
            return
        self.settle()
        assert isinstance(self.balancer, Learning)
        if self._steps >= self.balancer.every:
            self._tell()
            self._steps, self._steps_s = 0, 0.0

    def settle(self) -> None:
        """Wait for the speeds in flight, if any, and decide. Collective."""
        if self._told is None:
            return
        (told, handle), self._told = self._told, None
        self.worker.comm.wait(handle)
        self._members = members_of(self.worker.comm.workers, told[:, :-1].tolist())
        self._step_s = float(told[:, -1].max())
        self._decide()

    def drop(self) -> None:
        """The workers regroup. Some may have received the speeds in flight and others not, so all begin as equals."""
        self._told, self._steps, self._steps_s, self._members = None, 0, 0.0, []

    # Inside.

    @property
    def _parts(self) -> int:
        """Passes per step of this worker: limits of samples at a time hold for each pass."""
        return self.worker.gradients.options.accumulate

    def _meet(self) -> None:
        """Where the members have changed, all begin as equals, until they exchange their speeds."""
        ranks, batch_size = list(self.worker.comm.workers), self.worker.progress.batch_size
        if [member.rank for member in self._members] != ranks:
            self._members = [Member(rank, UNKNOWN, self._limit(rank)) for rank in ranks]
        elif sum(self._counts) == batch_size:
            return
        self._counts = self.balancer.divide(batch_size, self._members)
        self._idle, self._vain = [0] * len(ranks), [0] * len(ranks)

    def _limit(self, rank: int) -> int | None:
        """The user's limit for a worker, in samples of a whole step."""
        limit = self.balancer.limit(rank) if isinstance(self.balancer, Learning) else None
        return None if limit is None else limit * self._parts

    def _tell(self) -> None:
        comm, speed, most = self.worker.comm, told_of(self.model), self.memory.most
        limits = [self._limit(comm.rank), None if most is None else most * self._parts]
        limit = min((each for each in limits if each is not None), default=-1)
        mine = [*speed, limit, self.worker.gradients.times.exchange_s, self._steps_s / self._steps]
        told = torch.zeros(comm.size, len(mine), dtype=torch.float64)
        told[comm.index] = torch.tensor(mine, dtype=told.dtype)
        self._told = (told, comm.all_reduce(told))

    def _decide(self) -> None:
        assert isinstance(self.balancer, Learning)
        self._idle = [0 if count else idle + 1 for count, idle in zip(self._counts, self._idle, strict=True)]
        looks = (self._idle, self._vain)
        found = decide(
            self.balancer, self.worker.progress.batch_size, self._counts, self._members, *looks, step_s=self._step_s
        )
        if found is not None:
            self._vain = in_vain(self._vain, self._counts, found)
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
    balancer: Learning,
    count: int,
    now: Sequence[int],
    members: Sequence[Member],
    idle: Sequence[int],
    vain: Sequence[int] = (),
    *,
    step_s: float = 0.0,
) -> Decision | None:
    """Whether and how to change the division `now` of steps of `count` samples.

    A change must be predicted to save the balancer's `gain`, and more than noise: `SURE` standard errors of the speeds
    of the workers that it affects. A change because a worker's memory is too small need not save time. `step_s`:
    seconds of a whole step; the saving must also be at least `gain` of it.

    The speed of a worker without samples cannot be measured. So a worker keeps one sample where that costs less than
    `gain`, or where too little is known of its speed; otherwise it gets one from time to time, less often the more that
    costs. `idle`: decisions since each worker last had samples; `vain`: how often it was tried again and lost the
    sample again.
    """
    if not any(member.speed.passes for member in members):
        return None
    wanted = _leave_one(balancer.divide(count, members), now, members, balancer.gain)
    before_s, after_s = finish_s(now, members), finish_s(wanted, members)
    least = max(balancer.gain, SURE * _error(now, wanted, members, balancer.gain))
    if wanted != list(now):
        if any(m.most is not None and have > m.most for m, have in zip(members, now, strict=True)):
            return Decision(wanted, "memory", before_s, after_s, least)
        worth = before_s - after_s >= balancer.gain * step_s
        if before_s > 0 and worth and 1 - after_s / before_s >= least:
            return Decision(wanted, "gain", before_s, after_s, least)
    tried = _look(now, members, idle, vain, before_s)
    return None if tried == list(now) else Decision(tried, "look", before_s, finish_s(tried, members), least)


def in_vain(vain: Sequence[int], before: Sequence[int], found: Decision) -> list[int]:
    """The new counts of failed tries after this decision."""
    if found.why == "look":
        return [times + (had == 0 and has > 0) for times, had, has in zip(vain, before, found.counts, strict=True)]
    return [0 if has > 1 else times for times, has in zip(vain, found.counts, strict=True)]


def _look(
    now: Sequence[int], members: Sequence[Member], idle: Sequence[int], vain: Sequence[int], before_s: float
) -> list[int]:
    """The division `now`, with one sample for each idle worker that is due, and for idle workers no slower than it."""
    without = [i for i, member in enumerate(members) if now[i] == 0 and member.most != 0 and before_s > 0]
    costs = {i: members[i].finish_s(1) / before_s - 1 for i in without}
    waits = {i: max(PATIENCE, min(costs[i] / CURIOSITY, DOUBT * 2 ** (vain[i] if vain else 0))) for i in without}
    due = [costs[i] for i in without if idle[i] >= waits[i]]
    counts = list(now)
    for i in without:
        if due and costs[i] <= max(due) and max(counts) > 1:
            counts = _give_one(counts, i)
    return counts


def _leave_one(wanted: list[int], now: Sequence[int], members: Sequence[Member], gain: float) -> list[int]:
    """A worker that would lose its last sample keeps one where that costs, or may cost, little."""
    end_s = finish_s(wanted, members)
    for i, member in enumerate(members):
        unsure = member.speed.passes < SEEN or member.speed.error > KNOWN
        if wanted[i] == 0 < now[i] and (unsure or member.finish_s(1) <= (1 + gain) * end_s):
            wanted = _give_one(wanted, i)
    return wanted


def _give_one(counts: Sequence[int], i: int) -> list[int]:
    """Move one sample to worker i from the worker with the most samples."""
    giver = max(range(len(counts)), key=lambda k: (counts[k], -k))
    return [count + (k == i) - (k == giver) for k, count in enumerate(counts)]


def _error(now: Sequence[int], wanted: Sequence[int], members: Sequence[Member], gain: float) -> float:
    """The largest error among the speeds that matter: of the last worker, and of all whose time would change.

    A worker that only seems fast would become the last one.
    """
    last = max(range(len(now)), key=lambda i: members[i].finish_s(now[i]))
    return max(
        member.speed.error
        for i, member in enumerate(members)
        if i == last or abs(member.finish_s(wanted[i]) - member.finish_s(now[i])) > gain * member.finish_s(now[i])
    )


UNKNOWN = Speed(0.0, 1.0)
"""Assumed of all workers while no speed is known: only proportions matter."""


def told_of(model: SpeedModel) -> Speed:
    """The speed that a worker sends: unknown until there are enough passes to tell stalls from slowness."""
    return model.speed if model.knows_noise else Speed(0.0, 0.0)


def members_of(ranks: Sequence[int], told: Sequence[Sequence[float]]) -> list[Member]:
    """Members from the exchanged rows; a worker that does not know its speed yet counts as a median one."""
    speeds = [Speed(row[0], row[1], row[2], row[3], int(row[4]), int(row[5])) for row in told]
    known = [speed for speed in speeds if speed.passes]
    like = UNKNOWN
    if known:
        middle = sorted(known, key=lambda speed: speed.seconds(speed.samples) / max(1, speed.samples))[len(known) // 2]
        like = middle._replace(error=UNKNOWN_NOISE, passes=0)
    return [
        Member(rank, speed if speed.passes else like, None if row[6] < 0 else int(row[6]), row[7])
        for rank, speed, row in zip(ranks, speeds, told, strict=True)
    ]
