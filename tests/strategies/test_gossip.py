"""Gossip: what the graphs promise, D-PSGD and stochastic gradient push."""

from __future__ import annotations

import itertools
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import podium
from podium.comm.base import Communicator
from podium.engine.batch import Batch
from podium.engine.gradient_pass import PassOptions
from podium.engine.replica import Replica
from podium.engine.worker import Worker
from podium.errors import ConfigError, Lost
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.gossip import Gossip
from podium.strategies.graphs import Graph, mixing
from podium.testing.faults import TASK, Faults
from podium.testing.strategies import ClippingContract, OneWorkerContract
from podium.testing.toys import (
    UNUSUAL,
    Branching,
    assert_close,
    assert_same_bits,
    dropout_model,
    everything_model,
    halve_every_third,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
)
from podium.testing.worlds import Memory, Real, Virtual
from tests.integration.runs import FIELDS

BALANCED: tuple[Graph, ...] = ("ring", "exponential", "one-peer", "complete")
GRAPHS: tuple[Graph, ...] = (*BALANCED, "random")
NOTHING = Batch(None, None, 0, 0.0)
"""No samples: the optimizer does nothing, and only mixing is left."""


def matrix(graph: Graph, size: int, turn: int = 0, *, directed: bool = False, seed: int = 0) -> np.ndarray:
    """W: a row for each receiver."""
    weights = np.zeros((size, size))
    for i in range(size):
        part = mixing(graph, i, size, turn, directed=directed, seed=seed)
        weights[i, i] += part.own
        for j in part.receives:
            weights[i, j] += part.weight
    return weights


# Graphs.


@given(st.sampled_from(BALANCED), st.integers(1, 17), st.integers(0, 9), st.booleans())
def test_weights_are_doubly_stochastic(graph: Graph, size: int, turn: int, directed: bool) -> None:
    weights = matrix(graph, size, turn, directed=directed)
    assert (weights >= 0).all()
    np.testing.assert_allclose(weights.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=1e-12)


@given(st.integers(1, 17), st.integers(0, 9), st.integers(0, 99))
def test_a_drawn_graph_loses_nothing_though_some_hear_more_than_others(size: int, turn: int, seed: int) -> None:
    np.testing.assert_allclose(matrix("random", size, turn, seed=seed).sum(axis=0), 1, atol=1e-12)


@given(st.sampled_from(GRAPHS), st.integers(1, 17), st.integers(0, 9), st.booleans())
def test_what_one_sends_the_other_receives(graph: Graph, size: int, turn: int, directed: bool) -> None:
    parts = [mixing(graph, i, size, turn, directed=directed) for i in range(size)]
    sent = {(i, j) for i, part in enumerate(parts) for j in part.sends}
    assert sent == {(i, j) for j, part in enumerate(parts) for i in part.receives}
    assert len(sent) == sum(len(part.sends) for part in parts)
    assert all(i != j for i, j in sent)


@given(st.sampled_from(("ring", "exponential", "complete")), st.integers(2, 17))
def test_undirected_graphs_have_metropolis_weights(graph: Graph, size: int) -> None:
    weights = matrix(graph, size)
    degree = [len(mixing(graph, i, size, 0).receives) for i in range(size)]
    np.testing.assert_array_equal(weights, weights.T)
    for i, j in itertools.permutations(range(size), 2):
        if weights[i, j]:
            assert weights[i, j] == 1 / (1 + max(degree[i], degree[j]))


@pytest.mark.parametrize("size", [2, 4, 8, 16])
def test_one_peer_rounds_over_a_power_of_two_are_exact(size: int) -> None:
    product = np.eye(size)
    for turn in range(size.bit_length() - 1):
        product = matrix("one-peer", size, turn) @ product
    np.testing.assert_allclose(product, np.full((size, size), 1 / size), atol=1e-12)


# Mixing alone.


