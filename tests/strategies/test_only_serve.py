"""Workers that become servers for a while: they train nothing, take part in everything else, and never time out."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from podium.comm.base import Communicator, Message
from podium.config import RunConfig
from podium.data.order import GlobalOrder
from podium.engine.build import Job, build_worker
from podium.engine.feed import CursorFeed
from podium.engine.training import run_server
from podium.errors import ConfigError, DeadlineExceeded
from podium.launch.base import ScriptPlan
from podium.launch.clusters.description import uniform
from podium.launch.local import endpoints_of
from podium.records.recorder import Recorder
from podium.servers.build import make_server
from podium.servers.leases.lease import PATIENCE
from podium.servers.leases.lending import Lending
from podium.servers.wire.messages import Draw, DrawReply
from podium.strategies.base import Strategy
from podium.strategies.parameter_server import ParameterServer
from podium.task import Task
from podium.testing.faults import EPOCHS, SAMPLES, Faults
from podium.testing.toys import assert_close, assert_same_bits, hashes, toy, train, train_plainly, train_rank
from podium.testing.worlds import Memory, Real, Virtual, World
from tests.integration.runs import records_of
from tests.integration.runs import train as launch

MODES = ["async", "ssp", "dssp", "softsync", "backup", "gba"]


def served(mode: str = "async", *, only_serve: int = 2, servers: int = 2, **options: Any) -> ParameterServer:
    return ParameterServer(mode=mode, servers=servers, placement="colocated", only_serve=only_serve, **options)  # type: ignore[arg-type]  # checked by itself


def outcomes(world: World, task: Task, strategy: Strategy[Any], workers: int, deadline_s: float = 20.0) -> list[Any]:
    job = Job(RunConfig(task="toy", workers=workers, eval_every=0), task, strategy, task_is_named=False)
    return world.run(partial(train_rank, job=job), workers, strategy.server_spec.count, deadline_s)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("world", [Memory(), Virtual(colocated=True)], ids=lambda w: w.name)
def test_workers_that_only_serve_train_nothing_and_the_others_use_all_samples(mode: str, world: World) -> None:
    everybody = outcomes(world, toy(samples=47), served(mode), 5)
    found, servers = everybody[:5], everybody[5:]
    assert [bool(worker.losses) for worker in found] == [True, True, True, False, False]
    steps = [row for worker in found for row in worker.records if row["kind"] == "step"]
    sizes = {row["position"] - row["samples"]: row["samples"] for row in steps}
    for rows in servers:
        applied = [row["lease"] for row in rows if row["kind"] == "update"]
        assert len(applied) == len(set(applied)) and sum(sizes[lease] for lease in applied) == 2 * 47
    assert {worker.position for worker in found} == {2 * 47} and len(hashes(found)) == 1


def test_in_real_processes_too() -> None:
    """Which of the others trains on what depends on who asks first: one of them may be too late for anything."""
    task = toy()
    found = outcomes(Real(), task, served(only_serve=1), 3)[:3]
    steps = [[row for row in worker.records if row["kind"] == "step"] for worker in found]
    assert not found[2].losses and not steps[2]
    assert sum(row["samples"] for rows in steps for row in rows) == found[0].position
    assert {worker.position for worker in found} == {found[0].position} and len(hashes(found)) == 1


def test_those_who_train_count_alone() -> None:
    """One of three trains: with a lease of a third at a rate of one it is as if the others were not there."""
    alone = train(toy(), ParameterServer(mode="async", servers=2, placement="colocated"))
    assert_same_bits(train(toy(), served(), 3)[0].state, alone[0].state)
    assert_close(alone[0].state, train_plainly(toy()).state)


def test_in_step_they_are_not_waited_for() -> None:
    """SSP(0) is all-reduce among those who train."""
    trained = train(toy(), served("ssp", staleness=0, only_serve=1), 4)
    assert_close(trained[0].state, train_plainly(toy()).state)


def test_nobody_times_out_however_long_it_lasts() -> None:
    """Many times as long as any wait is allowed to be."""
    deadline_s = 0.1
    began = time.monotonic()
    found = outcomes(Memory(), toy(loss=_slow_loss, epochs=5), served(only_serve=1), 3, deadline_s)
    assert time.monotonic() - began > 1.5 * PATIENCE * deadline_s, "too short to show anything"
    assert not found[2].losses and len(hashes(found[:3])) == 1


@pytest.mark.slow
def test_without_being_told_to_ask_again_a_worker_that_only_serves_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lending, "pushed", lambda _self: None)
    with pytest.raises(DeadlineExceeded):
        outcomes(Memory(), toy(loss=_slow_loss, epochs=5), served(only_serve=1), 3, 0.1)


def _slow_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    time.sleep(0.05)
    return cross_entropy(outputs, targets)


def test_workers_only_serve_where_others_train() -> None:
    """Where all workers were to serve only, all train."""
    trained = train(toy(), served(only_serve=2), 2)
    assert all(worker.losses for worker in trained)


# Where the servers live.


def test_servers_live_with_the_workers_that_only_serve() -> None:
    config = RunConfig(task="toy", workers=4)
    assert endpoints_of(ScriptPlan(config, served(), None)) == [(0,), (1,), (2, 4), (3, 5)]
    assert endpoints_of(ScriptPlan(config, served(only_serve=1), None)) == [(0,), (1,), (2,), (3, 4, 5)]
    assert endpoints_of(ScriptPlan(config, served(only_serve=0), None)) == [(0, 4), (1, 5), (2,), (3,)]
    assert uniform(4).place(4, 3, colocated=True, hosts=(2, 3)) == (0, 1, 2, 3, 2, 3, 2)


class Begun:
    """What the beginning of a segment cost, for each worker: virtual time, and bytes."""

    def __init__(self, strategy: ParameterServer, workers: int) -> None:
        job = Job(RunConfig(task="toy", workers=workers), toy(model=_large), strategy, task_is_named=False)
        world = Virtual(uniform(workers, mbit=100, seconds_per_sample=1e-4), colocated=strategy.server_spec.colocated)
        found = world.run(partial(_begin, job=job), workers, strategy.server_spec.count)[:workers]
        self.ns, self.sent = max(ns for ns, _ in found), [sent for _, sent in found]


def _begin(comm: Communicator, job: Job) -> tuple[int, int] | None:
    if comm.rank in comm.servers:
        run_server(make_server(job, comm, Recorder(comm.rank)))
        return None
    worker = build_worker(job, comm, 4, torch.device("cpu"))
    worker.progress.train_on(44, 12)
    worker.progress.run_until(44)
    began, sent = comm.clock.now_ns(), comm.traffic.sent
    state = job.strategy.init(worker)
    cost = comm.clock.now_ns() - began, comm.traffic.sent - sent
    assert CursorFeed(job.task.data().train, GlobalOrder(44, 0), worker, torch.device("cpu")).next() is None
    job.strategy.finish(worker, state)
    return cost


def _large() -> nn.Module:
    """A megabyte: 83 ms at 100 Mbit/s."""
    return nn.Sequential(nn.Linear(6, 26_000), nn.Linear(26_000, 3))


def test_colocated_servers_are_seeded_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker brings the server beside it what it holds, so the model crosses no link."""
    monkeypatch.setattr(Lending, "draw", _nothing_to_lend)
    begun = Begun(ParameterServer(mode="async", servers=8, placement="colocated"), 8)
    assert begun.ns < 83e6 / 20
    assert max(begun.sent) < 1.1 * 1_040_000 / 8


