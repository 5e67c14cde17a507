"""`podium train` on one rank, in any world: trains a task segment by segment, validates and saves.

`SegmentLoop` runs the steps. A segment ends where the next checkpoint is due, or at the end of the run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.comm.base import Communicator
from podium.data.order import GlobalOrder
from podium.engine.build import Job, build_worker, open_data
from podium.engine.device import device_of
from podium.engine.fingerprints import Digest, compare, difference_of, digests_of, model_facts
from podium.engine.losses import try_once
from podium.engine.recovery import Control, share_from_first
from podium.engine.report import Report
from podium.engine.saving import RunCheckpoints
from podium.engine.segment import Driver, SegmentLoop
from podium.engine.validation import Validation
from podium.engine.worker import Worker
from podium.errors import CheckpointError, DataError, as_request
from podium.records.disk import make_folder, write_atomically
from podium.records.recorder import Recorder
from podium.servers.server import Server
from podium.strategies.triggers.base import Course

_DIGESTS = "data.json"
"""Where the first worker saves the fingerprints of the data, for workers that join the run later."""


class Training:
    """One worker's run."""

    def __init__(
        self, job: Job, comm: Communicator, recorder: Recorder, control: Control, *, late: bool = False
    ) -> None:
        """`late`: this worker joins a run that is under way."""
        self._job, self._comm, self._recorder = job, comm, recorder
        if job.run_dir is not None:
            _make_run_dir(job.run_dir)
        device = device_of(job.config.device, comm.rank)
        self.data = open_data(job.task, comm.size, job.batch_size)
        self.order = GlobalOrder(len(self.data.train), job.config.seed)
        self.total_steps = job.total_steps(self.order)
        course = Course(self.order.samples, job.batch_size, eval_every=job.config.eval_every)
        self.end = course.position_of(self.total_steps)
        self.worker = build_worker(job, comm, self.total_steps, device)
        self.loop = SegmentLoop(
            self.worker,
            job.strategy,
            course._replace(end=self.end),
            job.config,
            recorder,
            control,
            buffers=job.buffers,
            driver=Driver(self._validate_when_due, self._totals, self._carried, self._regrouped),
            saves=job.run_dir is not None,
            late=late,
        )
        self.loop.train_on(self.data.train, self.order, job.batch_size)
        self._digests = self._take_digests()
        self._validation = Validation(job.task, self.data.test, job.config.eval_every)
        self._checkpoints = RunCheckpoints(job, self.total_steps, self._digests)
        # One worker is enough.
        if comm.index == comm.size - 1 and (comm.size > 1 or self.worker.gradients.options.accumulate > 1):
            try_once(self.worker, self._warn)

    # The run.

    def run(self) -> Report:
        with self.loop.surviving():
            self._begin_alike()
        self.loop.check_state()
        self._record_begin()
        self._validation.begin(self._comm.clock.now_ns())
        while not self._is_over() and not self.loop.retired:
            with self.loop.surviving():
                self._segment()
        return self._end()

    def _is_over(self) -> bool:
        """Whether training is over, and validation and checkpoint after it are done too."""
        here = self.worker.position
        return self._is_trained() and self._checkpoints.saved_at == here and self._validation.at == here

    def _is_trained(self) -> bool:
        return self.worker.position >= self.end or self.worker.votes.agreed.stop

    def _segment(self) -> None:
        worker, loop = self.worker, self.loop
        loop.prepare()
        if self._checkpoints.was_missed(loop) and not self._is_trained():
            loop.sync_buffers()
            self._save()
        if not self._is_trained():
            loop.begin(min(self._checkpoints.next_horizon(loop), loop.phases.horizon))
            while (batch := loop.next_batch()) is not None:
                loop.step(batch)
            loop.finish()
        if loop.phases.is_over:
            self._switch()
        if worker.votes.agreed.pause:
            return loop.change_members()  # then all workers, new ones too, begin the next segment
        if loop.phases.leaving is not None and not self._is_trained():
            return None
        loop.sync_buffers()
        return self._validate_and_save()

    def _validate_and_save(self) -> None:
        worker = self.worker
        stopped = worker.votes.agreed.stop and worker.position < self.end
        if stopped:  # before validating: the user or scheduler that stops a run may kill it soon after
            self._save()
        if self._is_trained() and (self._validation.at != worker.position or self._validation.loss is None):
            self._validation.run(self.loop)
        if not stopped:
            self._save()

    def _save(self) -> None:
        self._checkpoints.save(self.loop, is_last=self._is_trained())

    def _switch(self) -> None:
        """Begin the next phase; the worker holds the whole state."""
        by_leases = self.loop.strategy.cadence.by_leases
        self.loop.end_phase()
        if by_leases and self._comm.size > 1:
            self._validation.share(self.loop)

    # Called by the loop.

    def _validate_when_due(self) -> None:
        self._validation.run_when_due(self.loop)

    def _totals(self) -> dict[str, Any]:
        return {"total_steps": self.total_steps, "total_samples": self.end}

    def _carried(self) -> dict[str, Any]:
        saved = self._checkpoints
        return {"evaluated_at": self._validation.at, "saved_at": saved.saved_at, "began_at": saved.began_at}

    def _regrouped(self, carried: dict[str, Any], first_is_gone: bool) -> None:
        self._validation.regrouped(carried["evaluated_at"], self.worker.position, first_is_gone)
        self._checkpoints.regrouped(carried["saved_at"], carried["began_at"])

    # Beginning and end.

    def _take_digests(self) -> Mapping[str, Digest]:
        """Fingerprints of the data, where there is another worker or a checkpoint to compare them with."""
        if self._job.digests is not None:
            return self._job.digests
        if self._comm.size == 1 and self._job.run_dir is None:
            return {}
        with self._comm.computing():  # its generators are the process's
            return digests_of(self.data)

    def _compare(self) -> None:
        """Refuse to begin where ranks have different settings, models or data. Collective."""
        worker, comm, run_dir = self.worker, self._comm, self._job.run_dir
        compare(comm, {**self._job.facts, **model_facts(worker.model, worker.optimizer)}, self._digests)
        if comm.index == 0 and run_dir is not None and not comm.shares_process:
            kept = {what: digest.to_plain() for what, digest in self._digests.items()}
            write_atomically(run_dir / _DIGESTS, json.dumps(kept), durable=True)

    def _compare_late(self) -> None:
        """A late worker compares its data with the data that the run began with, and raises before it joins."""
        path = None if self._job.run_dir is None else self._job.run_dir / _DIGESTS
        began_with = json.loads(path.read_text()) if path is not None and path.is_file() else {}
        if said := difference_of(self._digests, began_with):
            raise DataError(f"rank {self._comm.rank} has {said}")

    def _begin_alike(self) -> None:
        """Load the checkpoint, or copy the first worker's replica; a late worker regroups with the running ones."""
        if self.loop.is_late:
            self._compare_late()
            self.loop.regroup("joins late")
            return
        if self._job.config.resume is not None:
            with as_request():
                self._checkpoints.resume(self.loop, Path(self._job.config.resume))
            self._validation.done_before(self.worker.position)  # validations due before the checkpoint were done
            self._compare()  # after loading: if a peer is lost here, the survivors continue from the checkpoint
        else:
            self._compare()
            share_from_first(self.worker)
        self._checkpoints.begin(self.worker.position)

    def _warn(self, text: str) -> None:
        """Record and show a warning."""
        said = f"task {self._job.task.name}: {text}"
        self._recorder.write("warning", self._comm.clock.now_ns(), text=said)
        self.loop.control.progress({"event": "warning", "text": said})

    def _record_begin(self) -> None:
        worker = self.worker
        self._recorder.write(
            "begin",
            self._comm.clock.now_ns(),
            role="worker",
            parameters=sum(p.numel() for p in worker.flat.parameters),
            buckets=worker.buckets,
            shares_memory=self._comm.shares_memory,
            codec=self._job.config.codec,
            balance=self.loop.balance.balancer.name,
            collective=worker.sender.collective.name,
            device=str(worker.replica.device),
            total_steps=self.total_steps,
            samples=self.order.samples,
            position=worker.position,
            watched=self.loop.phases.watched,
            compared={what: digest.compared for what, digest in self._digests.items()},
        )

    def _end(self) -> Report:
        report = self._report(self.worker)
        facts = {k: v for k, v in report._asdict().items() if k != "rank"}
        if self.loop.retired:
            facts.pop("param_hash")  # it left before the end: its parameters are not the run's result
        traffic = self._comm.traffic
        self._recorder.write("end", self._comm.clock.now_ns(), **facts, sent=traffic.sent, received=traffic.received)
        return report

    def _report(self, worker: Worker) -> Report:
        stopped, found = worker.position < self.end, self._validation
        parameters = worker.replica.hash()
        return Report(
            self._comm.rank, parameters, worker.steps_done, worker.position, stopped, found.loss, found.metrics
        )


def _make_run_dir(run_dir: Path) -> None:
    """Usually the launcher has made it, unless this host has its own disk. It is not made again later in the run."""
    try:
        make_folder(run_dir)
    except OSError as error:
        raise CheckpointError(f"{run_dir} cannot be written: {error.strerror or error}") from error


def run_server(server: Server) -> None:
    """Serve until all workers have left; records begin and end."""
    comm, recorder = server.comm, server.recorder
    recorder.write(
        "begin",
        comm.clock.now_ns(),
        role="server",
        parameters=sum(p.numel() for p in server.store.shard.params),
        ranges=len(server.store.shard.ranges),
    )
    server.serve()
    recorder.write(
        "end", comm.clock.now_ns(), updates=server.store.updates, sent=comm.traffic.sent, received=comm.traffic.received
    )
