"""Virtual time: what a run takes follows from the cluster, to the nanosecond."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import podium
from podium.comm.base import Communicator, nbytes_of
from podium.comm.virtual import HEADER_BYTES, VirtualWorld
from podium.config import RunConfig
from podium.data.order import GlobalOrder, divide
from podium.engine.build import Job
from podium.engine.flat import TAIL, Flat
from podium.errors import DeadlineExceeded
from podium.launch.clusters.description import Cluster, Node, uniform
from podium.records.recorder import read_records
from podium.strategies.all_reduce import AllReduce
from podium.strategies.parameter_server import ParameterServer
from podium.testing.toys import BATCH, SAMPLES, Trained, toy, train_in, train_rank
from podium.testing.worlds import Virtual

UNEQUAL = Cluster(
    nodes=(
        Node(name="fast", up_mbit=100, down_mbit=100, latency_us=20),
        Node(name="slow", speed=0.5, up_mbit=50, down_mbit=200, latency_us=80),
        Node(name="middle", speed=0.8, up_mbit=100, down_mbit=25),
    ),
    seconds_per_sample=3.3e-5,
    seconds_per_step=1.7e-4,
)


def pass_ns(cluster: Cluster, node: int, samples: int) -> tuple[int, int]:
    """Forward and backward over these samples: (all of it, the backward part)."""
    assert cluster.seconds_per_sample is not None
    seconds = (cluster.seconds_per_step + samples * cluster.seconds_per_sample) / cluster.nodes[node].speed
    total = round(seconds * 1e9)
    return total, total * 2 // 3


def ring_ns(cluster: Cluster, nbytes: int, workers: int) -> int:
    return round(cluster.ring_seconds(nbytes, cluster.place(workers)) * 1e9)


def expected_step_times(cluster: Cluster, workers: int, bucket_bytes: int, epochs: int) -> list[int]:
    """The recurrence of overlapped all-reduce: done_k = max(ready_k, done_{k-1}) + cost_k, written out."""
    task = toy()
    model = task.model()
    flat = Flat(model, task.optimizer(model), bucket_bytes, bucket_bytes)
    sizes = [bucket.nbytes for bucket in flat.buckets]
    fractions = [sum(sizes[: k + 1]) / sum(sizes) for k in range(len(sizes))]
    costs = [ring_ns(cluster, size + (4 * TAIL if k == len(sizes) - 1 else 0), workers) for k, size in enumerate(sizes)]
    now = round(cluster.ring_seconds(nbytes_of(flat.params), cluster.place(workers)) * 1e9 / 2)  # the first parameters
    update = round(flat.nbytes / (cluster.nodes[0].memory_gbs * 1e9) * 1e9)
    order, position, times = GlobalOrder(SAMPLES, 0), 0, []
    for step in range(order.steps(BATCH, epochs)):
        piece = order.slice_at(position, BATCH)
        position += piece.count
        passes = [pass_ns(cluster, r, n) for r, n in enumerate(divide(piece.count, [1.0] * workers))]
        done = now
        for fraction, cost in zip(fractions, costs, strict=True):
            ready = max(now + total - back + round(back * fraction) for total, back in passes)
            done = max(ready, done) + cost
        if step == 0:  # who uses which parameter
            done += ring_ns(cluster, 4 * len(flat.pieces), workers)
        now = done + update
        times.append(now)
    return times


@pytest.mark.parametrize("bucket_bytes", [1, 64, 1 << 20])
@pytest.mark.parametrize("cluster", [uniform(3, mbit=100, seconds_per_sample=1e-4), UNEQUAL], ids=["equal", "unequal"])
def test_a_step_takes_what_the_recurrence_says_to_the_nanosecond(cluster: Cluster, bucket_bytes: int) -> None:
    trained = train_in(Virtual(cluster), toy(), AllReduce(bucket_bytes=bucket_bytes), 3)
    expected = expected_step_times(cluster, 3, bucket_bytes, epochs=2)
    assert len(expected) == 8
    for worker in trained:
        assert worker.step_times == expected


def test_without_overlap_a_run_takes_longer_and_gives_the_same_bits() -> None:
    cluster = uniform(2, mbit=10, seconds_per_sample=1e-4)
    together = train_in(Virtual(cluster), toy(), AllReduce(bucket_bytes=1), 2)[0]
    apart = train_in(Virtual(cluster), toy(), AllReduce(bucket_bytes=1, overlap=False), 2)[0]
    assert apart.step_times[-1] > together.step_times[-1]
    assert apart.report.param_hash == together.report.param_hash


def test_a_step_of_a_synchronous_server_takes_what_its_parts_take() -> None:
    """One worker: compute, push, update, reply, each message at the slower end's rate plus the latency."""
    cluster = uniform(2, mbit=80, latency_us=100, seconds_per_sample=1e-4, seconds_per_step=0)
    (mine,) = train_in(Virtual(cluster), toy(samples=BATCH, epochs=4), ParameterServer(), 1)
    nbytes = sum(4 * p.numel() for p in toy().model().parameters())
    message = round((nbytes + HEADER_BYTES) / 10e6 * 1e9) + 100_000
    compute, _ = pass_ns(cluster, 0, BATCH)
    step = compute + message + round(nbytes / 4e9 * 1e9) + message
    times = mine.step_times
    assert [b - a for a, b in pairwise(times)] == [step] * 3