def _nothing_to_lend(self: Lending, message: Message, _: Draw) -> None:
    self._outbox.answer(message, DrawReply(position=0))


# Losses, in real processes.


def _trained(run_dir: str, rank: int | None = None) -> set[int]:
    rows = [row for row in records_of(run_dir, "step") if rank in (None, row["rank"])]
    return {n for row in rows for n in range(row["position"] - row["samples"], row["position"])}


STRATEGY = "parameter-server:mode=async,servers=1,placement=colocated,only_serve=1"


@pytest.mark.slow
def test_a_killed_worker_is_replaced_by_those_who_train(tmp_path: Path) -> None:
    result = launch(tmp_path, Faults().kill(1, step=6), strategy=STRATEGY, workers=4)
    assert result.status == "finished" and result.lost == [1]
    assert len(set(result.param_hash.values())) == 1
    assert _trained(result.run_dir) == set(range(EPOCHS * SAMPLES)) and not _trained(result.run_dir, rank=3)


def test_where_nobody_else_is_left_they_go_on_in_their_place(tmp_path: Path) -> None:
    result = launch(tmp_path, Faults().kill(0, step=5).kill(1, step=6), strategy=STRATEGY, workers=3)
    assert result.status == "finished" and result.lost == [0, 1]
    assert _trained(result.run_dir) == set(range(EPOCHS * SAMPLES)) and _trained(result.run_dir, rank=2)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="only_serve"):
        ParameterServer(mode="async", only_serve=1)
    with pytest.raises(ConfigError, match="only_serve"):
        ParameterServer(mode="sync", placement="colocated", only_serve=1)
    with pytest.raises(ConfigError, match="only_serve must be at least 0"):
        served(only_serve=-1)
    with pytest.raises(ConfigError, match="only_serve must be below"):
        served(only_serve=2).check(2)