def _worker(comm: Communicator) -> Worker:
    model = nn.Linear(3, 1)
    replica = Replica(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return Worker(replica, comm, PassOptions(loss=nn.functional.mse_loss))


def _mix_only(comm: Communicator, strategy: Gossip, starts: list[float], steps: int) -> tuple[list[Any], list[Any]]:
    """Parameters and push-sum weights before and after every step without samples."""
    worker = _worker(comm)
    worker.params[0].fill_(starts[comm.rank])
    state = strategy.init(worker)
    values, weights = [worker.params[0][0].item()], [1.0]
    for _ in range(steps):
        strategy.step(worker, state, NOTHING)
        values.append(worker.params[0][0].item())
        weights.append(float(state.weights.own))
    numerators = [room.own.clone() for room in state.rooms]
    assert torch.equal(numerators[0] / weights[-1] if strategy.push_sum else numerators[0], worker.params[0])
    strategy.finish(worker, state)
    return [*values, worker.params[0][0].item()], weights


def mixed(strategy: Gossip, starts: list[float], steps: int) -> tuple[np.ndarray, np.ndarray]:
    found = Memory().run(partial(_mix_only, strategy=strategy, starts=starts, steps=steps), len(starts))
    return np.array([values for values, _ in found]).T, np.array([weights for _, weights in found]).T


@pytest.mark.parametrize("size", [3, 5, 8])
@pytest.mark.parametrize("graph", ["ring", "exponential"])
def test_replicas_come_together_as_fast_as_the_graphs_eigenvalue_says(graph: Graph, size: int) -> None:
    values, vectors = np.linalg.eigh(matrix(graph, size))
    second = np.argsort(abs(values))[-2]
    rate = abs(values[second])
    slowest, _ = mixed(Gossip(graph=graph), vectors[:, second].tolist(), 5)
    distances = np.linalg.norm(slowest[:-1], axis=1)
    np.testing.assert_allclose(distances, distances[0] * rate ** np.arange(6), rtol=1e-4, atol=1e-6)
    noise, _ = mixed(Gossip(graph=graph), np.random.default_rng(size).normal(size=size).tolist(), 5)
    apart = np.linalg.norm(noise[:-1] - noise[0].mean(), axis=1)
    assert (apart[1:] <= rate * apart[:-1] + 1e-6).all()
    np.testing.assert_allclose(noise[-1], noise[0].mean(), atol=1e-6)


@pytest.mark.parametrize("overlap", [True, False])
def test_push_sum_conserves_mass_and_divides_out_its_bias(overlap: bool) -> None:
    starts, steps = [3.0, -1.0, 0.5, 8.0, 2.5], 40
    values, weights = mixed(Gossip(graph="random", push_sum=True, overlap=overlap), starts, steps)
    np.testing.assert_allclose(weights.sum(axis=1), 5, rtol=1e-12)
    assert weights[-1].std() > 0.05, "if all weights stayed at 1 this would show nothing"
    np.testing.assert_allclose((values[:-1] * weights).sum(axis=1), sum(starts), rtol=1e-5)
    assert abs(values[steps] - 2.6).max() < 1e-3 * abs(values[0] - 2.6).max()
    np.testing.assert_allclose(values[-1], 2.6, atol=1e-6)


@pytest.mark.parametrize("graph", BALANCED)
def test_on_graphs_where_all_hear_alike_push_sum_has_nothing_to_divide_out(graph: Graph) -> None:
    values, weights = mixed(Gossip(graph=graph, push_sum=True), [1.0, 2.0, 4.0, 8.0], 6)
    np.testing.assert_allclose(weights, 1, atol=1e-12)
    np.testing.assert_allclose(values.mean(axis=1), 3.75, atol=1e-5)


# Training.


class TestGossip(OneWorkerContract, ClippingContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return Gossip()


@pytest.mark.parametrize("push_sum", [False, True])
@pytest.mark.parametrize("workers", [2, 3, 4])
def test_on_the_complete_graph_plain_sgd_is_all_reduce(workers: int, push_sum: bool) -> None:
    task = toy(optimizer="sgd", schedule=halve_every_third)
    strategy = Gossip(graph="complete", push_sum=push_sum, overlap=False)
    trained, expected = train(task, strategy, workers), train(task, AllReduce(), workers)
    assert len(hashes(trained)) == 1
    assert_close(trained[0].state, expected[0].state)
    assert_close(trained[0].state, train_plainly(task).state)


def test_one_peer_rounds_of_two_workers_are_all_reduce() -> None:
    task = toy(optimizer="sgd")
    assert_close(train(task, Gossip(overlap=False), 2)[0].state, train(task, AllReduce(), 2)[0].state)


@pytest.mark.parametrize("shares", [(5, 1, 1, 3), (1, 0, 1), (7.5, 2.5)])
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_steps_count_by_their_samples(shares: tuple[float, ...], optimizer: str) -> None:
    """With momentum too, where the parts stay the same: momentum that is scaled is that of a scaled gradient."""
    task = toy(optimizer=optimizer, batch_size=11)  # 44 samples: shares of a step are the same in all
    trained = train(task, Gossip(graph="complete", overlap=False), len(shares), shares=shares)
    plain = train_plainly(task)
    assert_close(trained[0].state, plain.state)
    kept = plain.optimizer.state_dict()["state"]
    for i, name in enumerate(plain.state):  # the moments that come home are those of one process
        if optimizer == "momentum":
            assert_close(trained[0].optimizer[name], kept[i])
    assert len(hashes(trained)) == 1
    for other in trained[1:]:
        for name, state in trained[0].optimizer.items():
            assert_same_bits(other.optimizer[name], state)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("model", [Branching, UNUSUAL["two-dtypes"], UNUSUAL["unused"]])
def test_replicas_and_moments_are_alike_in_the_end(model: Any, overlap: bool) -> None:
    trained = train(toy(model=model, optimizer="adamw"), Gossip(overlap=overlap, graph="ring"), 4)
    assert len(hashes(trained)) == 1
    for other in trained[1:]:
        assert other.optimizer.keys() == trained[0].optimizer.keys()
        for name, state in trained[0].optimizer.items():
            assert_same_bits(other.optimizer[name], state)


STRATEGIES = (Gossip(), Gossip(graph="ring", overlap=False), Gossip(graph="random", push_sum=True, agree_every=3))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=repr)
def test_threads_and_virtual_time_give_the_same_bits(strategy: Gossip) -> None:
    task = toy(model=dropout_model, optimizer="adamw", schedule=halve_every_third)
    threads, again, virtual = (train_in(world, task, strategy, 5) for world in (Memory(), Memory(), Virtual()))
    for a, b, c in zip(threads, again, virtual, strict=True):
        assert_same_bits(a.state, b.state)
        assert_same_bits(a.state, c.state)
        assert a.losses == c.losses


@pytest.mark.parametrize("strategy", STRATEGIES[::2], ids=repr)
def test_real_processes_give_the_bits_of_threads(strategy: Gossip) -> None:
    task = toy(model=everything_model, optimizer="adamw", schedule=halve_every_third)
    threads, processes = train(task, strategy, 3), train_in(Real(shared=True), task, strategy, 3)
    for a, b in zip(threads, processes, strict=True):
        assert_same_bits(a.state, b.state)
        assert a.losses == b.losses


def test_every_sample_is_used_once_per_epoch() -> None:
    trained = train(toy(), Gossip(), 3)
    used = [row["samples"] for worker in trained for row in worker.records if row["kind"] == "step"]
    assert sum(used) == trained[0].position == 2 * 44


@pytest.mark.parametrize("push_sum", [False, True])
@pytest.mark.parametrize(("graph", "neighbours"), [("ring", 2), ("one-peer", 1), ("exponential", 3), ("complete", 5)])
def test_a_step_sends_the_parameters_once_to_each_neighbour(graph: Graph, neighbours: int, push_sum: bool) -> None:
    workers = 6
    degree = 4 if graph == "exponential" and not push_sum else neighbours  # 1, 2, 4 and, backwards, 5
    trained = train(toy(), Gossip(graph=graph, push_sum=push_sum, agree_every=100), workers)
    nbytes = 4 * sum(t.numel() for t in trained[0].state.values()) + 8 * push_sum
    for worker in trained:
        steps = [row for row in worker.records if row["kind"] == "step"]
        assert {row["sent"] for row in steps} == {degree * nbytes}
        assert sum(row["received"] for row in steps) == len(steps) * degree * nbytes


def test_what_is_mixed_travels_while_the_gradient_is_computed() -> None:
    times = {}
    for overlap in (True, False):
        trained = train_in(Virtual(), toy(model=partial(nn.Linear, 6, 3)), Gossip(overlap=overlap), 4)
        times[overlap] = trained[0].step_times[-1]
        assert any(row["wait_ns"] for row in trained[0].records if row["kind"] == "step") != overlap
    assert times[True] < times[False]


@pytest.mark.parametrize("agree_every", [1, 2, 5])
def test_all_hear_of_the_mean_loss_and_of_a_stop_at_the_same_step(agree_every: int) -> None:
    outcomes = Memory().run(partial(_stop_in_third_step, strategy=Gossip(agree_every=agree_every)), 3)
    steps, losses = zip(*outcomes, strict=True)
    assert set(steps) == {-(-3 // agree_every) * agree_every + 1}, "the next votes, and a step until they are counted"
    assert len(set(losses)) == 1
    assert losses[0] is not None


def _stop_in_third_step(comm: Communicator, strategy: Gossip) -> tuple[int, float | None]:
    worker = _worker(comm)
    worker.generators.fork(numpy_and_python=False)
    state = strategy.init(worker)
    batch = Batch(torch.ones(2, 3), torch.ones(2, 1) * comm.rank, 2, 1 / 3)
    while not worker.votes.agreed.stop:
        worker.votes.request(stop=comm.rank == 1 and worker.steps_done >= 2)
        strategy.step(worker, state, batch)
        assert worker.steps_done < 30
    steps, loss = worker.steps_done, worker.votes.mean_loss
    strategy.finish(worker, state)
    return steps, loss


def test_a_resumed_run_is_the_unbroken_one(tmp_path: Path) -> None:
    options: dict[str, Any] = {"workers": 3, "launcher": "threads", "checkpoint_every": 3}
    options["strategy"] = Gossip(graph="random", push_sum=True)
    task = "podium.testing.toys:toy"
    whole = podium.train(task, run_dir=str(tmp_path / "whole"), **options)
    podium.train(task, run_dir=str(tmp_path / "part"), steps=6, **options)
    resumed = podium.train(task, run_dir=str(tmp_path / "rest"), resume=str(tmp_path / "part"), **options)
    assert resumed.param_hash == whole.param_hash
    assert resumed.loss == whole.loss


@pytest.mark.slow
def test_digits_come_within_a_point_of_all_reduce(tmp_path: Path) -> None:
    reached = [
        podium.train("digits-mlp", strategy=strategy, workers=4, launcher="virtual", out=str(tmp_path), epochs=10)
        for strategy in (AllReduce(), Gossip(), Gossip(graph="random", push_sum=True))
    ]
    expected, *accuracies = [result.metrics["accuracy"] for result in reached]
    assert expected > 0.9
    assert min(accuracies) >= expected - 0.01


@pytest.mark.slow
def test_a_lost_worker_ends_the_run_and_is_named(tmp_path: Path) -> None:
    task = {"faults": str(Faults().kill(1, step=7))}
    with pytest.raises(Lost, match="worker 1 was lost"):
        podium.train(TASK, strategy=Gossip(), workers=3, task_options=task, out=str(tmp_path), **FIELDS)


# What is refused.


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"graph": "random"}, "graph=random needs push_sum=true"),
        ({"agree_every": 0}, "agree_every must be at least 1, got 0"),
        ({"bucket_bytes": 0}, "bucket_bytes must be at least 1, got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Gossip(**options)


def test_a_codec_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"gossip: .* codec must be dense, got int8"):
        train(toy(), Gossip(), 2, codec="int8")