def test_waiting_is_counted_as_waiting() -> None:
    trained = train_in(Virtual(UNEQUAL), toy(), AllReduce(), 3)
    rows = [row for row in trained[0].records if row["kind"] == "step"]
    for worker in trained:
        for row in (r for r in worker.records if r["kind"] == "step"):
            assert 0 <= row["wait_ns"] <= row["step_ns"]
    fast = sum(r["wait_ns"] for r in rows)
    slow = sum(r["wait_ns"] for r in trained[1].records if r["kind"] == "step")
    assert fast > slow, "the fast node waits for the slow one"


@pytest.mark.parametrize("sharing", ["fifo", "fair"])
def test_no_clock_runs_backwards(sharing: Any) -> None:
    cluster = uniform(6, jitter=0.3, sharing=sharing, seconds_per_sample=1e-4)
    for trained in train_in(Virtual(cluster), toy(), ParameterServer(mode="async", servers=2), 4):
        times = [row["t_ns"] for row in trained.records]
        assert times == sorted(times)
        assert times[-1] > 0


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "checkpoint_every"), [(2, 0), (8, 0), (8, 4), (64, 0)])
def test_mean_staleness_of_equal_workers_is_one_less_than_their_number(
    workers: int, checkpoint_every: int, tmp_path: Path
) -> None:
    result = podium.train(
        "digits-mlp",
        strategy="parameter-server:mode=async",
        workers=workers,
        launcher="virtual",
        batch_size=64,
        steps=12,
        eval_every=0,
        checkpoint_every=checkpoint_every,
        out=str(tmp_path),
    )
    segments = 12 // (checkpoint_every or 12)
    assert result.updates == 12 * workers
    assert result.staleness["mean"] == workers - 1
    assert result.staleness["count"] == result.updates - segments * workers


@pytest.mark.slow
def test_256_asynchronous_workers_run(tmp_path: Path) -> None:
    result = podium.train(
        "digits-mlp",
        strategy="parameter-server:mode=async",
        workers=256,
        launcher="virtual",
        batch_size=256,
        steps=3,
        eval_every=0,
        out=str(tmp_path),
    )
    assert result.steps == 3
    assert result.updates == result.samples == 3 * 256
    assert len(set(result.param_hash.values())) == 1
    assert len(result.param_hash) == 256


@pytest.mark.parametrize("strategy", ["all-reduce", "parameter-server:mode=async,servers=2"])
def test_two_runs_leave_the_same_bytes_of_records(strategy: str, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text('[cluster]\njitter = 0.2\nseconds_per_sample = 1e-4\n[[node]]\nname = "n"\ncount = 5\n')
    for run in ("first", "again"):
        podium.train(
            "digits-mlp",
            strategy=strategy,
            workers=3,
            launcher="virtual",
            steps=8,
            cluster=str(cluster),
            run_dir=str(tmp_path / run),
        )
    first, again = ((tmp_path / run / "records.jsonl").read_bytes() for run in ("first", "again"))
    assert first == again
    assert sum(row["kind"] == "step" for row in read_records(tmp_path / "first")) >= 8


def test_jitter_has_mean_one_and_depends_on_seed_rank_and_pass() -> None:
    def durations(rank: int, seed: int, workers: int, passes: int = 4) -> list[int]:
        terrain = uniform(workers, jitter=0.2, seconds_per_sample=1e-3)
        clock = VirtualWorld(terrain, workers, seed=seed).ranks[rank].virtual_clock
        taken = []
        for _ in range(passes):
            before = clock.now_ns()
            clock.begin_pass(10)
            clock.reach(1.0)
            taken.append(clock.now_ns() - before)
        return taken

    assert len(set(durations(0, 0, 2))) == 4
    assert durations(0, 0, 2) != durations(1, 0, 2)
    assert durations(0, 0, 2) != durations(0, 1, 2)
    for rank in (0, 1, 2):
        assert durations(rank, 3, 3) == durations(rank, 3, 40), "a worker more must shift nobody's draws"
    many = durations(0, 0, 1, passes=4000)
    steady = 0.5e-3 + 10 * 1e-3
    assert sum(many) / 4000 / 1e9 == pytest.approx(steady, rel=0.02)


def test_a_deadlock_is_an_error_that_says_what_is_waited_for() -> None:
    first, second = Virtual().attempt(_crossed, workers=2)
    assert isinstance(first, DeadlineExceeded)
    assert "all-reduce 0" in str(first)
    assert second is not None


def test_bytes_sent_are_bytes_received() -> None:
    job_records = _all_records(ParameterServer(mode="async", servers=2), workers=3)
    ends = [row for row in job_records if row["kind"] == "end"]
    assert len(ends) == 5
    assert sum(row["sent"] for row in ends) == sum(row["received"] for row in ends) > 0


def _all_records(strategy: ParameterServer, workers: int) -> list[dict[str, Any]]:
    job = Job(RunConfig(task="toy", workers=workers, eval_every=0), toy(), strategy, task_is_named=False)
    outcomes = Virtual().run(partial(train_rank, job=job), workers, strategy.server_spec.count)
    return [row for o in outcomes for row in (o.records if isinstance(o, Trained) else o)]


def _crossed(comm: Communicator) -> str:
    """One waits for a sum, the other for a message: neither comes."""
    if comm.rank == 0:
        comm.wait(comm.all_reduce(torch.zeros(1)))
        return "summed"
    return comm.recv().kind
