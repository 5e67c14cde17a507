"""AD-PSGD: pairs that average, samples that are leased, and nobody who waits for the slowest."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import podium
from podium.comm.base import Communicator
from podium.engine.batch import Batch
from podium.engine.gradient_pass import PassOptions
from podium.engine.replica import Replica
from podium.engine.worker import Worker
from podium.errors import ConfigError, Lost
from podium.launch.clusters.description import Cluster, Node
from podium.records.recorder import Recorder
from podium.servers.leases.lease import Lease
from podium.servers.server import Server
from podium.strategies.ad_psgd import ADPSGD
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.task import Task
from podium.testing.faults import TASK, Faults
from podium.testing.strategies import ClippingContract, OneWorkerContract
from podium.testing.toys import Branching, Trained, assert_same_bits, everything_model, hashes, toy, train, train_in
from podium.testing.worlds import Memory, Real, Virtual, World
from tests.integration.runs import FIELDS, audit_samples, records_of

SAMPLES = 2 * 44


class TestADPSGD(OneWorkerContract, ClippingContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ADPSGD()


def leases_of(trained: list[Trained]) -> list[tuple[int, int]]:
    """Where every lease that was trained on begins and ends."""
    rows = [row for worker in trained for row in worker.records if row["kind"] == "step"]
    return sorted((row["position"] - row["samples"], row["position"]) for row in rows)


def assert_alike(trained: list[Trained]) -> None:
    assert len(hashes(trained)) == 1
    for other in trained[1:]:
        assert other.optimizer.keys() == trained[0].optimizer.keys()
        for name, state in trained[0].optimizer.items():
            assert_same_bits(other.optimizer[name], state)


@pytest.mark.parametrize("graph", ["complete", "ring"])
@pytest.mark.parametrize("workers", [2, 3, 4, 5])
@pytest.mark.parametrize("world", [Memory(), Virtual(colocated=True)], ids=lambda world: world.name)
def test_every_sample_is_used_once_per_epoch_and_replicas_end_alike(world: World, workers: int, graph: Any) -> None:
    trained = train_in(world, toy(optimizer="adamw"), ADPSGD(graph=graph, ahead=1), workers)
    assert [position for lease in leases_of(trained) for position in range(*lease)] == list(range(SAMPLES))
    assert {worker.position for worker in trained} == {SAMPLES}
    assert_alike(trained)


def test_state_of_parameters_that_only_some_have_used_is_alike_in_the_end() -> None:
    assert_alike(train(toy(model=Branching, optimizer="adamw"), ADPSGD(), 4))


def test_virtual_time_gives_the_same_bits_every_time() -> None:
    world = Virtual(uneven(4, slow=1), colocated=True)
    first, again = (train_in(world, toy(model=everything_model), ADPSGD(), 4) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        assert_same_bits(a.state, b.state)
        assert a.step_times == b.step_times
        assert a.losses == b.losses


def test_real_processes_use_every_sample_once_and_end_alike() -> None:
    trained = train_in(Real(), toy(), ADPSGD(), 3)
    assert [position for lease in leases_of(trained) for position in range(*lease)] == list(range(SAMPLES))
    assert_alike(trained)


# Pairs.


class Course(NamedTuple):
    """What a worker went through."""

    last: float  # its parameters, when all samples were used
    end: float  # and after `finish`
    steps: int
    calls: int  # how many others it may call


def _downhill(outputs: Tensor, _targets: Tensor) -> Tensor:
    return outputs.mean()


def _walk(comm: Communicator, strategy: ADPSGD, lr: float) -> Course | None:
    """Begin at one's own rank and go down an even slope: every step is the same wherever one is."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    worker = Worker(Replica(model, optimizer), comm, PassOptions(loss=_downhill))
    if comm.rank in comm.servers:
        Server(comm, worker.flat, optimizer, recorder=Recorder(comm.rank)).serve()
        return None
    worker.progress.train_on(400, comm.size)
    worker.progress.run_until(400)
    worker.generators.fork(numpy_and_python=False)
    worker.params[0].fill_(float(comm.rank))
    state = strategy.init(worker)
    while isinstance(lease := worker.leases.next, Lease):
        count = lease.slice.count
        batch = Batch(torch.ones(count, 3), None, count, count / lease.step, lease=lease.number)
        strategy.step(worker, state, batch)
    last = worker.params[0][0].item()
    strategy.finish(worker, state)
    return Course(last, worker.params[0][0].item(), worker.steps_done, len(state.calls))


@pytest.mark.parametrize("workers", [2, 3, 4, 5])
def test_averaging_in_pairs_brings_all_to_the_mean(workers: int) -> None:
    found = Virtual(colocated=True).run(partial(_walk, strategy=ADPSGD(), lr=0.0), workers, 1)[:workers]
    mean = (workers - 1) / 2
    for course in found:
        assert abs(course.last - mean) < 0.2, "they began as far apart as 0 and N - 1"
        assert course.end == pytest.approx(mean, abs=1e-5)


