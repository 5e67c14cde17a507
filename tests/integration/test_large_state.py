"""Models that are large for what a message may hold: real processes and sockets, with smaller limits than the default.

The limit on frames is lowered to some kilobytes in place of 4 GiB, so a small model is as large as 358 million
parameters with Adam are for the default.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer

from podium.comm.base import Communicator
from podium.comm.real.frames import Limits
from podium.config import RunConfig
from podium.data.order import GlobalOrder
from podium.engine.build import Job, build_worker
from podium.engine.feed import make_feed
from podium.engine.training import Training
from podium.errors import ConfigError
from podium.records.recorder import Recorder
from podium.servers.modes import ModeName
from podium.strategies.ad_psgd import ADPSGD
from podium.strategies.async_elastic import AsyncElastic
from podium.strategies.async_local_sgd import AsyncLocalSGD
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.testing.toys import BATCH, CLASSES, FEATURES, Uncontrolled, assert_close, toy, train, train_in, train_rank
from podium.testing.worlds import Real

SMALL = Limits(body_bytes=16 << 10, inbox_bytes=64 << 10)


def wide() -> nn.Module:
    """63 KB of parameters: with Adam twelve messages' worth."""
    return nn.Sequential(nn.Linear(FEATURES, 1600), nn.Tanh(), nn.Linear(1600, CLASSES))


@pytest.mark.parametrize(
    "strategy",
    [
        ParameterServer(),
        ParameterServer(servers=2, replicas=2),
        ParameterServer(mode="ssp", staleness=0, servers=2),
    ],
    ids=["one server", "replicas", "leases"],
)
def test_a_state_that_is_larger_than_a_message_goes_out_and_comes_home(tmp_path: Path, strategy: Strategy[Any]) -> None:
    """Twice: there is a checkpoint's pause in the middle, over which it comes home and goes out again."""
    task = toy(model=wide, optimizer="adam")
    small = train_in(Real(limits=SMALL), task, strategy, 2, run_dir=tmp_path / "small", checkpoint_every=3)
    plain = train(task, strategy, 2)
    for one, other in zip(small, plain, strict=True):
        assert_close(one.state, other.state)
        for name, state in other.optimizer.items():
            for key, value in state.items():
                torch.testing.assert_close(one.optimizer[name][key], value, rtol=1e-5, atol=1e-6)


def test_the_outer_momentum_of_a_large_model_goes_out_and_comes_home(tmp_path: Path) -> None:
    strategy = AsyncLocalSGD(period=2, servers=2, replicas=2)
    trained = train_in(Real(limits=SMALL), toy(model=wide), strategy, 2, run_dir=tmp_path, checkpoint_every=3)
    assert all(torch.equal(trained[0].state[name], value) for name, value in trained[1].state.items())


def refused(comm: Communicator, job: Job) -> str | None:
    if comm.rank in comm.servers:
        return None
    with pytest.raises(ConfigError) as refusal:
        Training(job, comm, Recorder(comm.rank), Uncontrolled()).run()
    return str(refusal.value)


@pytest.mark.slow
def test_a_unit_that_no_message_can_hold_is_refused_before_training() -> None:
    task = toy(model=wide)
    settings = RunConfig(task=task.name, workers=2, eval_every=0)
    job = Job(settings, task, ParameterServer(unit_bytes=32 << 10), None, task_is_named=False)
    first, second, _ = Real(limits=SMALL).run(partial(refused, job=job), 2, 1)
    assert first == second
    assert "must be at most 4096 bytes" in first and "set a smaller unit_bytes" in first


# Many parameter groups.


