"""The training loop: trains one worker segment by segment, for `podium train` and for a script's own loop.

    segment   init, steps until the horizon, finish; then the worker's own state is complete
    Lost      under a strategy that survives it: undo the step or round under way, ask the coordinator for the new
              members, copy the state of the most advanced worker, and begin a new segment from there
    pause     a worker joins or leaves: the segment ends at a step that all workers agree on; they regroup, and begin
              the next segment

Its driver calls `next_batch`, then `step`. What lies between segments (validation, checkpoints, the user's own code)
is the driver's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from torch import Tensor

from podium.balance import balancer_of
from podium.balance.runtime import Balancing
from podium.config import RunConfig
from podium.data.base import Dataset
from podium.data.order import GlobalOrder
from podium.engine.batch import Batch
from podium.engine.feed import Feed, make_feed
from podium.engine.losses import check_loss, check_parameters
from podium.engine.phase_runner import PhaseRunner
from podium.engine.recovery import Control, Regroup, check_state, recover
from podium.engine.rollback import Rollback
from podium.engine.worker import Worker
from podium.errors import Lost
from podium.records.recorder import Recorder
from podium.records.steps import StepMeter, progress_of
from podium.strategies.base import Strategy
from podium.strategies.traits import Cadence
from podium.strategies.triggers.base import Course
from podium.task import BufferPolicy


def _nothing() -> None:
    pass


def _no_facts() -> dict[str, Any]:
    return {}


def _ignore(_carried: dict[str, Any], _first_is_gone: bool) -> None:
    pass


class Driver(NamedTuple):
    """Callbacks of the loop's driver: `Training`, or a script's `Run`."""

    after_step: Callable[[], None] = _nothing
    """Called when a segment has begun, and after every step: validates if that is due."""
    totals: Callable[[], dict[str, Any]] = _no_facts
    """How much there is to train, for the progress display."""
    carried: Callable[[], dict[str, Any]] = _no_facts
    """What workers that regroup copy from the most advanced of them, besides the worker's state."""
    regrouped: Callable[[dict[str, Any], bool], None] = _ignore
    """Gets the source's `carried`, and whether the worker that was the first is gone."""


