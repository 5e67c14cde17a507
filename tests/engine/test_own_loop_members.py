"""A loop of the user's own whose workers are lost or leave: it ends where `podium train` does.

Workers are threads, and what happens to them is a `Fate`. A script and a task with the same model, data and fate take
the same steps, so that their parameters are the same in bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.engine.batch import Batch
from podium.engine.build import Job
from podium.engine.own_loop import Run
from podium.engine.recovery import Control, Regroup
from podium.engine.training import Training, run_server
from podium.engine.worker import Worker
from podium.errors import ConfigError
from podium.launch.join import Options, Parts, make_run
from podium.records.recorder import Record, Recorder
from podium.servers.build import make_server
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.diloco import DiLoCo
from podium.strategies.local_sgd import LocalSGD
from podium.strategies.parameter_server import ParameterServer
from podium.strategies.traits import Cadence
from podium.testing.toys import BATCH, SAMPLES, toy
from podium.testing.worlds import Memory
from tests.strategies.test_codecs import Fate, Meeting

EPOCHS = 3
DEADLINE_S = 5.0
DEATH = Fate((0, 1, 2), [(0, 2)], [(0, 2)], dies=(1, 5))
LEAVE = Fate((0, 1, 2), [(0, 1)], [(0, 1, 2)], asks=((0, 4),))
TOGETHER = {
    "all-reduce": AllReduce(),
    "servers": ParameterServer(),
    "two servers": ParameterServer(servers=2),
    "local-sgd": LocalSGD(period=3),
    "diloco": DiLoCo(sync_every=3),
}


class Death(Exception):
    """A rank is gone, without a word."""


class Seen(NamedTuple):
    """What one worker came to."""

    param_hash: str
    position: int
    steps: int
    records: list[Record]

    def count(self, kind: str) -> int:
        return sum(record["kind"] == kind for record in self.records)


class Outside(Control):
    """Asks for changes before some batches, and says who is left."""

    def __init__(self, rank: int, fate: Fate, meeting: Meeting) -> None:
        self._rank, self._fate, self._meeting, self._batches = rank, fate, meeting, 0
        self._asks = False

    def stop_requested(self) -> bool:
        return False

    def progress(self, facts: dict[str, Any]) -> None:
        pass

    def change_requested(self) -> bool:
        self._batches += 1
        self._asks = self._asks or (self._rank, self._batches) in self._fate.asks
        return self._asks

    def regroup(self, generation: int, steps_done: int) -> Regroup:
        self._asks = False
        return self._meeting.regroup(self._rank, generation, steps_done)


def mortal(work: Callable[..., Any], visits: int) -> Callable[..., Any]:
    """The same, but that the rank dies in the course of the last of these visits."""
    left: Iterator[int] = iter(range(1, visits))

    def dying(*args: Any) -> Any:
        if next(left, None) is None:
            raise Death
        return work(*args)

    return dying


def job_of(strategy: Strategy[Any], fate: Fate) -> Job:
    config = RunConfig(task="toy", workers=len(fate.first), eval_every=0)
    return Job(config, toy(epochs=EPOCHS), strategy, task_is_named=False)


def by_task(comm: Communicator, job: Job, fate: Fate, meeting: Meeting) -> Seen | None:
    """One rank of `podium train`."""
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return None
    training = Training(job, comm, recorder, Outside(comm.rank, fate, meeting))
    if comm.rank == fate.dies[0]:
        gradients = training.worker.gradients
        gradients.use_loss(mortal(gradients.loss, fate.dies[1]))
    report = training.run()
    return Seen(report.param_hash, report.position, report.steps, recorder.kept)


def joined(comm: Communicator, job: Job, control: Control, model: nn.Module, recorder: Recorder, **parts: Any) -> Run:
    """What `podium.join` returns to one rank of a script."""
    with comm.computing():
        made = Parts(model, job.task.optimizer(model), **parts)
    run = make_run(made, Options(), comm, job.strategy, job.config, recorder, control)
    run.worker.generators.fork(numpy_and_python=False)
    return run


def model_of(comm: Communicator, job: Job) -> nn.Module:
    with comm.computing():
        torch.manual_seed(job.config.seed)
        return job.task.model()


def by_script(
    comm: Communicator, job: Job, fate: Fate, meeting: Meeting, *, weigh: Callable[[Any], float] | None = None
) -> Seen | None:
    """One rank of a script that trains the same model on the same data."""
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return None
    model = model_of(comm, job)
    run = joined(comm, job, Outside(comm.rank, fate, meeting), model, recorder, weigh=weigh)
    loss_of = mortal(cross_entropy, fate.dies[1]) if comm.rank == fate.dies[0] else cross_entropy
    data = job.task.data().train
    for x, y in run.batches(data, batch_size=BATCH, epochs=EPOCHS):
        run.step(lambda x=x, y=y: loss_of(model(x), y))
    if comm.rank not in meeting.plans[-1]:
        assert list(run.batches(data, batch_size=BATCH)) == [], "it has left, and is given nothing more"
    return Seen(run.param_hash(), run.worker.position, run.worker.steps_done, recorder.kept)


def lived(main: Callable[..., Seen | None], strategy: Strategy[Any], fate: Fate, **more: Any) -> dict[int, Seen]:
    """What each worker came to that did not die."""
    meeting = Meeting(fate.plans, fate.left)
    main = partial(main, job=job_of(strategy, fate), fate=fate, meeting=meeting, **more)
    outcomes = Memory().attempt(main, len(fate.first), strategy.server_spec.count, deadline_s=DEADLINE_S)
    for outcome in outcomes:
        if isinstance(outcome, BaseException) and not isinstance(outcome, Death):
            raise outcome
    return {rank: seen for rank, seen in enumerate(outcomes) if isinstance(seen, Seen)}


@pytest.mark.parametrize("strategy", TOGETHER.values(), ids=TOGETHER.keys())
def test_a_script_that_loses_a_worker_ends_where_a_task_does(strategy: Strategy[Any]) -> None:
    """With servers, the momentum that they hold comes home before the survivors regroup."""
    script, task = (lived(main, strategy, DEATH) for main in (by_script, by_task))
    assert script.keys() == task.keys() == {0, 2}
    assert {seen.position for seen in script.values()} == {EPOCHS * SAMPLES}
    assert {seen.param_hash for seen in script.values()} == {seen.param_hash for seen in task.values()}
    assert len({seen.param_hash for seen in script.values()}) == 1


@pytest.mark.parametrize("strategy", TOGETHER.values(), ids=TOGETHER.keys())
def test_a_worker_may_leave_a_script_as_it_may_leave_a_task(strategy: Strategy[Any]) -> None:
    """The loop of the worker that leaves ends there; the others go through all samples."""
    script, task = (lived(main, strategy, LEAVE) for main in (by_script, by_task))
    for rank, seen in script.items():
        assert (seen.position, seen.steps) == (task[rank].position, task[rank].steps)
        assert (seen.position == EPOCHS * SAMPLES) == (rank != 2)
        assert seen.count("regroup") == task[rank].count("regroup") == 1
    assert {script[rank].param_hash for rank in (0, 1)} == {task[rank].param_hash for rank in (0, 1)}


def test_asynchronous_workers_regroup_once_a_segment_ends_without_one_of_them() -> None:
    seen = lived(by_script, ParameterServer(mode="async"), DEATH)
    assert {one.position for one in seen.values()} == {EPOCHS * SAMPLES}
    assert len({one.param_hash for one in seen.values()}) == 1


def test_what_a_loss_undoes_in_a_script_is_on_record() -> None:
    steps, rounds = (lived(by_script, strategy, DEATH)[0] for strategy in (AllReduce(), LocalSGD(period=3)))
    assert (steps.count("regroup"), steps.count("undone")) == (1, 0)
    assert (rounds.count("regroup"), rounds.count("undone")) == (1, 1)


def test_a_worker_lost_while_a_step_is_weighed_does_not_end_the_script() -> None:
    """The survivors are not in `run.step` then, but between two steps, where the next batch is fetched."""

    def main(comm: Communicator, **facts: Any) -> Seen | None:
        weigh = mortal(len, 5) if comm.rank == 1 else len
        return by_script(comm, **facts, weigh=weigh)

    seen = lived(main, AllReduce(), DEATH._replace(dies=(1, 1000)))
    assert seen.keys() == {0, 2}
    assert {one.position for one in seen.values()} == {EPOCHS * SAMPLES}


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DiesAtTheEnd(Strategy[None]):
    """All-reduce; one worker is lost when the segment ends."""

    name: ClassVar[str] = "dies-at-the-end"
    cadence: ClassVar[Cadence] = Cadence(survives_loss=True)

    def init(self, worker: Worker) -> None:
        return None

    def step(self, worker: Worker, state: None, batch: Batch) -> Tensor:
        loss = worker.backward(batch, on_ready=worker.issue)
        worker.complete()
        worker.apply(batch)
        return loss

    def finish(self, worker: Worker, state: None) -> None:
        if worker.comm.rank == 1:
            raise Death
        worker.comm.barrier()


def test_a_worker_lost_when_a_segment_ends_does_not_end_the_script() -> None:
    seen = lived(by_script, DiesAtTheEnd(), DEATH._replace(dies=(1, 1000)))
    assert seen.keys() == {0, 2}
    assert {one.position for one in seen.values()} == {EPOCHS * SAMPLES}
    assert len({one.param_hash for one in seen.values()}) == 1


def leaving(comm: Communicator, job: Job, fate: Fate, meeting: Meeting, *, how: str) -> Seen | None:
    """One rank of a script whose first loop is left in an unusual way; the second loop has other data."""
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, recorder))
        return None
    model = model_of(comm, job)
    run = joined(comm, job, Outside(comm.rank, fate, meeting), model, recorder)
    inputs, targets = job.task.data().train.gather(np.arange(SAMPLES))
    first = run.batches((inputs, targets), batch_size=BATCH, epochs=5)
    with contextlib.suppress(ArithmeticError, ConfigError):
        for count, (x, y) in enumerate(first, 1):
            if how == "no step":
                next(first)
            if how == "closure" and count == 4:
                run.step(lambda: 1 / 0)
            run.step(lambda x=x, y=y: cross_entropy(model(x), y))
            if how == "still open" and count == 4:
                break  # `first` is referenced, so Python does not close it
    began, told = run.worker.position, 0
    for x, y in run.batches((inputs + 1000, targets), batch_size=BATCH // 2, epochs=1):
        assert x.min() > 500 and len(x) <= BATCH // 2, "of the second loop's data, in its batches"
        run.step(lambda x=x, y=y: cross_entropy(model(x - 1000), y))
        told += len(x)
    if how == "still open":
        with pytest.raises(ConfigError, match=r"this loop ended when run\.batches was called again"):
            next(first)
    return Seen(run.param_hash(), run.worker.position - began, told, recorder.kept)


@pytest.mark.parametrize("how", ["closure", "no step", "still open"])
@pytest.mark.parametrize("strategy", TOGETHER.values(), ids=TOGETHER.keys())
def test_a_loop_that_was_not_closed_does_not_reach_into_the_next(strategy: Strategy[Any], how: str) -> None:
    seen = lived(leaving, strategy, Fate((0, 1), [], [], dies=(-1, 0)), how=how)
    assert len({one.param_hash for one in seen.values()}) == 1
    assert [one.position for one in seen.values()] == [SAMPLES, SAMPLES]
    assert sum(one.steps for one in seen.values()) == SAMPLES


def test_a_failed_step_with_a_lease_in_hand_cannot_be_followed_by_another_loop() -> None:
    with pytest.raises(ConfigError, match="the last step raised, and under parameter-server the servers wait"):
        lived(leaving, ParameterServer(mode="async"), Fate((0, 1), [], [], dies=(-1, 0)), how="closure")


@pytest.mark.parametrize("name", TOGETHER)
def test_a_worker_lost_between_a_batch_and_its_step_leaves_the_replicas_alike(name: str) -> None:
    """The survivors learn of it in `sync_buffers`. The batch in hand is dropped, and its samples come again."""

    def main(comm: Communicator, job: Job, fate: Fate, meeting: Meeting) -> Seen | None:
        recorder = Recorder(comm.rank)
        if comm.rank in comm.servers:
            run_server(make_server(job, comm, recorder))
            return None
        model = model_of(comm, job)
        model.register_buffer("seen", torch.zeros(()))
        run = joined(comm, job, Outside(comm.rank, fate, meeting), model, recorder)
        used = 0
        for count, (x, y) in enumerate(run.batches(job.task.data().train, batch_size=BATCH, epochs=EPOCHS), 1):
            if count == 5:
                if comm.rank == 1:
                    run._step_failed = True  # a killed process ends no loop in an orderly way
                    raise Death
                run.sync_buffers()
            loss = run.step(lambda x=x, y=y: cross_entropy(model(x), y))
            assert loss.isnan() == (count == 5)
            used += len(x)
        return Seen(run.param_hash(), run.worker.position, used, recorder.kept)

    seen = lived(main, TOGETHER[name], DEATH._replace(dies=(1, 1000)))
    assert seen.keys() == {0, 2}
    assert len({one.param_hash for one in seen.values()}) == 1
    assert {one.position for one in seen.values()} == {EPOCHS * SAMPLES}
