"""Training on one rank, in whatever world: the loop that strategies plug into.

    stretch   init, steps until the horizon, finish; then the worker's own state is the whole truth
    horizon   where the next checkpoint is due, or the end of the run
    Lost      under a strategy that survives it: undo the step in flight, hear from the launcher who is left, take the
              state of whoever is furthest, and go on from there
    pause     somebody wants to join or leave: the stretch ends at a step that all agree on, and who is to go on
              together begins the next

Validation happens inside the run, on the first worker.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from podium.balance import balancer_of
from podium.balance.runtime import Balancing
from podium.comm.base import Communicator
from podium.data.base import Dataset, read_pair
from podium.data.order import GlobalOrder
from podium.engine import checkpoint
from podium.engine.buffers import load_buffers
from podium.engine.build import Job, build_worker, device_of, open_data
from podium.engine.checkpoint_parts import agree_on_checkpoint, gather_parts
from podium.engine.feed import Feed, make_feed, to_device
from podium.engine.files import Checksum, make_folder, save_tensors, write_atomically
from podium.engine.fingerprints import Digest, compare, difference_of, digests_of, model_facts
from podium.engine.losses import try_once
from podium.engine.modes import evaluating
from podium.engine.phase_runner import Phasing
from podium.engine.pytree import join_rows, map_tensors
from podium.engine.recovery import Control, recover
from podium.engine.worker import Batch
from podium.errors import CheckpointError, DataError, Lost, as_request
from podium.exchange.residuals import Unit, convert_leftovers
from podium.records.recorder import Recorder
from podium.records.steps import StepMeter, progress_of
from podium.servers.server import Server
from podium.strategies.base import Strategy
from podium.strategies.triggers.base import Course

_DIGESTS = "data.json"
"""Where the first worker keeps the fingerprints of the data, for those who join the run later."""


class Report(NamedTuple):
    """What a worker came to."""

    rank: int
    param_hash: str
    steps: int
    position: int
    stopped: bool
    loss: float | None
    metrics: dict[str, float]


class Training:
    """One worker's run."""

    def __init__(
        self, job: Job, comm: Communicator, recorder: Recorder, control: Control, *, late: bool = False
    ) -> None:
        """`late`: this worker joins a run that is under way."""
        self._late, self._retired = late, False
        self.job, self.comm, self.recorder, self.control = job, comm, recorder, control
        if job.run_dir is not None:
            _make_run_dir(job.run_dir)
        self.device = device_of(job.config.device, comm.rank)
        self.data = open_data(job.task, comm.size, job.batch_size)
        self.order = GlobalOrder(len(self.data.train), job.config.seed)
        self.total_steps = job.total_steps(self.order)
        course = Course(self.order.samples, job.batch_size, eval_every=job.config.eval_every)
        self.end = course.position_of(self.total_steps)
        self.worker = build_worker(job, comm, self.total_steps, self.device)
        self.worker.samples, self.worker.batch_size = self.order.samples, job.batch_size
        packing, course = self.worker.outgoing.packing, course._replace(end=self.end)
        self.phasing = Phasing(job.strategy, self.worker, course, recorder, job.config.codec, packing)
        self.balancing = Balancing(balancer_of(job.config), self.worker, recorder)
        self.digests = self._take_digests()
        self.feed = self._make_feed()
        if comm.index == comm.size - 1 and (comm.size > 1 or self.worker.accumulate > 1):  # one is enough
            try_once(self.worker, self._warn)
        self.evaluated_at = -1  # the position of the last validation
        self.saved_at = -1
        self._began_at = 0
        self._began_ns = self._validated_ns = 0
        self.loss: float | None = None
        self.metrics: dict[str, float] = {}
        self._in_step = False
        self._undone: tuple[int, int] | None = None  # steps of the round that did not happen, and where it began
        self._step_ended = self._finish_ns = 0  # when the last step, with its validation, and how long the last finish

    @property
    def strategy(self) -> Strategy[Any]:
        """How replicas come to agree just now."""
        return self.phasing.strategy

    # The run.

    def run(self) -> Report:
        try:
            self._begin_alike()
        except Lost as error:
            self._recover(error)
        self._check_state()
        self._record_begin()
        self._began_ns = self.comm.clock.now_ns()
        while not self._is_over() and not self._retired:
            try:
                self._stretch()
            except Lost as error:
                self._recover(error)
        return self._end()

    def _is_over(self) -> bool:
        """Nothing left to train, and what comes after a stretch is done too."""
        saved, evaluated = self.saved_at == self.worker.position, self.evaluated_at == self.worker.position
        return self._is_through() and saved and evaluated

    def _is_through(self) -> bool:
        return self.worker.position >= self.end or self.worker.stop_agreed

    def _stretch(self) -> None:
        worker, strategy = self.worker, self.strategy
        worker.flat.check()
        worker.outgoing.prepare()
        if self._checkpoint_was_missed():
            self._settle_buffers()
            self._checkpoint()
        if not self._is_through():
            worker.horizon = min(self._next_horizon(), self.phasing.horizon)
            if strategy.by_rounds and strategy.survives_loss:
                worker.mark()
            began = self.comm.clock.now_ns()
            state = strategy.init(worker)
            self.phasing.has_begun(began)
            try:
                self._train(state)
            except Lost:
                self._rescue(state)
                raise
            self._finish(state)
        if self.phasing.is_over:
            self._switch()
        if worker.pause_agreed:
            worker.outgoing.share_leftovers()
            return self._regroup("somebody joins or leaves, or is gone")  # all begin anew, newcomers too
        if self.phasing.leaving is not None and not self._is_through():
            return None
        self._settle_buffers()
        stopped = worker.stop_agreed and worker.position < self.end
        if stopped:  # at once: whoever asks a run to end may kill it soon after
            self._checkpoint()
        if self._is_through() and (self.evaluated_at != worker.position or self.loss is None):
            self._validate()
        if not stopped:
            self._checkpoint()

    def _train(self, state: Any) -> None:
        self._validate_when_due()  # again, where the one who did it was lost over it
        while not self._is_agreed_to_end() and (batch := self._next_batch()) is not None:
            self._step(state, batch)
            self._validate_when_due()
            self._step_ended = self.comm.clock.now_ns()
        self.balancing.settle()

    def _is_agreed_to_end(self) -> bool:
        """Whether the stretch ends here although there is more to train on."""
        return self.worker.stop_agreed or self.worker.pause_agreed or self.worker.switch_agreed

    # From one phase to the next.

    def _finish(self, state: Any) -> None:
        began = self.comm.clock.now_ns()
        try:
            self.strategy.finish(self.worker, state)
        except Lost:
            if self.strategy.by_rounds and self.strategy.survives_loss:
                self._undo_round()
            raise
        self._finish_ns = self.comm.clock.now_ns() - began

    def _switch(self) -> None:
        """The phase is over: everything is home, and the next one takes it from there."""
        began = self.comm.clock.now_ns()
        before = self.strategy
        self.phasing.advance(drain_ns=began - self._finish_ns - self._step_ended, home_ns=self._finish_ns)
        self.feed = self._make_feed()
        if before.feed == "cursor" and self.comm.size > 1:
            self._agree_on_validation()

    def _agree_on_validation(self) -> None:
        """Asynchronous workers pass the end of an epoch each for itself; what the first has validated counts."""
        at = torch.tensor([self.evaluated_at], dtype=torch.int64)
        self.comm.wait(self.comm.broadcast(at, self.comm.workers[0]))
        self.evaluated_at = int(at.item())

    def _rescue(self, state: Any) -> None:
        """A step did not happen. Where the truth lives on servers, bring it home before the survivors regroup."""
        if not self.strategy.survives_loss:
            return
        if self.strategy.by_rounds:
            return self._undo_round()
        if not self.strategy.server_count:  # there may be servers all the same, for another phase
            return
        if self._in_step:
            self.worker.forget_step()
            self.worker.outgoing.settle_leftovers(happened=False)
            self._in_step = False
        self.strategy.finish(self.worker, state)

    def _undo_round(self) -> None:
        """The round under way did not happen: its samples come again, divided among those who are left."""
        before, self._in_step = self.worker.steps_done, False
        self.worker.return_to_mark()
        self._undone = (before - self.worker.steps_done, self.worker.position)

    def _next_batch(self) -> Batch | None:
        self.worker.stop_requested = self.control.stop_requested()
        self.worker.pause_requested = self.control.change_requested()
        return self.feed.fetch()

    def _step(self, state: Any, batch: Batch) -> None:
        worker, meter = self.worker, StepMeter(self.worker)
        by_rounds, retried = self.strategy.by_rounds, self.strategy.survives_loss and self.comm.size > 1
        if retried and self.strategy.feed == "step" and not by_rounds:
            worker.remember()
            self._in_step = True
        if self.job.buffers == "broadcast" and self.strategy.feed == "step" and not by_rounds:
            worker.broadcast_buffers()
        loss = float(self.strategy.step(worker, state, batch))
        self._in_step = False
        self._check_state()
        if by_rounds and retried and worker.round.steps == 0:
            worker.mark()
        self.phasing.step_s = meter.record(self.recorder, batch, loss) / 1e9
        worker.outgoing.tell_news(self.recorder, worker.steps_done)
        if self.strategy.feed == "step":
            together = not by_rounds or worker.round.steps == 0
            pass_s, step_s = self.feed.took_s + worker.pass_ns / 1e9, self.phasing.step_s
            self.balancing.saw_step(worker.pass_samples, pass_s, step_s, may_tell=together)
        worker.check_loss(loss, batch, worker.steps_done)
        self.phasing.saw_step(loss)
        self.control.progress(progress_of(worker, loss, total_steps=self.total_steps, total_samples=self.end))

    # Validation, buffers, checkpoints.

    def _validate_when_due(self) -> None:
        """At the end of every `eval_every`-th epoch; an asynchronous first worker notices when its leases pass it."""
        every, worker = self.job.config.eval_every, self.worker
        if every == 0 or worker.position >= self.end:
            return
        epoch = worker.position // self.order.samples
        due = epoch // every * every * self.order.samples
        if due == 0 or self.evaluated_at >= due:
            return
        together = self.strategy.feed != "cursor"
        if together:
            self._settle_buffers()
        self._validate()
        if together and self.comm.size > 1 and self.phasing.is_led:
            self.phasing.share()
        elif together and self.comm.size > 1:
            self.comm.barrier()  # here, so that the wait for the first worker does not count as part of a step

    def _validate(self) -> None:
        self.evaluated_at = self.worker.position
        if self.comm.index != 0:
            return
        began = self.comm.clock.now_ns()
        with self._busy("validation"), self.worker.computing():
            outputs, targets = predict(self.worker.model, self.data.test, self.job.task.eval_batch_size, self.device)
            self.worker.step_check.after_validation()
            self.loss = float(self.job.task.loss(outputs, targets))
            self.metrics = {name: float(metric(outputs, targets)) for name, metric in self.job.task.metrics.items()}
        now = self.comm.clock.now_ns()
        facts = {
            "step": self._global_step(),
            "epoch": self.worker.position / self.order.samples,
            "position": self.worker.position,
            "loss": self.loss,
            "metrics": self.metrics,
        }
        waited = self.strategy.feed != "cursor"
        self.recorder.write("eval", now, **facts, eval_ns=now - began, waited=waited)
        self.phasing.saw_validation(self.loss, self.metrics)
        self._validated_ns += now - began if waited else 0
        self.control.progress({"event": "eval", **facts, "seconds": (now - self._began_ns - self._validated_ns) / 1e9})

    def _global_step(self) -> int:
        """How many global steps the samples used so far make up."""
        return self.phasing.course.step_at(self.worker.position)

    def _settle_buffers(self) -> None:
        """Before buffers are used (validated, saved), let them say the same on all workers, if they should."""
        apart = self.strategy.by_rounds or self.strategy.feed != "step"  # they cannot be broadcast before every step
        if self.job.buffers == "mean" or (self.job.buffers == "broadcast" and apart):
            self.worker.mean_buffers()
        elif self.job.buffers == "broadcast":
            self.worker.broadcast_frozen()

    def _next_horizon(self) -> int:
        every = self.job.config.checkpoint_every
        if every == 0:
            return self.end
        return min(self.end, self.phasing.course.position_of((self.worker.global_step // every + 1) * every))

    def _checkpoint_was_missed(self) -> bool:
        """Whether one was due here and a loss came in between."""
        every, here = self.job.config.checkpoint_every, self.worker.position
        due = every > 0 and self._global_step() % every == 0 and here != self._began_at
        return due and self.saved_at != here and not self._is_through()

    def _check_state(self) -> None:
        """Find out now, and not after the last step or at the first loss, that the state cannot be saved."""
        if self.job.run_dir is not None or (self.strategy.survives_loss and self.comm.size > 1):
            self.worker.check_state()

    def _checkpoint(self) -> None:
        """All workers write what is their own; then the first writes what is shared and makes it whole."""
        worker, run_dir, began = self.worker, self.job.run_dir, self.comm.clock.now_ns()
        if run_dir is not None:
            step = self._global_step()
            own = {
                "rng": worker.generators(),
                "other_rng": worker.other_generators(),
                "buffers": {k: v.detach().clone() for k, v in worker.model.named_buffers()},
                "leftovers": worker.outgoing.leftovers(),
            }
            mine = checkpoint.save_own(run_dir, step, self.comm.rank, own)
            parts = gather_parts(self.comm, run_dir, step, mine)
            if self.comm.index == 0:
                with self._busy("checkpoint"):
                    self._save_shared(run_dir, step, began, parts.by_rank)
            if self.comm.size > 1:
                self.comm.barrier()  # nobody leaves, or goes on, before it is whole: the first may be lost over it
            if self.comm.rank in parts.sent:
                checkpoint.drop_own(run_dir, step, self.comm.rank)
        self.saved_at = worker.position

    def _save_shared(self, run_dir: Path, step: int, began: int, parts: Mapping[int, Checksum] | None) -> None:
        worker = self.worker
        if self._is_through():
            save_tensors(run_dir / "model.safetensors", worker.model.state_dict())
        shared = {**worker.state(), **self._must_match(), "phasing": self.phasing.state()}
        shared["data"] = {what: digest.to_plain() for what, digest in self.digests.items()}
        shared["strategy"], shared["unit"] = type(self.strategy).__name__, list(self.strategy.unit(worker))
        keep = self.job.config.keep_checkpoints
        path = checkpoint.save_shared(run_dir, step, shared, self.comm.workers, keep, parts)
        self.saved_at = worker.position  # at once: should others give up waiting, it is not written again
        now = self.comm.clock.now_ns()
        self.recorder.write("checkpoint", now, step=step, position=worker.position, path=path.name, took_ns=now - began)

    @contextmanager
    def _busy(self, what: str) -> Iterator[None]:
        """The others wait for this worker, and know why."""
        self.control.busy(what)
        try:
            yield
        finally:
            self.control.busy(None)

    def _must_match(self) -> dict[str, int | None]:
        """What a checkpoint and the run that goes on from it must have in common."""
        scheduled = self.job.task.schedule is not None
        return {
            "seed": self.job.config.seed,
            "samples": self.order.samples,
            "scheduled_steps": self.total_steps if scheduled else None,  # a schedule is made for a number of steps
        }

    def _resume(self, path: Path) -> None:
        found = checkpoint.find_checkpoint(path, verified=False)  # what is loaded is verified then
        agree_on_checkpoint(self.comm, found)
        shared = found.shared()
        for name, mine in self._must_match().items():
            if shared[name] != mine:
                raise CheckpointError(f"{found.path}: was made with {name}={shared[name]}, this run has {name}={mine}")
        if said := difference_of(self.digests, shared.get("data", {})):  # older checkpoints have none
            raise CheckpointError(f"{found.path}: was made with {said}")
        try:
            self.worker.load_state(shared)
        except (KeyError, RuntimeError, ValueError) as error:
            raise CheckpointError(f"{found.path} does not fit task {self.job.task.name}: {error}") from error
        if "phasing" in shared:  # older checkpoints have none
            if self.comm.index == 0 and (said := self.phasing.starts_over(shared["phasing"])):
                self.control.progress({"event": "warning", "text": f"{found.path}: {said}"})
            self.phasing.load_state(shared["phasing"])
            self.feed = self._make_feed()
        if shared.get("strategy") != type(self.strategy).__name__:
            self.worker.kept.clear()  # another strategy's own
        own = found.own(self.comm.rank)
        if own is not None:
            self.worker.set_generators(own["rng"])
            if "other_rng" in own:  # older checkpoints have none
                self.worker.set_other_generators(own["other_rng"])
            load_buffers(self.worker.model, own["buffers"])
        self._take_leftovers(found)
        if "unit" in shared:
            convert_leftovers(self.worker, Unit(*shared["unit"]), self.strategy.unit(self.worker))
        self.evaluated_at = self.worker.position  # what was due before the checkpoint was done before it

    def _take_leftovers(self, found: checkpoint.Checkpoint) -> None:
        """What this worker had not sent when the checkpoint was made; the first takes that of workers now missing."""
        ranks = [self.comm.rank]
        if self.comm.index == 0:
            ranks += [rank for rank in found.members if rank not in self.comm.workers]
        for rank in ranks:
            own = found.own(rank)
            if own is not None and "leftovers" in own:  # older checkpoints have none
                self.worker.outgoing.add_leftovers(own["leftovers"])

    # A lost rank.

    def _recover(self, error: Lost) -> None:
        if not self.strategy.survives_loss:
            raise error
        self._regroup(str(error))

    def _regroup(self, cause: str) -> None:
        """Hear who goes on together, and become as they are."""
        began = self.comm.clock.now_ns()
        first, own_steps = self.comm.workers[0], self.worker.steps_done
        carried: dict[str, Any] = {
            "evaluated_at": self.evaluated_at,
            "saved_at": self.saved_at,
            "began_at": self._began_at,
            "phasing": self.phasing.state(),
        }
        self.balancing.drop()
        servers, before = self.comm.servers, self.comm.workers
        in_round = self._undone is not None
        how = {"in_step": self._in_step, "in_round": in_round, "late": self._late}
        plan = recover(self.worker, self.control, carried=carried, **how)
        self._record_undone()
        self._in_step, self.worker.pause_agreed = False, False
        self.worker.outgoing.scale_leftovers(len(before) / max(1, len(set(before).intersection(plan.members))))
        if self.comm.rank not in plan.members:
            self._retired = True
        self.evaluated_at, self.saved_at = carried["evaluated_at"], carried["saved_at"]
        self._began_at = carried["began_at"]
        self.phasing.load_state(carried["phasing"])
        self.feed = self._make_feed()
        if not self._late and self.strategy.feed == "cursor":
            self.worker.steps_done = own_steps  # each counts its own
        if first not in plan.members and self.evaluated_at == self.worker.position:
            self.evaluated_at = -1  # no step was done since, so nobody knows whether it was through with validating
        self._dismiss(sorted(set(servers) - set(self.comm.servers)))
        now = self.comm.clock.now_ns()
        facts = {"generation": plan.generation, "members": plan.members, "source": plan.source}
        self.recorder.write(
            "regroup",
            now,
            **facts,
            servers=self.comm.servers,
            step=self.worker.steps_done,
            took_ns=now - began,
            cause=cause,
        )

    def _record_undone(self) -> None:
        """The round did not happen; unless others have its sum, with our part in it, which we have now taken over."""
        if self._undone is None:
            return
        (steps, position), self._undone = self._undone, None
        if self.worker.position == position:
            facts = {"steps": steps, "step": self.worker.steps_done, "position": position}
            self.recorder.write("undone", self.comm.clock.now_ns(), **facts)

    def _dismiss(self, servers: Sequence[int]) -> None:
        """Let servers that are no longer needed go."""
        if not self._retired and self.comm.rank == self.comm.workers[0]:
            for server in servers:
                with suppress(Lost):  # it is gone already
                    self.comm.wait(self.comm.call(server, "retire", {}))

    # Beginning and end.

    def _take_digests(self) -> Mapping[str, Digest]:
        """Fingerprints of the data, where there is somebody or a checkpoint to compare them with."""
        if self.job.digests is not None:
            return self.job.digests
        if self.comm.size == 1 and self.job.run_dir is None:
            return {}
        with self.comm.computing():  # its generators are the process's
            return digests_of(self.data)

    def _compare(self) -> None:
        """Refuse to begin where ranks were told, or made, different things. Collective."""
        worker = self.worker
        facts = {**self.job.facts, **model_facts(worker.model, worker.optimizer)}
        compare(self.comm, facts, self.digests)
        if self.comm.index == 0 and self.job.run_dir is not None and not self.comm.shares_process:
            kept = {what: digest.to_plain() for what, digest in self.digests.items()}
            write_atomically(self.job.run_dir / _DIGESTS, json.dumps(kept).encode())

    def _compare_late(self) -> None:
        """One that joins a run under way compares its data with what the others began with, and may still stay away."""
        path = None if self.job.run_dir is None else self.job.run_dir / _DIGESTS
        began_with = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        if said := difference_of(self.digests, began_with):
            raise DataError(f"rank {self.comm.rank} has {said}")

    def _begin_alike(self) -> None:
        """All from the checkpoint, or all as the first worker is; a late one as those who are at it."""
        if self._late:
            self._compare_late()
            self._regroup("joins late")
            self._late = False
            return
        if self.job.config.resume is not None:
            with as_request():
                self._resume(Path(self.job.config.resume))
            self._compare()  # behind it: should a peer be lost here, the others go on from the checkpoint
        else:
            self._compare()
            self.worker.share_from_first()
        self._began_at = self.worker.position

    def _warn(self, text: str) -> None:
        """Tell the user something that is no error."""
        said = f"task {self.job.task.name}: {text}"
        self.recorder.write("warning", self.comm.clock.now_ns(), text=said)
        self.control.progress({"event": "warning", "text": said})

    def _record_begin(self) -> None:
        worker = self.worker
        self.recorder.write(
            "begin",
            self.comm.clock.now_ns(),
            role="worker",
            parameters=sum(p.numel() for p in worker.flat.parameters),
            buckets=worker.buckets,
            shares_memory=self.comm.shares_memory,
            codec=self.job.config.codec,
            balance=self.balancing.balancer.name,
            collective=worker.outgoing.reducer.collective.name,
            device=str(self.device),
            total_steps=self.total_steps,
            samples=self.order.samples,
            position=worker.position,
            watched=self.phasing.watched,
            compared={what: digest.compared for what, digest in self.digests.items()},
        )

    def _end(self) -> Report:
        worker = self.worker
        stopped = worker.position < self.end
        report = Report(
            self.comm.rank, worker.param_hash(), worker.steps_done, worker.position, stopped, self.loss, self.metrics
        )
        facts = {k: v for k, v in report._asdict().items() if k != "rank"}
        if self._retired:
            facts.pop("param_hash")  # it left before the end: what it holds is not what the run came to
        self.recorder.write(
            "end",
            self.comm.clock.now_ns(),
            **facts,
            sent=self.comm.traffic.sent,
            received=self.comm.traffic.received,
        )
        return report

    def _make_feed(self) -> Feed:
        weighed = not self.strategy.by_rounds
        parts = (self.data.train, self.order, self.worker, self.device, self.balancing)
        return make_feed(self.strategy.feed, *parts, weighed=weighed)


def _make_run_dir(run_dir: Path) -> None:
    """The launcher has made it, unless this host has a disk of its own. Later on nobody makes it anew."""
    try:
        make_folder(run_dir)
    except OSError as error:
        raise CheckpointError(f"{run_dir} cannot be written: {error.strerror or error}") from error


def run_server(server: Server) -> None:
    """A server's run: until all workers have left."""
    comm, recorder = server.comm, server.recorder
    recorder.write(
        "begin",
        comm.clock.now_ns(),
        role="server",
        parameters=sum(p.numel() for p in server.shard.params),
        ranges=len(server.shard.ranges),
    )
    server.serve()
    recorder.write(
        "end", comm.clock.now_ns(), updates=server.updates, sent=comm.traffic.sent, received=comm.traffic.received
    )


@torch.no_grad()
def predict(model: nn.Module, dataset: Dataset, batch_size: int, device: torch.device) -> tuple[Any, Any]:
    """The model's outputs and the targets over a whole data set, on the CPU; leaves the model as it was."""
    outputs, targets = [], []
    with evaluating(model):
        for start in range(0, len(dataset), batch_size):
            x, y = read_pair(dataset, np.arange(start, min(start + batch_size, len(dataset))))
            outputs.append(map_tensors(_settled, model(to_device(x, device))))
            targets.append(y)
    return join_rows(outputs), join_rows(targets)


def _settled(output: Tensor) -> Tensor:
    """On the CPU, and not in half precision: metrics add up many of them."""
    return output.cpu().float() if output.dtype in (torch.float16, torch.bfloat16) else output.cpu()