class Many(nn.Module):
    """So many parameters, each in a group of its own; and some that are not used."""

    def __init__(self, used: int, unused: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList([nn.Parameter(torch.full((CLASSES,), 0.01 * (i % 7))) for i in range(used)])
        self.unused = nn.ParameterList([nn.Parameter(torch.zeros(1)) for _ in range(unused)])

    def forward(self, x: Tensor) -> Tensor:
        return x.sum(1, keepdim=True) * torch.stack(list(self.parts)).mean(0)


def many_groups(model: nn.Module) -> Optimizer:
    assert isinstance(model, Many)
    groups: list[dict[str, Any]] = [{"params": [p], "lr": 0.001 * (1 + i % 9)} for i, p in enumerate(model.parts)]
    return SGD([*groups, {"params": list(model.unused)}] if len(model.unused) else groups, lr=0.01, momentum=0.875)


MODES: list[ModeName] = ["sync", "async", "ssp", "dssp", "softsync", "backup", "gba"]


def train_under_all(comm: Communicator, job: Job, strategies: list[Strategy[Any]]) -> Any:
    """One rank's part of a global step under each strategy, with the same replica and the same servers."""
    if comm.rank in comm.servers:
        return train_rank(comm, job)
    data, order = job.task.data().train, GlobalOrder(BATCH, 0)
    worker = build_worker(job, comm, 1, torch.device("cpu"))
    hashes = []
    worker.progress.train_on(BATCH, BATCH)
    for strategy in strategies:
        worker.progress.move_to(0)
        worker.progress.run_until(BATCH)
        state = strategy.init(worker)
        feed = make_feed(strategy.cadence.feed, data, order, worker, worker.replica.device)
        while (batch := feed.fetch()) is not None:
            strategy.step(worker, state, batch)
        strategy.finish(worker, state)
        hashes.append(worker.replica.hash())
    return hashes


@pytest.mark.slow
@pytest.mark.parametrize(("groups", "servers"), [(2000, 1), (1200, 2)])
def test_hundreds_and_thousands_of_parameter_groups_fit(groups: int, servers: int) -> None:
    """In every mode, and where the outer optimizer is on the servers. The header of a push holds 64 KiB."""
    task = toy(model=partial(Many, groups, 0), optimizer=many_groups, samples=BATCH, epochs=1)
    held: dict[str, Any] = {"servers": servers, "replicas": servers}
    strategies: list[Strategy[Any]] = [ParameterServer(mode=mode, **held) for mode in MODES]
    strategies += [AsyncLocalSGD(**held), AsyncElastic(**held)]
    settings = RunConfig(task=task.name, workers=2, eval_every=0)
    job = Job(settings, task, strategies[0], None, task_is_named=False)
    outcomes = Real().run(partial(train_under_all, job=job, strategies=strategies), 2, servers, deadline_s=60.0)
    assert outcomes[0] == outcomes[1] and len(set(outcomes[0])) == len(strategies)


@pytest.mark.slow
def test_thousands_of_unused_parameters_fit() -> None:
    """Each is named with every push."""
    task = toy(model=partial(Many, 2, 12_000), optimizer=many_groups, samples=BATCH, epochs=1)
    trained = train_in(Real(), task, ParameterServer(mode="async"), 2)
    assert trained[0].report.param_hash == trained[1].report.param_hash


# Numbers of numpy's.


def numpy_settings(model: nn.Module, kind: str) -> Optimizer:
    if kind == "sgd":
        return SGD(model.parameters(), lr=np.float32(0.125), momentum=np.float64(0.5), weight_decay=np.float32(0.25))
    return Adam(
        model.parameters(), lr=np.float32(0.125), betas=(np.float64(0.5), np.float64(0.75)), eps=np.float32(0.5**20)
    )


def plain_settings(model: nn.Module, kind: str) -> Optimizer:
    if kind == "sgd":
        return SGD(model.parameters(), lr=0.125, momentum=0.5, weight_decay=0.25)
    return Adam(model.parameters(), lr=0.125, betas=(0.5, 0.75), eps=0.5**20)


@pytest.mark.parametrize("kind", ["sgd", "adam"])
def test_settings_that_are_numpys_numbers_are_numbers_on_servers_too(kind: str) -> None:
    strategy = ParameterServer(servers=2, mode="ssp", staleness=0)
    theirs = train_in(Real(), toy(optimizer=partial(numpy_settings, kind=kind), clip_norm=np.float32(0.5)), strategy, 2)
    plain = train(toy(optimizer=partial(plain_settings, kind=kind), clip_norm=0.5), strategy, 2)
    for one, other in zip(theirs, plain, strict=True):
        assert_close(one.state, other.state)


@pytest.mark.slow
def test_parameters_that_no_message_can_hold_are_refused_where_workers_average_in_pairs() -> None:
    task = toy(model=wide)
    settings = RunConfig(task=task.name, workers=2, eval_every=0)
    job = Job(settings, task, ADPSGD(), None, task_is_named=False)
    first, second, _ = Real(limits=SMALL).run(partial(refused, job=job), 2, 1)
    assert first == second == "ad-psgd: all parameters go in one message of at most 16384 bytes, got 64012"
