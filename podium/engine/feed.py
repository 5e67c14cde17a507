"""Where a worker's batches come from: its share of each global step or round, or leases from the servers' cursor."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import islice
from typing import Any, NamedTuple, final

import torch

from podium.balance.fixed import Fixed
from podium.balance.runtime import Balancing
from podium.balance.steal import Steal
from podium.data.base import Dataset, read_pair
from podium.data.order import GlobalOrder, Slice, divide, part_of
from podium.engine.batch import Batch, Draws, OpenBatch
from podium.engine.device import to_device
from podium.engine.worker import Worker
from podium.errors import ConfigError
from podium.servers.leases.lease import PATIENCE, Lease, NoLease
from podium.servers.wire.messages import Draw, DrawReply, decode, encode


class Feed(ABC):
    """Yields the batches of one worker until the horizon."""

    def __init__(self, dataset: Dataset, order: GlobalOrder, worker: Worker, device: torch.device) -> None:
        self.dataset, self.order, self.worker, self.device = dataset, order, worker, device

    took_s = 0.0
    """Seconds that the last `fetch` took, without waiting for other ranks."""

    def fetch(self) -> Batch | None:
        """The next batch, or None when this segment is over; sets `took_s`."""
        comm = self.worker.comm
        began, waited = comm.clock.now_ns(), comm.waited_ns
        batch = self.next()
        self.took_s = (comm.clock.now_ns() - began - (comm.waited_ns - waited)) / 1e9
        return batch

    @abstractmethod
    def next(self) -> Batch | None:
        """The next batch, or None when this segment is over."""

    def batch(self, mine: Slice, weight: float, end: int, lease: int = -1) -> Batch:
        """These samples, on the device; `end`: the position at which their step ends."""
        if mine.count == 0:
            return Batch(None, None, 0, 0.0, mine, end, lease)
        drawing = self.worker.generators.computing() if self.worker.generators.are_own else nullcontext()
        with drawing:  # augmentation may draw from the global generators
            inputs, targets = read_pair(self.dataset, self.order.indices(mine), self.order.keys(mine))
        return Batch(
            to_device(inputs, self.device), to_device(targets, self.device), mine.count, weight, mine, end, lease
        )


@final
class StepFeed(Feed):
    """This worker's share of each global step."""

    def __init__(self, *args: Any, balancing: Balancing | None = None, weighed: bool = False) -> None:
        """`weighed`: by the task's `weigh`, which costs one more small exchange per step.

        It also means that workers go through every step together, so that they can draw from it (`Steal`).
        """
        super().__init__(*args)
        self._balancing, self._weighed = balancing, weighed and self.worker.gradients.options.weigh is not None
        balancer = None if balancing is None else balancing.balancer
        self._steal = balancer if isinstance(balancer, Steal) and weighed else None
        if self._steal is not None and self._weighed:
            raise ConfigError(
                "balance steal: workers that draw do not know what the whole step weighs, so the task must have no "
                "weigh; use balance=equal-finish"
            )

    def next(self) -> Batch | None:
        worker = self.worker
        progress = worker.progress
        if progress.position >= progress.horizon:
            return None
        step = self.order.rest_of_step(progress.position, progress.batch_size, progress.horizon)
        size = worker.comm.size
        if self._steal is not None and size > 1:
            most = -(-progress.batch_size // (size * worker.gradients.options.accumulate))
            return OpenBatch.of(step, _Stolen(self, step, self._steal.sizes(step.count, size, most)))
        counts = divide(step.count, [1.0] * size) if self._balancing is None else self._balancing.counts(step.count)
        mine = part_of(step, counts, worker.comm.index)
        batch = self.batch(mine, mine.count / step.count, step.position + step.count)
        return batch._replace(weight=self._weight(batch)) if self._weighed else batch

    def _weight(self, batch: Batch) -> float:
        """This batch's part of the whole step's weight. Collective."""
        weigh, comm = self.worker.gradients.options.weigh, self.worker.comm
        assert weigh is not None
        mine = float(weigh(batch.targets)) if batch.samples else 0.0
        if not 0 <= mine < math.inf:
            raise ConfigError(f"weigh must say how much targets count, a number of at least 0, got {mine}")
        total = torch.tensor([mine], dtype=torch.float64)
        if comm.size > 1:
            comm.wait(comm.all_reduce(total))
        return mine / float(total) if total > 0 else 0.0


@final
class _Stolen(Draws):
    """Micro-batches of one step, of these sizes; each goes to the worker that draws it first."""

    def __init__(self, feed: Feed, step: Slice, sizes: Sequence[int]) -> None:
        super().__init__()
        self._feed, self._step, self._sizes = feed, step, sizes

    def _draw(self) -> Batch | None:
        feed, step = self._feed, self._step
        number = feed.worker.comm.draw(step.position)
        if number >= len(self._sizes):
            return None
        piece = part_of(step, self._sizes, number)
        return feed.batch(piece, piece.count / step.count, step.position + step.count)


class RoundPlan(NamedTuple):
    """One worker's slices of a round."""

    begin: int
    end: int
    """Sample positions of the whole round, over all workers."""
    mine: list[Slice]
    """One per step, in order; at least one, which may hold no samples."""
    steps: float
    """The round's length in global steps."""

    def step_at(self, k: int) -> int:
        """Global steps of the round that correspond to k steps of this worker."""
        return round(k * self.steps / len(self.mine))


def parts_from(order: GlobalOrder, position: int, end: int, batch_size: int, size: int) -> Iterator[Slice]:
    """The order from `position` on, each global step cut in `size` parts, up to `end` or the end of the epoch.

    Where a step has fewer samples than parts, some are empty. A step that was begun is continued.
    """
    while position < end:
        offset = position % order.samples
        begin = position - offset % batch_size
        step = order.slice_at(begin, min(batch_size, end - begin))
        at = begin
        for count in divide(step.count, [1.0] * size):
            start, at = max(at, position), at + count
            if at > position or (count == 0 and position == begin):
                yield order.slice_at(start, at - start)
        position = at
        if position % order.samples == 0:
            return


def plan_round(
    order: GlobalOrder, position: int, horizon: int, batch_size: int, paces: Sequence[int], index: int
) -> RoundPlan:
    """The slices of the worker at `index` in the round that begins here; worker i does `paces[i]` parts of the round.

    A part is one worker's equal share of a global step. The last round of an epoch or segment has fewer parts, which
    are divided in the same proportion.
    """
    parts = list(islice(parts_from(order, position, horizon, batch_size, len(paces)), sum(paces)))
    counts = list(paces) if len(parts) == sum(paces) else divide(len(parts), paces)
    before = sum(counts[:index])
    mine = parts[before : before + counts[index]]
    end = parts[-1].position + parts[-1].count
    held = [part for part in mine if part.count] or [order.slice_at(position, 0)]
    return RoundPlan(position, end, held, len(parts) / len(paces))


@final
class RoundFeed(Feed):
    """This worker's parts of each round, where workers do unequal numbers of steps.

    `progress.round_steps` holds these numbers. The worker's position stays where the round began until its last step of
    the round is done. With one step per worker it is the division of a `StepFeed`.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._plan: RoundPlan | None = None

    def next(self) -> Batch | None:
        worker, progress, k = self.worker, self.worker.progress, self.worker.round.steps
        if progress.position >= progress.horizon:
            worker.replica.follow_schedule(self._step_at(progress.position))
            return None
        if k == 0 or self._plan is None:
            where = (progress.position, progress.horizon, progress.batch_size)
            self._plan = plan_round(self.order, *where, progress.round_steps, worker.comm.index)
        plan = self._plan
        worker.replica.follow_schedule(self._step_at(plan.begin) + plan.step_at(k))
        piece, is_last = plan.mine[k], k == len(plan.mine) - 1
        weight, end = piece.count / (plan.end - plan.begin), plan.end if is_last else plan.begin
        return self.batch(piece, weight, end, lease=0)  # any lease: the schedule was advanced above

    def _step_at(self, position: int) -> int:
        """The global step that begins here, or is under way."""
        epochs, offset = divmod(position, self.order.samples)
        batch_size = self.worker.progress.batch_size
        return self.order.steps(batch_size, 1) * epochs + offset // batch_size


@final
class CursorFeed(Feed):
    """Leases from the cursor on the first server: the answer to a push carries the next one, where any is left.

    A lease of several slices gives one batch per slice; the rest of it stays the worker's next lease.
    """

    def next(self) -> Batch | None:
        worker = self.worker
        lease = worker.leases.take() or self._draw()
        if isinstance(lease, NoLease):
            worker.progress.move_to(lease.position)
            worker.votes.agree(lease.agreed)
            return None
        lease, rest = lease.first_cut()
        worker.leases.put(rest)
        self._follow_schedule(lease.slice)
        return self.batch(lease.slice, lease.slice.count / lease.step, lease.end, lease.number)

    def _draw(self) -> Lease | NoLease:
        """Request a lease; the server may answer only when all other workers have finished theirs.

        A serve-only worker is answered after a number of other workers' pushes, each of which may take as long, and
        requests again.
        """
        worker, comm, patience = self.worker, self.worker.comm, 1
        while True:
            asked = Draw(worker.leases.take_applied(), worker.votes.requested, patience)
            call = comm.call(comm.servers[0], "draw", encode(asked))
            (answer,) = comm.wait(call, deadline_s=patience * PATIENCE * comm.deadline_s)
            assert answer is not None
            reply = decode(DrawReply, answer)
            if reply.again is None:
                return reply.told(answer.body)
            patience = reply.again

    def _follow_schedule(self, piece: Slice) -> None:
        """Use the learning rate of the global step in which the lease lies."""
        worker = self.worker
        if worker.replica.schedule is None:
            return
        batch_size = worker.progress.batch_size
        steps_per_epoch = -(-self.order.samples // batch_size)
        worker.replica.follow_schedule(piece.epoch * steps_per_epoch + piece.offset // batch_size)


def make_feed(
    kind: str,
    dataset: Dataset,
    order: GlobalOrder,
    worker: Worker,
    device: torch.device,
    balancing: Balancing | None = None,
    *,
    weighed: bool = False,
) -> Feed:
    """The feed of this kind (`Cadence.feed`).

    For global steps, `balancing` divides them, and `weighed` applies the task's `weigh`.
    """
    if kind == "lease":
        return CursorFeed(dataset, order, worker, device)
    if kind == "round":
        if balancing is not None and isinstance(balancing.balancer, Fixed):
            raise ConfigError("shares divide a global step, and here workers do unequal numbers of steps; use steps")
        return RoundFeed(dataset, order, worker, device)
    return StepFeed(dataset, order, worker, device, balancing=balancing, weighed=weighed)
