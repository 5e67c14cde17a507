"""The user's own training loop, under any strategy: what `podium.join` returns.

The steps are those of `podium train` (`SegmentLoop`); the user's code runs between two steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from podium.config import RunConfig
from podium.data.base import Dataset, as_dataset
from podium.data.order import GlobalOrder
from podium.engine.batch import Batch
from podium.engine.files import save_tensors
from podium.engine.fingerprints import Digest, compare, model_facts
from podium.engine.recovery import Control, share_from_first
from podium.engine.segment import Driver, SegmentLoop
from podium.engine.worker import Worker
from podium.errors import ConfigError, Lost, PodiumError
from podium.records.recorder import Recorder
from podium.servers.worker_side.collecting import break_out
from podium.strategies.base import Strategy
from podium.strategies.triggers.base import Course

Notices = Callable[[Strategy[Any], Course, int], Sequence[str]]
"""Warnings to show before the first step, given the strategy, the course and the number of workers."""


class Run:
    """One worker of a run whose loop is the user's."""

    def __init__(
        self,
        worker: Worker,
        strategy: Strategy[Any],
        config: RunConfig,
        recorder: Recorder,
        control: Control,
        *,
        notices: Notices = lambda strategy, course, workers: (),
    ) -> None:
        self.worker, self.comm, self._plan, self._notices = worker, worker.comm, strategy, notices
        self.seed = worker.context.seed
        self._loop = SegmentLoop(
            worker,
            strategy,
            Course(1, 1),  # until `batches` brings the data
            config,
            recorder,
            control,
            buffers=config.buffers or "mean",
            driver=Driver(totals=lambda: {"total_samples": worker.progress.horizon}),
        )
        self._batch: Batch | None = None
        self._step_failed = False
        self._calls = self._end = 0  # of `batches`: how many there were, and where the present one ends
        self.failure: PodiumError | None = None
        """An error from when the user broke out of the loop; raised by the next call, or at the script's end."""
        self._digested: tuple[tuple[Any, ...], Digest] | None = None  # the data of the last comparison

    @property
    def strategy(self) -> Strategy[Any]:
        """The present phase's strategy."""
        return self._loop.strategy

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many workers train together now."""
        return self.comm.size

    @property
    def is_first(self) -> bool:
        """Whether this worker is the one to print, validate and save."""
        return self.comm.index == 0

    # The loop.

    def batches(
        self, data: Any, *, batch_size: int, epochs: int = 1, total_epochs: int | None = None
    ) -> Iterator[tuple[Any, Any]]:
        """This worker's part of every global step of `batch_size` samples, for this many further epochs.

        `total_epochs`: the epochs of all calls together, where a script calls this for a few epochs at a time. The
        run's budget, at fractions of which phases may end, is this number. Default: the epochs of this call.

        `data` is a map-style data set, a pair of arrays or a `podium.Dataset`. Each batch needs one call of `step`.
        """
        self.check()
        self._leave_last_loop()
        if self._loop.retired:
            return
        self._calls += 1
        told = {"batch_size": batch_size, "epochs": epochs, "total_epochs": total_epochs}
        order = self._begin_alike(data, told)
        self._end = self.worker.position + epochs * order.samples
        last = max(self._end, (total_epochs or 0) * order.samples)
        self._follow(Course(order.samples, batch_size, last, eval_every=0))  # the script validates, not Podium
        yield from self._segments(self._calls)

    def _leave_last_loop(self) -> None:
        """End a segment that is still open: an earlier loop over `batches` was left without Python closing it.

        After a step that raised, the other workers may be anywhere in it: the segment is dropped, not ended.
        """
        if not self._loop.is_under_way:
            return
        if not self._step_failed:
            self._break_out()
            self.check()
        elif self.strategy.cadence.by_leases:
            raise ConfigError(
                f"run.batches: the last step raised, and under {self.strategy.name} the servers wait for its samples; "
                "end the script, or catch the error inside the closure"
            )
        else:
            self._loop.drop_segment()
            self._batch, self._step_failed = None, False

    def _begin_alike(self, data: Any, told: Mapping[str, Any]) -> GlobalOrder:
        """Check the data, and copy the first worker's replica before the first step. Collective."""
        worker, dataset, batch_size = self.worker, as_dataset(data), told["batch_size"]
        order = GlobalOrder(len(dataset), self.seed)
        if batch_size < self.size:
            raise ConfigError(f"batch_size must be at least one sample per worker ({self.size}), got {batch_size}")
        if worker.progress.samples not in (0, order.samples):
            raise ConfigError(
                f"run.batches: the data must stay the same: {worker.progress.samples} samples, now {order.samples}"
            )
        self._loop.train_on(dataset, order, batch_size)
        worker.flat.check()
        if worker.steps_done == 0:
            self._compare(data, dataset, told)
            share_from_first(worker)
        else:
            with self._loop.surviving():
                self._compare(data, dataset, told)
        self._loop.check_state()
        return order

    def _follow(self, course: Course) -> None:
        """Continue the phases of the run from one call of `batches` to the next."""
        if self._loop.phases.course.end == 0 and self.is_first:
            for text in self._notices(self._plan, course, self.size):
                logging.getLogger("podium").warning(text)
        self._loop.phases.follow(course)

    def _segments(self, call: int) -> Iterator[tuple[Any, Any]]:
        """Batches of this call, segment by segment. Survives a loss anywhere but in the user's own code."""
        loop, left = self._loop, False
        while not left and (loop.is_under_way or self._has_more()):
            batch: Batch | None = None
            with loop.surviving():
                batch = self._next_batch()
                if batch is None:
                    left = self._end_segment()
            if batch is None:
                continue
            self._batch = batch
            if batch.samples == 0:
                self.step(None)
                continue
            try:
                yield batch.inputs, batch.targets
            except GeneratorExit:  # the user breaks out, as all workers must; if synchronous, after the same step
                if call == self._calls and not self._step_failed:  # else the other workers may be gone
                    self._break_out()
                raise
            if call != self._calls:
                raise ConfigError("run.batches: this loop ended when run.batches was called again")
            if self._batch is not None:
                raise ConfigError("run.batches: every batch needs one call of run.step before the next")

    def _has_more(self) -> bool:
        return not self._loop.retired and self.worker.position < self._end and not self.worker.votes.agreed.stop

    def _begin_segment(self) -> None:
        self._loop.prepare()
        self._loop.begin(min(self._end, self._loop.phases.horizon))

    def _next_batch(self) -> Batch | None:
        if not self._loop.is_under_way:  # the first of a segment, or a peer was lost in the last one
            self._begin_segment()
        batch = self._loop.next_batch()
        weighs = self.worker.gradients.options.weigh is not None and self.strategy.cadence.feed == "step"
        if batch is not None and weighs and batch.weight == 0:
            return batch._replace(samples=0)  # all of it is padding: a mean over nothing is NaN
        return batch

    def step(self, closure: Callable[[], Tensor] | None) -> Tensor:
        """One step of the strategy on the present batch; `closure` computes its mean loss.

        When a peer is lost meanwhile, the survivors regroup and this returns nan; later batches bring the samples of
        the undone step again.
        """
        self.check()
        batch, self._batch = self._batch, None
        if batch is None:
            raise ConfigError("run.step: there is no batch in hand; call it once for each batch of run.batches")
        if not self._loop.is_under_way:  # a peer was lost in `sync_buffers`, and the survivors have regrouped
            return torch.tensor(float("nan"))
        self._step_failed = True
        try:
            loss = self._loop.step(batch._replace(closure=closure))
        except Lost as error:
            self._loop.recover(error)
            loss = torch.tensor(float("nan"))
        self._step_failed = False
        return loss

    def _break_out(self) -> None:
        """The user left the loop. Python drops an error raised here, so it is stored for the next call.

        Where workers lease samples and a peer is lost meanwhile, survivors that have not left the loop begin another
        segment: this worker takes part in it, and leaves it.
        """
        left, loop = False, self._loop
        try:
            with loop.surviving():
                left = self._end_segment(broke=True)
            while not left and self.strategy.cadence.by_leases and self._has_more():
                with loop.surviving():
                    self._begin_segment()
                    left = self._end_segment(broke=True)
        except PodiumError as error:
            self.failure = error

    def _end_segment(self, *, broke: bool = False) -> bool:
        """Finish the segment and sync buffers; returns whether the user's loop ends with it. Collective.

        Where workers lease samples, one may break out while another still trains. Its leases go back to the cursor for
        other workers; samples that no worker has taken by then are left out of this epoch. Training continues behind
        the last sample that was leased.
        """
        worker, loop, cadence, in_hand = self.worker, self._loop, self.strategy.cadence, self._batch
        self._batch = None
        if broke and cadence.feed == "round" and worker.round.steps:
            raise ConfigError(
                f"rank {self.rank}: run.batches was left in mid-round. Under steps=speed workers do unequal "
                "numbers of steps between two exchanges, so the loop must end by itself: give it fewer epochs"
            )
        furthest = max(worker.position, 0 if in_hand is None else in_hand.end, worker.leases.end)
        if loop.is_under_way:
            if broke and cadence.by_leases:
                loop.settle()
                break_out(worker)
            loop.finish()
        if cadence.feed != "step" and self.size > 1:
            rows = self.comm.gather_aside(torch.tensor([max(furthest, worker.position), broke], dtype=torch.int64))
            worker.progress.move_to(int(rows[:, 0].max()))
            broke = bool(rows[:, 1].any())
        worker.leases.put(None)
        worker.progress.close_round()
        self._between_segments()
        return broke

    def _between_segments(self) -> None:
        """Sync buffers; then change the phase or the members, where due."""
        loop = self._loop
        loop.sync_buffers()
        if loop.phases.is_over:
            loop.end_phase()
        if self.worker.votes.agreed.pause:
            loop.change_members()

    def _compare(self, data: Any, dataset: Dataset, told: Mapping[str, Any]) -> None:
        """Raise where ranks have different data, settings or models. Collective."""
        held, worker = tuple(data) if isinstance(data, tuple) else (data,), self.worker
        if self._digested is None or not _same_objects(held, self._digested[0]):
            self._digested = held, Digest.of(dataset) if self.size > 1 else Digest(len(dataset), 0, ())
        replica, weigh = worker.replica, worker.gradients.options.weigh
        facts = {**told, "seed": self.seed, "clip_norm": replica.clip_norm, "schedule": type(replica.schedule).__name__}
        facts |= {"weigh": weigh is not None, **model_facts(worker.model, worker.optimizer)}
        compare(self.comm, facts, {"training data": self._digested[1]})

    # Beside the loop.

    def sync_buffers(self) -> None:
        """Make buffers that training changes (BatchNorm's running statistics) the same on all workers, now. Collective.

        `run.batches` does so whenever it ends; call it where you use the model before that, on all workers. Does
        nothing under `buffers=local`.
        """
        if not self._loop.retired:
            with self._loop.surviving():
                self._loop.sync_buffers()

    def save(self, path: str | Path) -> None:
        """Write the model as safetensors; does nothing except on the first worker."""
        self.check()
        if self.is_first:
            save_tensors(Path(path), self.worker.model.state_dict())

    def check(self) -> None:
        """Raise `failure`, if any."""
        if self.failure is not None:
            raise self.failure

    def param_hash(self) -> str:
        self.check()
        return self.worker.replica.hash()


def _same_objects(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(a is b for a, b in zip(some, others, strict=True))
