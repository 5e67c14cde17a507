"""Asynchronous local SGD and elastic averaging: leases of many steps, each used once; nobody waits for anybody."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, Optimizer

import podium
from podium.config import RunConfig
from podium.data.order import GlobalOrder
from podium.engine.build import Job
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, Node
from podium.servers.leases.cursor import Cursor
from podium.servers.leases.lease import Lease
from podium.strategies.all_reduce import AllReduce
from podium.strategies.async_elastic import AsyncElastic
from podium.strategies.async_local_sgd import AsyncLocalSGD, Leasing
from podium.strategies.base import Strategy
from podium.task import Task
from podium.tasks.digits import digits_mlp
from podium.testing.faults import EPOCHS, SAMPLES, Faults, Gate
from podium.testing.toys import (
    UNUSUAL,
    Trained,
    assert_close,
    assert_same_bits,
    batch_norm_model,
    halve_every_third,
    hashes,
    toy,
    train,
    train_in,
    train_plainly,
    train_rank,
)
from podium.testing.worlds import Memory, Real, Virtual, World
from tests.integration.runs import at_gate, pid_of, records_of
from tests.integration.runs import train as launch

PLAIN = partial(AsyncLocalSGD, outer_lr=1.0, outer_momentum=0.0)
DIGITS = digits_mlp(epochs=10)
BOTH = [partial(AsyncLocalSGD, outer_momentum=0.5), AsyncElastic]


# One worker: what the papers' boxes say, written out.


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("schedule", [None, halve_every_third])
def test_a_push_after_every_step_is_plain_sgd(servers: int, schedule: Any) -> None:
    task = toy(optimizer="sgd", schedule=schedule)
    (mine,) = train(task, PLAIN(period=1, servers=servers))
    assert_close(mine.state, train_plainly(task).state)


@pytest.mark.parametrize("optimizer", ["momentum", "adamw"])
def test_alone_with_a_plain_outer_step_a_worker_trains_as_ever(optimizer: str) -> None:
    """The inner optimizer stays on the worker, moments and all."""
    task = toy(optimizer=optimizer, clip_norm=0.5)
    plain, (mine,) = train_plainly(task), train(task, PLAIN(period=3))
    assert_close(mine.state, plain.state)
    steps = plain.optimizer.state_dict()["state"]
    for i, name in enumerate(dict(task.model().named_parameters())):
        assert_close(mine.optimizer[name], steps[i], tolerance=1e-5)


@pytest.mark.parametrize("model", UNUSUAL)
def test_so_it_does_for_any_model(model: str) -> None:
    task = toy(model=UNUSUAL[model], optimizer="adamw")
    assert_close(train(task, PLAIN(period=2, servers=2))[0].state, train_plainly(task).state, tolerance=1e-5)


def written_out(task: Task, period: int, meet: Any) -> dict[str, Tensor]:
    """One worker's local steps in plain PyTorch; `meet(x, there)` after every `period`, and at an epoch's end."""
    torch.manual_seed(0)
    data, model = task.data(), task.model()
    optimizer, order = task.optimizer(model), GlobalOrder(len(data.train), 0)
    there = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    position, since = 0, 0
    while position < task.epochs * order.samples:
        piece = order.slice_at(position, task.batch_size)
        inputs, targets = data.train.gather(order.indices(piece), order.keys(piece))
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
        position, since = position + piece.count, since + 1
        if since == period or position % order.samples == 0:
            since = 0
            with torch.no_grad():
                meet(list(model.parameters()), there)
    return {name: p.detach() for (name, _), p in zip(model.named_parameters(), there, strict=True)}


def test_an_outer_step_is_nesterov_along_the_delta() -> None:
    """Four steps an epoch and a period of 3: the second lease of each epoch is short."""
    made: list[Optimizer] = []

    def meet(x: list[Tensor], there: list[nn.Parameter]) -> None:
        outer = made[0] if made else SGD(there, lr=0.7, momentum=0.9, nesterov=True)
        made[:] = [outer]
        for mine, anchor in zip(x, there, strict=True):
            anchor.grad = anchor.detach() - mine
        outer.step()
        for mine, anchor in zip(x, there, strict=True):
            mine.copy_(anchor)

    task = toy(optimizer="momentum")
    assert_close(train(task, AsyncLocalSGD(period=3))[0].state, written_out(task, 3, meet), tolerance=1e-5)


def test_an_elastic_exchange_moves_both_ends_of_the_spring() -> None:
    def meet(x: list[Tensor], there: list[nn.Parameter]) -> None:
        for mine, centre in zip(x, there, strict=True):
            d = 0.3 * (mine - centre)
            mine.sub_(d)
            centre.add_(d)

    task = toy(optimizer="nesterov")
    mine = train(task, AsyncElastic(period=3, elasticity=0.3, servers=2))[0]
    assert_close(mine.state, written_out(task, 3, meet), tolerance=1e-5)


def test_without_elasticity_workers_and_centre_never_meet() -> None:
    task = toy(optimizer="sgd")
    torch.manual_seed(0)
    began = task.model().state_dict()
    (mine,) = train(task, AsyncElastic(period=2, elasticity=0.0))
    assert_same_bits(mine.state, began)
    assert mine.losses == pytest.approx(train_plainly(task).losses), "it trained all the same"


# Several: every sample once, and all alike in the end.


def outcomes(world: World, task: Task, strategy: Strategy[Any], workers: int) -> list[Any]:
    """What every rank came to, servers too."""
    job = Job(RunConfig(task="toy", workers=workers, eval_every=0), task, strategy, task_is_named=False)
    return world.run(partial(train_rank, job=job), workers, strategy.server_spec.count)


def audit(trained: list[Trained], servers: list[Any], samples: int, epochs: int = 2) -> None:
    """Every sample was trained on once per epoch, and every server was moved once by every lease."""
    steps = sorted(
        (row["position"] - row["samples"], row["position"])
        for worker in trained
        for row in worker.records
        if row["kind"] == "step"
    )
    assert steps[0][0] == 0 and steps[-1][1] == epochs * samples
    assert all(end == begin for (_, end), (begin, _) in pairwise(steps)), "each batch begins where the last ends"
    leases = [[row["lease"] for row in rows if row["kind"] == "update" and row["range"] == 0] for rows in servers]
    for mine in leases:
        assert len(mine) == len(set(mine)) and set(mine) == set(leases[0])
        assert {epoch * samples for epoch in range(epochs)} <= set(mine), "no lease crosses an epoch's end"


@pytest.mark.parametrize("make", BOTH, ids=lambda m: getattr(m, "func", m).name)
@pytest.mark.parametrize("world", [Memory(), Virtual(), Real()], ids=lambda w: w.name)
def test_every_sample_is_used_once_and_all_end_alike(make: Any, world: World) -> None:
    found = outcomes(world, toy(samples=47, optimizer="adamw"), make(period=2, servers=2), 3)
    audit(found[:3], found[3:], 47)
    assert len(hashes(found[:3])) == 1
    assert {worker.position for worker in found[:3]} == {2 * 47}
    for other in found[1:3]:
        for name, state in found[0].optimizer.items():
            assert_same_bits(other.optimizer[name], state)


def test_a_worker_that_comes_too_late_for_a_lease_ends_as_the_others_do() -> None:
    """Two leases for four workers: two of them have no moments of their own."""
    trained = train(toy(samples=24, epochs=1, optimizer="adamw"), AsyncLocalSGD(period=4), 4)
    assert sorted(len(worker.losses) for worker in trained) == [0, 0, 4, 4]
    assert len(hashes(trained)) == 1
    for other in trained[1:]:
        for name, state in trained[0].optimizer.items():
            assert_same_bits(other.optimizer[name], state)


def test_a_run_in_virtual_time_has_the_same_bits_twice() -> None:
    first, again = (train_in(Virtual(), toy(), AsyncLocalSGD(period=2, steps="speed"), 3) for _ in range(2))
    assert [w.records for w in first] == [w.records for w in again]


def test_momentum_comes_home_and_goes_out_again(tmp_path: Path) -> None:
    """With a checkpoint after every second step, the outer state travels each time, in the middle of a delay too."""
    task, strategy = toy(epochs=4), AsyncLocalSGD(period=1, servers=2, delay=3)
    broken = train(task, strategy, run_dir=tmp_path, checkpoint_every=2)
    assert_same_bits(broken[0].state, train(task, strategy)[0].state)


def test_a_resumed_run_equals_the_unbroken_one(tmp_path: Path) -> None:
    task, strategy = toy(epochs=4, optimizer="adamw"), AsyncLocalSGD(period=2, delay=3)
    whole = train(task, strategy, run_dir=tmp_path / "whole", checkpoint_every=6)
    train(task, strategy, run_dir=tmp_path / "half", checkpoint_every=6, steps=6)
    rest = train(task, strategy, run_dir=tmp_path / "rest", checkpoint_every=6, resume=str(tmp_path / "half"))
    assert_same_bits(rest[0].state, whole[0].state)


@pytest.mark.parametrize("make", BOTH, ids=lambda m: getattr(m, "func", m).name)
@pytest.mark.parametrize(("codec", "pull"), [("fp16", "fp16"), ("int8", "int8"), ("top-k:ratio=0.3", "dense")])
def test_what_travels_may_be_packed(make: Any, codec: str, pull: str) -> None:
    task, strategy = toy(epochs=12, optimizer="sgd"), make(period=2, servers=2, pull=pull)
    packed = train(task, strategy, 2, codec=codec)
    assert len(hashes(packed)) == 1
    assert packed[0].report.loss is not None and packed[0].report.loss < 0.8 * _untrained(task)


def _untrained(task: Task) -> float:
    torch.manual_seed(0)
    inputs, targets = task.data().test.gather(np.arange(20))
    with torch.no_grad():
        return float(task.loss(task.model()(inputs), targets))


def test_buffers_are_the_workers_mean() -> None:
    trained = train(toy(model=batch_norm_model), AsyncLocalSGD(period=2), 3)
    for other in trained[1:]:
        for name in ("1.running_mean", "1.running_var"):
            assert torch.equal(other.state[name], trained[0].state[name])


def test_any_optimizer_may_run_on_the_workers() -> None:
    """One that looks at whole tensors, too: servers run their own."""
    trained = train(toy(optimizer=_adafactor), AsyncLocalSGD(period=2, servers=3), 2)
    assert len(hashes(trained)) == 1


@pytest.mark.slow
def test_a_recorded_run_happens_again_in_virtual_time(tmp_path: Path) -> None:
    for name in ("async-local-sgd", "async-elastic"):
        fields: dict[str, Any] = {"strategy": f"{name}:period=2,servers=2", "workers": 3, "epochs": 3}
        raced = podium.train("podium.testing.toys:toy", launcher="threads", run_dir=str(tmp_path / name), **fields)
        again = podium.train(
            "podium.testing.toys:toy",
            launcher="virtual",
            run_dir=str(tmp_path / f"{name}-2"),
            replay=raced.run_dir,
            **fields,
        )
        assert again.param_hash == raced.param_hash


# Uneven workers.


def pushes_of(found: list[Any], workers: int) -> list[int]:
    count = Counter(row["worker"] for row in found[workers] if row["kind"] == "update")
    return [count[worker] for worker in range(workers)]


@pytest.mark.slow
def test_leases_as_long_as_their_worker_is_fast_make_all_push_equally_often() -> None:
    nodes = tuple(Node(name=f"n{i}", speed=speed) for i, speed in enumerate((1.0, 1.0, 0.25, 1.0)))
    world = Virtual(Cluster(nodes=nodes, seconds_per_sample=1e-3))
    task = toy(samples=44 * 20)
    equal = pushes_of(outcomes(world, task, AsyncLocalSGD(period=8), 3), 3)
    by_speed = pushes_of(outcomes(world, task, AsyncLocalSGD(period=8, steps="speed"), 3), 3)
    assert min(equal) < 0.35 * max(equal), "a slow worker pushes seldom when its leases are as long"
    assert min(by_speed) > 0.8 * max(by_speed)


@pytest.fixture(scope="module")
def exact() -> float:
    """The accuracy that all-reduce comes to."""
    return train_in(Virtual(), DIGITS, AllReduce(), 4)[0].report.metrics["accuracy"]


@pytest.mark.slow
@pytest.mark.parametrize("strategy", [AsyncLocalSGD(), AsyncElastic()], ids=lambda s: s.name)
def test_digits_come_within_a_point_of_all_reduce(strategy: Leasing, exact: float) -> None:
    assert train_in(Virtual(), DIGITS, strategy, 4)[0].report.metrics["accuracy"] > exact - 0.01


# Leases.


@settings(deadline=None, max_examples=100)
@given(st.integers(1, 30), st.integers(1, 70), st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32))
def test_leases_of_any_length_are_used_once_whoever_dies(
    samples: int, end: int, batch: int, parts: int, seed: int
) -> None:
    source, chance = Cursor(GlobalOrder(samples, 0), 0, end, batch, parts), random.Random(seed)
    held: dict[int, Lease] = {}
    done: list[Lease] = []
    while not source.drained:
        worker = chance.randrange(3)
        if worker not in held:
            lease = source.draw(worker, chance.randrange(1, 6))
            if lease is not None:
                held[worker] = lease
        elif chance.random() < 0.3:
            del held[worker]
            source.lost(worker)
        else:
            done.append(held.pop(worker))
            source.applied(done[-1].number)
    pieces = sorted(lease.slice for lease in done)
    assert [p.position for p in pieces] == [0, *(p.position + p.count for p in pieces[:-1])]
    assert pieces[-1].position + pieces[-1].count == end
    for lease in done:
        assert lease.slice.offset + lease.slice.count <= samples, "none crosses the end of an epoch"
        assert not lease.cuts or sum(count for count, _ in lease.cuts) == lease.slice.count


@settings(deadline=None, max_examples=100)
@given(st.integers(2, 30), st.integers(10, 70), st.integers(1, 9), st.integers(1, 4), st.integers(0, 2**32))
def test_a_cursor_that_is_restored_from_an_old_copy_lends_all_that_is_not_done(
    samples: int, end: int, batch: int, length: int, seed: int
) -> None:
    """Workers say what they have, and what of it is done; leases of one length."""
    chance = random.Random(seed)
    make = partial(Cursor, GlobalOrder(samples, 0), 0, end, batch, 2)
    before = make()
    held: dict[int, Lease] = {}
    done: set[int] = set()
    copy = before.state()
    for _ in range(chance.randrange(20)):
        worker = chance.randrange(3)
        if worker in held:
            through = held.pop(worker)
            before.applied(through.number)
            done |= set(range(through.slice.position, through.slice.position + through.slice.count))
        elif (drawn := before.draw(worker, length)) is not None:
            held[worker] = drawn
        if chance.random() < 0.3:
            copy = json.loads(json.dumps(before.state()))
    after = make()
    after.load(copy)
    for worker in range(3):
        mine = held.get(worker)
        after.heard_of(worker, () if mine is None else (mine.number,), 0 if mine is None else mine.slice.count)
    for lease in held.values():
        after.applied(lease.number)
        done |= set(range(lease.slice.position, lease.slice.position + lease.slice.count))
    kept = {n for lease in held.values() for n in range(lease.slice.position, lease.slice.position + lease.slice.count)}
    while (again := after.draw(0, length)) is not None:
        span = set(range(again.slice.position, again.slice.position + again.slice.count))
        assert not span & kept, "what a worker has said that it did is not lent again"
        done |= span
        after.applied(again.number)
    assert done == set(range(end)) and after.drained


# Phases.


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["virtual", "local"])
def test_the_same_servers_take_deltas_in_one_phase_and_gradients_in_the_next(launcher: str, tmp_path: Path) -> None:
    """Live: no process is started or ended, every sample is used once, and all end alike."""
    run = (
        "all-reduce until epoch:at=1 | async-local-sgd:period=2;servers=2 until epoch:at=2 | "
        "parameter-server:mode=async;servers=2 until epoch:at=3 | async-elastic:period=2;servers=2"
    )
    result = podium.train(
        "podium.testing.toys:toy",
        strategy="phases",
        strategy_options={"run": run},
        workers=3,
        epochs=4,
        launcher=launcher,
        run_dir=str(tmp_path),
    )
    assert result.status == "finished" and len(set(result.param_hash.values())) == 1
    steps = sorted((row["position"] - row["samples"], row["samples"]) for row in records_of(tmp_path, "step"))
    leased = [n for position, count in steps for n in range(position, position + count) if position >= 44]
    assert leased == list(range(44, 4 * 44))


# Real processes.


@pytest.mark.slow
def test_training_goes_on_without_a_killed_worker(tmp_path: Path) -> None:
    result = launch(tmp_path, Faults().kill(1, step=6), strategy="async-local-sgd:period=4,servers=2", workers=3)
    assert result.status == "finished" and result.lost == [1]
    assert sorted(map(int, result.param_hash)) == [0, 2] and len(set(result.param_hash.values())) == 1
    updates = records_of(result.run_dir, "update")
    for server in (3, 4):
        mine = [row["lease"] for row in updates if row["rank"] == server]
        assert len(mine) == len(set(mine)) and set(mine) == {row["lease"] for row in updates}
    (lost,) = {tuple(row["leases"]) for row in records_of(result.run_dir, "worker_lost") if row["leases"]}
    assert set(lost) <= _trained(result.run_dir, without=1), "what it had under way was done by others"
    assert _trained(result.run_dir) == set(range(EPOCHS * SAMPLES))


def _trained(run_dir: str, without: int | None = None) -> set[int]:
    """Positions of all samples that somebody, this rank left out, has trained on."""
    rows = [row for row in records_of(run_dir, "step") if row["rank"] != without]
    return {n for row in rows for n in range(row["position"] - row["samples"], row["position"])}


@pytest.mark.slow
def test_a_killed_server_is_restored(tmp_path: Path) -> None:
    """From its replica: nothing is lost, nothing done twice."""
    strategy = "async-local-sgd:period=3,servers=2,replicas=2"

    def act() -> None:
        os.kill(pid_of(3), signal.SIGKILL)
        Gate(tmp_path).open()

    at_gate(tmp_path, act)
    result = launch(tmp_path, Faults().gate(0, step=8), strategy=strategy, workers=3)
    assert result.status == "finished"
    updates = records_of(result.run_dir, "update")
    for server in (3, 4):  # the killed one may not have lived to write its last update down
        mine = [row["lease"] for row in updates if row["rank"] == server]
        assert len(mine) == len(set(mine)) and (server == 3 or set(mine) == {row["lease"] for row in updates})
    assert records_of(result.run_dir, "restored") and not records_of(result.run_dir, "lost_updates")
    assert _trained(result.run_dir) == set(range(EPOCHS * SAMPLES))


# Options.


@pytest.mark.parametrize(
    "bad",
    [
        {"period": 0},
        {"servers": 0},
        {"replicas": 2},
        {"snapshot_every": -1},
        {"unit_bytes": 0},
        {"outer_lr": 0.0},
        {"outer_momentum": 1.0},
        {"delay": 0},
        {"pull": "dgc"},
    ],
)
def test_impossible_options_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(bad))):
        AsyncLocalSGD(**bad)


def test_so_are_a_spring_that_throws_and_a_codec_that_wants_gradients() -> None:
    with pytest.raises(ConfigError, match="elasticity"):
        AsyncElastic(elasticity=1.5)
    with pytest.raises(ConfigError, match="momentum"):
        train(toy(), AsyncLocalSGD(), 2, codec="dgc")


def _adafactor(model: nn.Module) -> Optimizer:
    return Adafactor(model.parameters())