class SegmentLoop:
    """One worker's training."""

    def __init__(
        self,
        worker: Worker,
        plan: Strategy[Any],
        course: Course,
        config: RunConfig,
        recorder: Recorder,
        control: Control,
        *,
        buffers: BufferPolicy,
        driver: Driver,
        saves: bool = False,
        late: bool = False,
    ) -> None:
        """`saves`: the worker's state is saved. `late`: this worker joins a run that is under way."""
        self.worker, self.comm, self.recorder, self.control = worker, worker.comm, recorder, control
        self.phases = PhaseRunner(plan, worker, course, recorder, config.codec, worker.sender.packing)
        self.balance = Balancing(balancer_of(config), worker, recorder)
        self.is_late = late
        self.is_under_way = False
        """Whether a segment has begun and not ended."""
        self.retired = False
        """Whether this worker has left the run, and the other workers train without it."""
        self._buffers, self._driver, self._saves = buffers, driver, saves
        self._rollback = Rollback(worker)
        self._source: tuple[Dataset, GlobalOrder] | None = None
        self._feed: Feed | None = None
        self._state: Any = None
        self._in_step = False
        self._undone: tuple[int, int] | None = None  # steps of the undone round, and the position where it began
        self._step_ended_ns = self._finish_ns = 0  # when the last step ended, and how long the last finish took

    @property
    def strategy(self) -> Strategy[Any]:
        """The present phase's strategy."""
        return self.phases.strategy

    @property
    def _cadence(self) -> Cadence:
        return self.strategy.cadence

    # A segment.

    def train_on(self, dataset: Dataset, order: GlobalOrder, batch_size: int) -> None:
        self._source = dataset, order
        self.worker.progress.train_on(order.samples, batch_size)

    def prepare(self) -> None:
        """Call before a segment, and before the worker's state is saved."""
        self.worker.flat.check()
        self.worker.sender.prepare()

    def begin(self, horizon: int) -> None:
        """Begin a segment that ends at this position or before. Collective."""
        worker, cadence = self.worker, self._cadence
        self._feed = self._make_feed()
        worker.progress.run_until(horizon)
        if cadence.by_rounds and cadence.survives_loss:
            self._rollback.before_round()
        began = self.comm.clock.now_ns()
        self._state = self.strategy.init(worker)
        self.phases.has_begun(began)
        self.is_under_way = True
        self._driver.after_step()  # validates again, if the worker that validated was lost meanwhile

    def _make_feed(self) -> Feed:
        assert self._source is not None
        parts = (*self._source, self.worker, self.worker.replica.device, self.balance)
        return make_feed(self._cadence.feed, *parts, weighed=not self._cadence.by_rounds)

    def next_batch(self) -> Batch | None:
        """This worker's next batch, or None where the segment ends here. May be collective."""
        assert self._feed is not None
        votes, batch = self.worker.votes, None
        if not votes.ends_segment:
            votes.request(stop=self.control.stop_requested(), pause=self.control.change_requested())
            batch = self._feed.fetch()
        if batch is None:
            self.balance.settle()
        return batch

    def step(self, batch: Batch) -> Tensor:
        """One step of the strategy on this batch; returns its loss. Collective, as the strategy is."""
        worker, cadence, meter = self.worker, self._cadence, StepMeter(self.worker)
        if self._is_retried and cadence.every == "step":
            self._rollback.before_step()
            self._in_step = True
        if self._buffers == "broadcast" and cadence.every == "step":
            worker.buffers.broadcast()
        loss = self.strategy.step(worker, self._state, batch)
        self._in_step = False
        self.check_state()
        if cadence.by_rounds and self._is_retried and worker.round.steps == 0:
            self._rollback.before_round()
        self._look_at(batch, float(loss), meter.record(self.recorder, batch, float(loss)) / 1e9)
        self._driver.after_step()
        self._step_ended_ns = self.comm.clock.now_ns()
        return loss

    @property
    def _is_retried(self) -> bool:
        """Whether a step or round in which a worker is lost is retried."""
        return self._cadence.survives_loss and self.comm.size > 1

    def _look_at(self, batch: Batch, loss: float, step_s: float) -> None:
        """After a step: update balance and phases, check the loss, report progress."""
        worker, cadence, times = self.worker, self._cadence, self.worker.gradients.times
        worker.sender.record_news(self.recorder, worker.steps_done)
        if cadence.feed == "step":
            assert self._feed is not None
            together = not cadence.by_rounds or worker.round.steps == 0
            pass_s = self._feed.took_s + times.last_ns / 1e9
            self.balance.saw_step(times.last_samples, pass_s, step_s, may_tell=together)
        check_loss(loss, batch, rank=self.comm.rank, step=worker.steps_done)
        self.phases.saw_step(loss, step_s)
        self.control.progress(progress_of(worker, loss, **self._driver.totals()))

    def settle(self) -> None:
        """This worker leaves the segment before its horizon: wait for its outstanding answers."""
        self.strategy.settle(self.worker, self._state)

    def finish(self) -> None:
        """End the segment: afterwards the worker's own state is complete. Collective."""
        self.is_under_way = False
        began = self.comm.clock.now_ns()
        try:
            self.strategy.finish(self.worker, self._state)
        except Lost:
            if self._cadence.by_rounds and self._cadence.survives_loss:
                self._undo_round()
            raise
        self._finish_ns = self.comm.clock.now_ns() - began
        check_parameters(self.worker.flat, rank=self.comm.rank, step=self.worker.steps_done)

    def drop_segment(self) -> None:
        """Forget a segment whose step raised an error that the script has handled; the next `begin` starts afresh.

        A round goes back to its beginning, where all workers were alike.
        """
        self.is_under_way = self._in_step = False
        if self._cadence.by_rounds and self._is_retried:
            self._rollback.undo_round()
        self.worker.progress.close_round()

    def end_phase(self) -> None:
        """Call after the last segment of a phase: the next phase begins with the next segment."""
        began = self.comm.clock.now_ns()
        self.phases.advance(drain_ns=began - self._finish_ns - self._step_ended_ns, home_ns=self._finish_ns)

    def change_members(self) -> None:
        """The workers agreed to pause: regroup with workers that join, and without workers that leave. Collective."""
        self.worker.sender.residuals.share()
        self.regroup("a worker joins or leaves, or is gone")

    def sync_buffers(self) -> None:
        """Make buffers the same on all workers, unless they are `local`, before they are used or saved. Collective."""
        apart = self._cadence.every != "step"  # buffers cannot be broadcast before every step
        if self._buffers == "mean" or (self._buffers == "broadcast" and apart):
            self.worker.buffers.mean()
        elif self._buffers == "broadcast":
            self.worker.buffers.broadcast_frozen()

    def check_state(self) -> None:
        """Raise now, and not after the last step or at the first lost worker, if the state cannot be saved."""
        if self._saves or self._is_retried:
            check_state(self.worker)

    # A lost rank.

    @contextmanager
    def surviving(self) -> Iterator[None]:
        """When a peer is lost inside, the survivors regroup; a segment that was under way has then ended."""
        try:
            yield
        except Lost as error:
            self.recover(error)

    def recover(self, error: Lost) -> None:
        """Continue with the survivors, from the last step or the start of the round; raises where it cannot."""
        if not self._cadence.survives_loss:
            raise error
        if self.is_under_way:
            self.is_under_way = False
            try:
                self._rescue()
            except Lost as another:
                error = another
        self.regroup(str(error))

    def _rescue(self) -> None:
        """Undo the step or round; where servers hold the parameters, fetch them before the survivors regroup."""
        if self._cadence.by_rounds:
            return self._undo_round()
        if not self.strategy.server_spec:  # there may be servers all the same, for another phase
            return
        if self._in_step:
            self._rollback.undo_step()
            self.worker.sender.residuals.settle(happened=False)
            self._in_step = False
        self.strategy.finish(self.worker, self._state)

    def _undo_round(self) -> None:
        """Undo the round under way: its samples are divided among the survivors."""
        before, self._in_step = self.worker.steps_done, False
        self._rollback.undo_round()
        self._undone = (before - self.worker.steps_done, self.worker.position)

    def regroup(self, cause: str) -> None:
        """Ask the coordinator for the new membership, and copy the state of the most advanced worker."""
        began, own_steps = self.comm.clock.now_ns(), self.worker.steps_done
        servers, before = self.comm.servers, self.comm.workers
        carried = {**self._driver.carried(), "phasing": self.phases.state()}
        self.balance.drop()
        undo = self._rollback.undo_step if self._in_step else None
        in_round = self._undone is not None
        plan = recover(self.worker, self.control, undo=undo, in_round=in_round, late=self.is_late, carried=carried)
        self._record_undone()
        self._in_step = False
        self.worker.votes.regrouped()
        self.worker.sender.residuals.take_over(len(before) / max(1, len(set(before).intersection(plan.members))))
        self.retired = self.retired or self.comm.rank not in plan.members
        self.phases.load_state(carried["phasing"])
        if not self.is_late and self._cadence.by_leases:
            self.worker.progress.count_from(own_steps)  # each worker counts its own steps
        self._driver.regrouped(carried, before[0] not in plan.members)
        self._dismiss(sorted(set(servers) - set(self.comm.servers)))
        self.is_late = False
        self._record_regroup(plan, cause, began)

    def _record_regroup(self, plan: Regroup, cause: str, began: int) -> None:
        now = self.comm.clock.now_ns()
        self.recorder.write(
            "regroup",
            now,
            generation=plan.generation,
            members=plan.members,
            source=plan.source,
            servers=self.comm.servers,
            step=self.worker.steps_done,
            position=self.worker.position,
            took_ns=now - began,
            cause=cause,
        )

    def _record_undone(self) -> None:
        """Record the undone round, unless the source had completed it: then this worker has copied its result."""
        if self._undone is None:
            return
        (steps, position), self._undone = self._undone, None
        if self.worker.position == position:
            facts = {"steps": steps, "step": self.worker.steps_done, "position": position}
            self.recorder.write("undone", self.comm.clock.now_ns(), **facts)

    def _dismiss(self, servers: Sequence[int]) -> None:
        """Retire servers that are no longer needed."""
        if not self.retired and self.comm.rank == self.comm.workers[0]:
            for server in servers:
                with suppress(Lost):  # it is gone already
                    self.comm.wait(self.comm.call(server, "retire", {}))
