"""The parameter server: synchronous ones keep all-reduce's promises, asynchronous ones use every lease once."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Adam, Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from podium.config import RunConfig
from podium.engine.build import Job
from podium.errors import ConfigError
from podium.strategies.all_reduce import AllReduce
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.task import Task
from podium.testing.strategies import (
    ClippingContract,
    OneWorkerContract,
    SynchronousClippingContract,
    SynchronousContract,
)
from podium.testing.toys import (
    CLASSES,
    FEATURES,
    UNUSUAL,
    assert_close,
    assert_same_bits,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
    train_rank,
    two_groups,
)
from podium.testing.worlds import Memory, Real, Virtual, World


class TestOneServer(SynchronousContract, SynchronousClippingContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ParameterServer()


class TestThreeServers(SynchronousContract):
    """Ranges cut through the middle of parameters."""

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ParameterServer(servers=3)

    @pytest.mark.parametrize("world", [Memory(), Virtual()], ids=lambda w: w.name)
    def test_the_norm_of_the_whole_gradient_is_clipped(self, strategy: Strategy[Any], world: World) -> None:
        task = toy(clip_norm=0.1)
        assert_close(train_in(world, task, strategy, 2)[0].state, train(task, AllReduce(), 2)[0].state)


class TestColocatedServers(SynchronousContract):
    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ParameterServer(servers=2, placement="colocated")


class TestOneAsynchronousWorker(OneWorkerContract, ClippingContract):
    """Alone, a worker is never stale; with `lr_scale` 1 a short lease is an ordinary short step."""

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ParameterServer(mode="async", lr_scale=1.0)


class TestOneAsynchronousWorkerWithTwoServers(OneWorkerContract, ClippingContract):
    """Each push clips its own gradient before it is cut."""

    @pytest.fixture
    def strategy(self) -> Strategy[Any]:
        return ParameterServer(mode="async", servers=2, lr_scale=1.0)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("workers", [2, 3])
def test_synchronous_servers_give_the_bits_of_all_reduce(servers: int, workers: int) -> None:
    task = toy(optimizer=two_groups)
    pushed = train(task, ParameterServer(servers=servers), workers)
    assert_same_bits(pushed[0].state, train(task, AllReduce(), workers)[0].state)


@pytest.mark.parametrize("servers", [1, 2])
def test_a_model_of_several_buckets_is_laid_out_alike_on_both_sides(servers: int) -> None:
    task = toy(model=_wide, epochs=1)
    (mine,) = train(task, ParameterServer(servers=servers), steps=2)
    assert_same_bits(mine.state, train_plainly(task, steps=2).state)


def test_more_servers_than_elements_to_hold_still_train() -> None:
    task = toy(model=_tiny)
    assert_same_bits(train(task, ParameterServer(servers=9), 2)[0].state, train(task, AllReduce(), 2)[0].state)


@pytest.mark.parametrize("kind", [None, "scalar", "channels-last", "two-dtypes"])
def test_optimizer_state_travels_there_and_back_at_every_segment(kind: str | None, tmp_path: Path) -> None:
    """With a checkpoint after every step, all of it goes to the servers and home again each time."""
    task = toy(optimizer="adamw", **({"model": UNUSUAL[kind]} if kind else {}))
    for servers in (1, 2, 5):
        mine = train(task, ParameterServer(servers=servers), run_dir=tmp_path / str(servers), checkpoint_every=1)
        assert_same_bits(mine[0].state, train_plainly(task).state)


def test_a_server_that_holds_nothing_but_a_scalar_takes_its_state_up_again(tmp_path: Path) -> None:
    task = toy(model=_Scalars, optimizer="adamw")
    mine = train(task, ParameterServer(servers=2), run_dir=tmp_path, checkpoint_every=1)
    assert_same_bits(mine[0].state, train_plainly(task).state)


def test_a_schedule_of_any_hyper_parameter_reaches_the_servers() -> None:
    """OneCycleLR moves Adam's betas too."""
    task = toy(optimizer=_adam, schedule=_one_cycle)
    assert_same_bits(train(task, ParameterServer())[0].state, train_plainly(task).state)


