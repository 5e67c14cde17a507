"""Work stealing: the mathematics stays, the slow do less, and nobody's samples are lost."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from podium.balance import make_balancer
from podium.balance.steal import Steal
from podium.data.order import Slice
from podium.engine.batch import Batch, Draws, OpenBatch
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, uniform
from podium.records.audit import Audit, audit
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.local_sgd import LocalSGD
from podium.strategies.parameter_server import ParameterServer
from podium.testing.faults import Faults
from podium.testing.toys import Trained, assert_close, batch_norm_model, hashes, toy, train_in, train_plainly
from podium.testing.worlds import Memory, Real, Virtual
from tests.integration import runs

STRATEGIES: dict[str, Strategy[Any]] = {
    "all-reduce": AllReduce(bucket_bytes=64),
    "all-reduce, no overlap": AllReduce(overlap=False),
    "servers": ParameterServer(mode="sync", servers=2),
}


def uneven(*speeds: float, servers: int = 0, **others: Any) -> Cluster:
    """One worker for each speed, and equal nodes for servers."""
    cluster = uniform(len(speeds) + servers, **{"seconds_per_sample": 1e-3, **others})
    nodes = [
        dataclasses.replace(node, speed=speed)
        for node, speed in zip(cluster.nodes, [*speeds, *[1.0] * servers], strict=True)
    ]
    return dataclasses.replace(cluster, nodes=tuple(nodes))


def steps_of(trained: Sequence[Trained]) -> list[list[dict[str, Any]]]:
    """Step records, by worker."""
    return [[row for row in worker.records if row["kind"] == "step"] for worker in trained]


def audit_of(trained: Sequence[Trained]) -> Audit | None:
    return audit([row for worker in trained for row in worker.records])


# Sizes.


@pytest.mark.parametrize("count", [1, 7, 64, 1000])
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize(
    "steal", [Steal(), Steal(micro=3), Steal(micro=40, least=40), Steal(least=2)], ids=["default", "3", "40", "least 2"]
)
def test_micro_batches_make_up_the_step_and_never_grow(count: int, workers: int, steal: Steal) -> None:
    sizes = steal.sizes(count, workers, 10**9)
    assert sum(sizes) == count
    assert min(sizes) >= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] <= (steal.micro or max(1, count // (4 * workers)))
    assert sizes == steal.sizes(count, workers, 10**9)


def test_the_last_micro_batches_are_a_quarter_of_the_first_unless_told_otherwise() -> None:
    assert Steal(micro=8).sizes(128, 2, 10**9)[0] == 8
    assert Steal(micro=8).sizes(128, 2, 10**9)[-2] == 2
    assert Steal(micro=8, least=8).sizes(128, 2, 10**9) == [8] * 16


def test_a_pass_is_never_larger_than_accumulation_makes_it() -> None:
    assert max(Steal(micro=64).sizes(128, 2, most=16)) == 16


@pytest.mark.parametrize("spec", ["steal:micro=0", "steal:least=0", "steal:micro=4;least=5"])
def test_sizes_that_cannot_be_are_refused(spec: str) -> None:
    with pytest.raises(ConfigError, match="balance steal"):
        make_balancer(spec)


# The mathematics.


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
@pytest.mark.parametrize("spec", ["steal", "steal:micro=1", "steal:micro=12;least=12"])
def test_parameters_are_those_of_one_process_and_every_sample_is_used_once(strategy: Strategy[Any], spec: str) -> None:
    """44 samples in steps of 12: the last of an epoch is short. One piece of 12 leaves two workers with nothing."""
    task = toy(clip_norm=0.5)
    cluster = uneven(1.0, 0.3, 0.6, servers=strategy.server_spec.count)
    trained = train_in(Virtual(cluster), task, strategy, 3, balance=spec)
    plain = train_plainly(task)
    assert len(hashes(trained)) == 1
    for worker in trained:
        assert_close(worker.state, plain.state)
    assert audit_of(trained) == Audit(0, 0)
    by_worker = steps_of(trained)
    for rows, loss in zip(zip(*by_worker, strict=True), plain.losses, strict=True):
        assert sum(row["samples"] * row["loss"] for row in rows) / sum(row["samples"] for row in rows) == pytest.approx(
            loss, rel=1e-4
        )
        assert sum(row["samples"] for row in rows) == (8 if rows[0]["position"] % 44 == 0 else 12)
        assert all(sum(count for _, count in row["pieces"]) == row["samples"] for row in rows)
    if spec == "steal:micro=12;least=12":
        assert any(row["samples"] == 0 for rows in by_worker for row in rows)


@pytest.mark.parametrize("strategy", [STRATEGIES["all-reduce"], STRATEGIES["servers"]], ids=["all-reduce", "servers"])
def test_threads_that_race_come_to_the_same_parameters(strategy: Strategy[Any]) -> None:
    task = toy(optimizer="adamw", accumulate=3)
    trained = train_in(Memory(), task, strategy, 3, balance="steal")
    assert len(hashes(trained)) == 1
    assert_close(trained[0].state, train_plainly(task).state, 2e-5)
    assert audit_of(trained) == Audit(0, 0)


def test_buffers_follow_the_samples_that_each_has_drawn() -> None:
    """BatchNorm sees micro-batches, as with accumulation; all replicas end with the same statistics."""
    task = toy(model=batch_norm_model, buffers="mean")
    trained = train_in(Virtual(uneven(1.0, 0.25)), task, AllReduce(), 2, balance="steal:micro=4;least=2")
    assert len(hashes(trained)) == 1
    assert [row["samples"] for row in steps_of(trained)[0]] != [row["samples"] for row in steps_of(trained)[1]]
    for name in ("1.running_mean", "1.running_var"):
        torch.testing.assert_close(trained[1].state[name], trained[0].state[name])


def test_a_batch_knows_what_was_drawn_for_it() -> None:
    class Two(Draws):
        def _draw(self) -> Batch | None:
            drawn = sum(each.count for each in self.slices)
            return None if drawn == 6 else Batch(None, None, 3, 0.25, Slice(drawn + 4, 3, 0, drawn + 4))

    draws = Two()
    batch = OpenBatch.of(Slice(0, 12, 0, 0), draws)
    assert (batch.samples, batch.weight, batch.end) == (0, 0.0, 12)
    later = batch._replace(weight=0.7)
    while draws.next() is not None:
        pass
    assert (batch.samples, batch.weight, later.samples, later.weight) == (6, 0.5, 6, 0.5)
    assert draws.slices == [Slice(4, 6, 0, 4)], "neighbours are one slice"


# Who does how much.


@pytest.mark.parametrize("speeds", [(1.0, 0.25), (1.0, 0.31), (1.0, 0.5, 0.25, 0.25)], ids=str)
@pytest.mark.parametrize("servers", [0, 1])
def test_all_finish_together_whatever_their_speeds(speeds: tuple[float, ...], servers: int) -> None:
    """At least 90 % of what the speeds add up to, each with its part, from the very first step."""
    strategy = ParameterServer(mode="sync", servers=1) if servers else AllReduce()
    cluster, batch = uneven(*speeds, servers=servers, seconds_per_step=1e-4), 64 * len(speeds)
    task = toy(samples=batch * 3, batch_size=batch, epochs=1)
    trained = train_in(Virtual(cluster), task, strategy, len(speeds), balance="steal")
    rows = steps_of(trained)
    for first in zip(*rows, strict=True):
        seconds = max(row["step_ns"] for row in first) / 1e9
        assert batch / seconds >= 0.9 * sum(speeds) / 1e-3
        for row, speed in zip(first, speeds, strict=True):
            assert row["samples"] / batch == pytest.approx(speed / sum(speeds), abs=0.04)


def test_the_time_of_passes_is_told_without_the_time_of_draws() -> None:
    cluster = uneven(1.0, 1.0, latency_us=500.0, seconds_per_step=0.0)
    trained = train_in(Virtual(cluster), toy(), AllReduce(), 2, balance="steal:micro=2;least=2")
    for row in steps_of(trained)[1]:
        assert row["pass_ns"] == row["samples"] * 1_000_000
        assert row["wait_ns"] >= 1_000_000 * (row["samples"] // 2 + 1), "each draw is a round trip"


# Real processes.


@pytest.mark.slow
def test_real_processes_draw_from_one_counter() -> None:
    task = toy()
    trained = train_in(Real(), task, ParameterServer(mode="sync", servers=1), 2, balance="steal:micro=2")
    assert len(hashes(trained)) == 1
    assert_close(trained[0].state, train_plainly(task).state)
    assert audit_of(trained) == Audit(0, 0)


@pytest.mark.slow
def test_a_step_that_lost_a_worker_is_drawn_anew_by_those_who_are_left(tmp_path: Path) -> None:
    alone = runs.train(tmp_path / "alone", workers=1, strategy="solo")
    result = runs.train(tmp_path / "lost", Faults().kill(1, step=6), workers=3, balance="steal:micro=2")
    assert result.status == "finished"
    assert runs.records_of(result.run_dir, "regroup")
    assert runs.distance(result, alone) < 1e-4
    runs.audit_steps(result.run_dir)


# What it does not go with.


def test_a_task_that_weighs_its_targets_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"balance steal: .* weigh"):
        train_in(Memory(), toy(weigh=len), AllReduce(), 2, balance="steal")


def test_workers_that_step_by_themselves_get_equal_parts() -> None:
    trained = train_in(Memory(), toy(), LocalSGD(period=2), 2, balance="steal")
    assert all("pieces" not in row for rows in steps_of(trained) for row in rows)
    assert audit_of(trained) == Audit(0, 0)
