"""Where a worker's batches come from: its share of each global step, or leases from the servers' cursor."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, final

import torch

from podium.comm.base import Meta
from podium.data.base import Dataset
from podium.data.order import GlobalOrder, Slice, share_of
from podium.nests import map_tensors
from podium.servers.server import PATIENCE
from podium.worker import Batch, Worker


class Feed(ABC):
    """Hands out the batches of one worker until the horizon."""

    def __init__(self, dataset: Dataset, order: GlobalOrder, worker: Worker, device: torch.device) -> None:
        self.dataset, self.order, self.worker, self.device = dataset, order, worker, device

    @abstractmethod
    def next(self) -> Batch | None:
        """The next batch, or None when this stretch of training is over."""

    def _batch(self, mine: Slice, weight: float, end: int, lease: int = -1) -> Batch:
        if mine.count == 0:
            return Batch(None, None, 0, 0.0, mine, end, lease)
        inputs, targets = self.dataset.gather(self.order.indices(mine), self.order.keys(mine))
        return Batch(
            to_device(inputs, self.device), to_device(targets, self.device), mine.count, weight, mine, end, lease
        )


@final
class StepFeed(Feed):
    """This worker's share of each global step."""

    def __init__(self, *args: Any, shares: Sequence[float] | None = None) -> None:
        super().__init__(*args)
        self._shares = shares

    def next(self) -> Batch | None:
        worker = self.worker
        if worker.position >= worker.horizon:
            return None
        step = self.order.slice_at(worker.position, min(worker.batch_size, worker.horizon - worker.position))
        members = worker.comm.workers
        shares = [1.0] * len(members) if self._shares is None else [self._shares[r] for r in members]
        mine = share_of(step, shares, worker.comm.index)
        return self._batch(mine, mine.count / step.count, step.position + step.count)


@final
class CursorFeed(Feed):
    """Leases from the cursor on the first server: one comes with the answer to a push, where there is one left."""

    def next(self) -> Batch | None:
        worker = self.worker
        lease, worker.next_lease = worker.next_lease, None
        if lease is None:
            lease = self._draw()
        if "lease" not in lease:
            worker.position = lease["position"]
            worker.heed(lease["agreed"])
            return None
        piece = Slice(*lease["piece"])
        self._follow_schedule(piece)
        return self._batch(piece, piece.count / lease["of"], piece.position + piece.count, lease["lease"])

    def _draw(self) -> Meta:
        """Ask for a lease; the answer may have to wait until all others are through with theirs."""
        worker, comm = self.worker, self.worker.comm
        asked = {"done": worker.lease_done, "wishes": list(worker.wishes)}
        worker.lease_done = -1
        call = comm.call(comm.servers[0], "draw", asked)
        (answer,) = comm.wait(call, deadline_s=PATIENCE * comm.deadline_s)
        assert answer is not None
        return answer.meta

    def _follow_schedule(self, piece: Slice) -> None:
        """The learning rate is that of the global step in which the lease lies."""
        worker = self.worker
        if worker.schedule is None:
            return
        steps_per_epoch = -(-self.order.samples // worker.batch_size)
        due = piece.epoch * steps_per_epoch + piece.offset // worker.batch_size
        while worker.schedule.last_epoch < due:
            worker.step_schedule()


def to_device(value: Any, device: torch.device) -> Any:
    """Every tensor of a nest, on this device."""
    return map_tensors(lambda tensor: tensor.to(device, non_blocking=True), value)