@pytest.mark.parametrize("ahead", [1, 4])
@pytest.mark.parametrize("slow", [0, 1])
def test_the_sum_of_all_replicas_changes_by_their_steps_alone(slow: int, ahead: int) -> None:
    """Also where an active worker has gone on before it was answered."""
    world = Virtual(uneven(4, slow), colocated=True)
    found = world.run(partial(_walk, strategy=ADPSGD(ahead=ahead), lr=0.01), 4, 1)[:4]
    moved = 0.01 * sum(course.steps for course in found) / 4
    for course in found:
        assert course.end == pytest.approx(1.5 - moved, abs=1e-4)


def test_calls_go_from_even_places_to_odd_ones_and_on_a_ring_to_those_beside() -> None:
    cases: dict[Literal["complete", "ring"], list[int]] = {"complete": [2, 0, 2, 0, 2], "ring": [1, 0, 2, 0, 1]}
    for graph, expected in cases.items():
        found = Virtual(colocated=True).run(partial(_walk, strategy=ADPSGD(graph=graph), lr=0.0), 5, 1)[:5]
        assert [course.calls for course in found] == expected


def test_one_call_carries_the_parameters_there_and_the_average_back() -> None:
    trained = train_in(Virtual(colocated=True), toy(epochs=4), ADPSGD(ahead=1), 2)
    nbytes = 4 * sum(t.numel() for t in trained[0].state.values())
    steps = [row for row in trained[0].records if row["kind"] == "step"]
    assert {row["sent"] for row in steps} == {row["received"] for row in steps} == {nbytes}


# Speed.


def uneven(nodes: int, slow: int) -> Cluster:
    """Equal nodes but one, which takes 4 times as long."""
    described = [
        Node(name=f"n{i}", speed=0.25 if i == slow else 1.0, up_mbit=1000.0, down_mbit=1000.0) for i in range(nodes)
    ]
    return Cluster(nodes=tuple(described), seconds_per_sample=1e-3)


@pytest.mark.parametrize("slow", [0, 1, 2, 3])
def test_a_slow_worker_does_less_and_holds_up_nobody(slow: int) -> None:
    """4 workers, one 4 times slower: the others do 4 times as many leases, whichever kind the slow one is."""
    task: Task = toy(epochs=16)
    world = Virtual(uneven(4, slow), colocated=True)
    trained, together = train_in(world, task, ADPSGD(), 4), train_in(world, task, AllReduce(), 4)
    steps = [worker.report.steps for worker in trained]
    for rank, count in enumerate(steps):
        if rank != slow:
            assert 3.5 < count / steps[slow] < 4.5, steps
    took, took_together = (max(worker.step_times[-1] for worker in run) for run in (trained, together))
    assert took < 0.4 * took_together  # 4 / 13 of it, were nothing else to be done


@pytest.mark.slow
def test_an_active_worker_waits_for_its_answer_no_longer_than_it_may_run_ahead() -> None:
    """A passive worker answers between its steps; with `ahead` 1 those who drew the slow one wait for it."""
    steps = {
        ahead: [
            w.report.steps
            for w in train_in(Virtual(uneven(4, 1), colocated=True), toy(epochs=16), ADPSGD(ahead=ahead), 4)
        ]
        for ahead in (1, 4)
    }
    assert steps[1][3] > steps[1][0] > steps[1][1]
    assert steps[4][0] > steps[1][0]


# Through launchers.


@pytest.mark.slow
def test_digits_come_within_a_point_of_all_reduce(tmp_path: Path) -> None:
    reached = [
        podium.train("digits-mlp", strategy=strategy, workers=4, launcher="virtual", out=str(tmp_path), epochs=10)
        for strategy in (AllReduce(), ADPSGD())
    ]
    assert reached[0].metrics["accuracy"] > 0.9
    assert reached[1].metrics["accuracy"] >= reached[0].metrics["accuracy"] - 0.01


@pytest.mark.slow
def test_local_processes_with_checkpoints_go_on_after_each(tmp_path: Path) -> None:
    options: dict[str, Any] = {**FIELDS, "strategy": ADPSGD(), "workers": 3, "checkpoint_every": 13}
    result = podium.train(TASK, out=str(tmp_path), **options)
    assert len(set(result.param_hash.values())) == 1
    assert len(records_of(result.run_dir, "checkpoint")) == 4
    audit_samples(result.run_dir)
    part = podium.train(TASK, out=str(tmp_path), **options, steps=13)
    rest = podium.train(TASK, out=str(tmp_path), **options, resume=part.run_dir)
    assert part.samples + rest.samples == result.samples
    assert rest.epochs == result.epochs


@pytest.mark.parametrize("rank", [0, 1])
def test_a_lost_worker_ends_the_run_and_is_named(rank: int, tmp_path: Path) -> None:
    task = {"faults": str(Faults().kill(rank, step=7))}
    with pytest.raises(Lost, match=f"worker {rank} .*was lost"):
        podium.train(TASK, strategy=ADPSGD(), workers=3, task_options=task, out=str(tmp_path), **FIELDS)


def test_options_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="ahead must be at least 1, got 0"):
        ADPSGD(ahead=0)
    with pytest.raises(ConfigError, match=r"ad-psgd: .* codec must be dense, got int8"):
        train(toy(), ADPSGD(), 2, codec="int8")