def test_an_optimizer_that_looks_at_whole_tensors_is_refused() -> None:
    with pytest.raises(ConfigError, match="Adafactor cannot run on ranges"):
        train(toy(optimizer=_adafactor), ParameterServer())


@pytest.mark.parametrize("bad", [{"servers": 0}, {"lease": 0}, {"lr_scale": 0.0}])
def test_impossible_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        ParameterServer(**bad)


class TestAsynchronous:
    @pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda w: w.name)
    def test_every_lease_is_drawn_and_applied_once(self, world: World) -> None:
        outcomes = _attempt(world, toy(samples=47), ParameterServer(mode="async", servers=2, lease=5), 3)
        each = [4, 4, 4] * 3 + [4, 4, 3]  # of an epoch: steps of twelve samples in three slices, a short one at the end
        starts = [sum((each * 2)[:n]) for n in range(2 * len(each))]
        for server in outcomes[3:]:
            leases = [row["lease"] for row in server if row["kind"] == "update"]
            assert sorted(leases) == starts
            assert [row["version"] for row in server if row["kind"] == "update"] == list(range(1, 25))
        steps = [row for worker in outcomes[:3] for row in worker.records if row["kind"] == "step"]
        assert sum(row["samples"] for row in steps) == 2 * 47
        assert {worker.position for worker in outcomes[:3]} == {2 * 47}

    @pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda w: w.name)
    def test_all_workers_end_with_the_servers_parameters(self, world: World) -> None:
        outcomes = _attempt(world, toy(optimizer="adamw"), ParameterServer(mode="async", servers=2), 3)
        assert len(hashes(outcomes[:3])) == 1

    def test_staleness_is_the_number_of_updates_in_between(self) -> None:
        """Recomputed from the order in which pushes were applied."""
        server = _attempt(Memory(), toy(epochs=4), ParameterServer(mode="async"), 4)[4]
        seen: dict[int, int] = {}
        for row in (r for r in server if r["kind"] == "update"):
            assert row["staleness"] == row["version"] - 1 - seen.get(row["worker"], 0)
            seen[row["worker"]] = row["version"]

    def test_lease_and_learning_rate_follow_the_linear_rule(self) -> None:
        """One worker that leases a third of the batch at a third of the rate: three small steps of plain PyTorch."""
        mine = train(toy(optimizer="sgd", samples=36), ParameterServer(mode="async", lease=4))
        plain = train_plainly(toy(optimizer=_third_of_sgd, samples=36, batch_size=4))
        assert_close(mine[0].state, plain.state)

    def test_a_run_in_virtual_time_has_the_same_bits_twice(self) -> None:
        first, again = (train_in(Virtual(), toy(), ParameterServer(mode="async"), 3) for _ in range(2))
        assert hashes(first) == hashes(again)
        assert [w.records for w in first] == [w.records for w in again]


class _Scalars(nn.Module):
    """Two parameters without dimensions, and no others."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(-0.5))

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :CLASSES] * self.a + x[:, CLASSES:] * self.b


def _wide() -> nn.Module:
    """More than a megabyte in the last layer, so that the first one begins a bucket of its own."""
    return nn.Sequential(nn.Linear(FEATURES, 100_000), nn.Tanh(), nn.Linear(100_000, CLASSES))


def _tiny() -> nn.Module:
    """Six trainable numbers."""
    layer = nn.Linear(FEATURES, CLASSES, bias=False)
    layer.weight.requires_grad_(False)
    return nn.Sequential(layer, nn.LayerNorm(CLASSES))


def _adam(model: nn.Module) -> Optimizer:
    return Adam(model.parameters(), lr=0.01)


def _adafactor(model: nn.Module) -> Optimizer:
    return Adafactor(model.parameters())


def _third_of_sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.2 / 3)


def _one_cycle(optimizer: Optimizer, total_steps: int) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.05, total_steps=total_steps + 1)


def _attempt(world: World, task: Task, strategy: Strategy[Any], workers: int) -> list[Any]:
    """What every rank came to, servers too."""
    job = Job(RunConfig(task="toy", workers=workers, eval_every=0), task, strategy, task_is_named=False)
    return world.run(partial(train_rank, job=job), workers, strategy.server_spec.count)
