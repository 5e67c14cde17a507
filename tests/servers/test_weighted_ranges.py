"""Unequal servers hold unequal parts: in proportion, every element once, and training does not notice."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD

import podium
from podium.balance.ranges import speed_weights, weights_of
from podium.comm.base import Communicator, Ground
from podium.config import RunConfig, RunResult
from podium.engine.build import Job
from podium.engine.flat import Flat, Piece
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, Node
from podium.launch.inprocess import run_virtual
from podium.servers.ranges import divide_ranges, lay_out
from podium.strategies import make_strategy
from podium.strategies.async_local_sgd import AsyncLocalSGD
from podium.strategies.parameter_server import ParameterServer
from podium.testing.faults import Faults, Gate
from podium.testing.toys import assert_close, assert_same_bits, hashes, toy, train
from podium.testing.worlds import Memory
from tests.integration.runs import at_gate, distance, pid_of, records_of
from tests.integration.runs import train as train_in_processes
from tests.servers.test_ranges import WIDTHS, elements, pieces_of_a_model

weights = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=7)


# Layout.


@given(pieces_of_a_model(), weights)
def test_every_element_lies_on_exactly_one_server_whatever_the_weights(
    pieces: list[Piece], weights: list[float]
) -> None:
    held = [e for ranges in divide_ranges(pieces, WIDTHS, len(weights), weights) for e in elements(ranges)]
    wanted = [(p.buffer, i) for p in pieces for i in range(p.start, p.stop)]
    assert sorted(held) == sorted(wanted)


@given(pieces_of_a_model(), weights)
def test_servers_hold_what_their_weight_says_within_an_element(pieces: list[Piece], weights: list[float]) -> None:
    divided = divide_ranges(pieces, WIDTHS, len(weights), weights)
    held = [sum((r.stop - r.start) * WIDTHS[r.buffer] for r in ranges) for ranges in divided]
    for mine, weight in zip(held, weights, strict=True):
        assert mine == pytest.approx(sum(held) * weight / sum(weights), abs=2 * max(WIDTHS))


@given(pieces_of_a_model(), st.integers(1, 9))
def test_equal_weights_are_equal_ranges(pieces: list[Piece], servers: int) -> None:
    equal = divide_ranges(pieces, WIDTHS, servers)
    weighted = divide_ranges(pieces, WIDTHS, servers, [3.0] * servers)
    for one, other in zip(equal, weighted, strict=True):  # but for the rounding of a sum
        assert len(set(elements(one)) ^ set(elements(other))) <= 2


def test_an_embedding_is_cut_between_rows_near_where_the_weights_say() -> None:
    model = nn.Sequential(nn.Embedding(90, 4, sparse=True))
    flat = Flat(model, SGD(model.parameters(), lr=0.1), 1 << 20, rows=True)
    first, second = lay_out(flat, 2, 1 << 20, (2.0, 1.0))
    assert [(r.stop - r.start, r.row) for layout in (first, second) for r in layout.ranges] == [(240, 4), (120, 4)]


# Weights.


def ground_of(*nodes: Node) -> Ground:
    """A rank on each, this one on the first."""
    return Ground(Cluster(nodes=nodes), tuple(range(len(nodes))), 0)


def node(name: str, mbit: float, memory_gbs: float = 4.0) -> Node:
    return Node(name=name, up_mbit=mbit, down_mbit=2 * mbit, memory_gbs=memory_gbs)


@pytest.mark.parametrize("updates", [1, 2])
def test_by_speed_all_servers_are_through_with_their_part_together(updates: int) -> None:
    """N pushes through the slower direction of the link, and as many passes through memory as there are updates."""
    nodes = (node("a", 1000), node("b", 1000), node("s", 800), node("t", 100), node("u", 8000, 0.2))
    found = speed_weights(ground_of(*nodes), 2, 2, updates)
    rates = [(100e6, 4e9), (12.5e6, 4e9), (1000e6, 0.2e9)]
    took = [weight * (2 / link + updates / memory) for weight, (link, memory) in zip(found, rates, strict=True)]
    assert took == pytest.approx([1.0] * 3)
    assert found[0] / found[1] == pytest.approx(8.0, rel=0.1)


class Somebody:
    """All that is asked of a communicator here."""

    def __init__(self, servers: tuple[int, ...], ground: Ground | None = None) -> None:
        self.servers, self.size, self.ground = servers, 2, ground


@pytest.mark.parametrize(
    ("servers", "expected"),
    [((2, 3, 4), (4.0, 2.0, 1.0)), ((2, 3), (4.0, 2.0)), ((2, 4), (4.0, 1.0)), ((2, 3, 4, 6, 9), (4.0, 2.0, 1, 1, 1))],
)
def test_a_server_keeps_its_number_and_newcomers_are_like_the_last(
    servers: tuple[int, ...], expected: tuple[float, ...]
) -> None:
    comm: Any = Somebody(servers)
    assert weights_of("me", "4/2/1", comm, 1) == weights_of("me", "4,2.0,1", comm, 1) == expected


def test_servers_that_are_alike_hold_equal_ranges() -> None:
    comm: Any = Somebody((2, 3), ground_of(*(node(name, 100) for name in "abst")))
    assert weights_of("me", "speed", comm, 1) is None
    assert weights_of("me", "7/7", comm, 1) is None


@pytest.mark.parametrize(
    ("ranges", "message"),
    [
        ("fast", "ranges must be equal, speed or numbers above 0 such as 2/1/1, got 'fast'"),
        ("2/0", "numbers above 0"),
        ("2/-1", "numbers above 0"),
        ("2//1", "numbers above 0"),
        ("2/1/1", r"ranges must have one number per server \(2\), got '2/1/1'"),
    ],
)
def test_ranges_that_say_nothing_are_refused(ranges: str, message: str) -> None:
    for strategy in (ParameterServer, AsyncLocalSGD):
        with pytest.raises(ConfigError, match=f"^{strategy.name}: .*{message}"):
            strategy(servers=2, ranges=ranges)


def test_speed_needs_a_cluster_to_know_it_from() -> None:
    with pytest.raises(ConfigError, match=r"ranges=speed needs a cluster file.*give numbers"):
        train(toy(), ParameterServer(servers=2, ranges="speed"), 2)


# Training.

STRATEGIES: dict[str, dict[str, Any]] = {
    "sync": {},
    "overlap off": {"overlap": False, "unit_bytes": 64},
    "small units": {"unit_bytes": 50, "bucket_bytes": 200},
    "copies": {"replicas": 2},
    "colocated": {"placement": "colocated"},
    "in step": {"mode": "ssp", "staleness": 0},
}


@pytest.mark.parametrize("options", STRATEGIES.values(), ids=STRATEGIES.keys())
def test_weighted_ranges_train_as_equal_ones_do(options: dict[str, Any]) -> None:
    task = toy(optimizer="adamw")
    equal = train(task, ParameterServer(servers=3, **options), 3)
    weighted = train(task, ParameterServer(servers=3, ranges="6/1/2", **options), 3)
    assert hashes(weighted) == hashes(equal) and len(hashes(equal)) == 1
    assert_same_bits(weighted[0].state, equal[0].state)


def test_weighted_ranges_are_clipped_by_the_norm_of_the_whole() -> None:
    task = toy(clip_norm=0.05)
    weighted = train(task, ParameterServer(servers=3, ranges="5/1/1"), 2)
    assert_close(weighted[0].state, train(task, ParameterServer(), 2)[0].state)


def test_local_steps_meet_servers_with_weighted_ranges() -> None:
    equal, weighted = (train(toy(), AsyncLocalSGD(period=2, servers=2, ranges=r), 1)[0] for r in ("equal", "5/1"))
    assert_same_bits(weighted.state, equal.state)


def bytes_held(comm: Communicator, job: Job) -> int:
    from podium.engine.training import Training, run_server
    from podium.records.recorder import Recorder
    from podium.servers.build import make_server
    from podium.testing.toys import Uncontrolled

    if comm.rank in comm.servers:
        server = make_server(job, comm, Recorder(comm.rank))
        run_server(server)
        return server.store.shard.nbytes
    Training(job, comm, Recorder(comm.rank), Uncontrolled()).run()
    return 0


def test_servers_hold_as_much_as_they_were_told_to() -> None:
    strategy = make_strategy("parameter-server", {"servers": 2, "ranges": "3/1"}, 1)
    job = Job(RunConfig(workers=1, eval_every=0), toy(), strategy, task_is_named=False)
    _, first, second = Memory().run(partial(bytes_held, job=job), 1, 2)
    assert first / second == pytest.approx(3.0, abs=0.2)


# Faults, in processes.


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """What one process makes of the same task and seed."""
    return train_in_processes(tmp_path_factory.mktemp("alone"), strategy="solo", launcher="threads")


@pytest.mark.slow
@pytest.mark.parametrize("copies", ["replicas=2,snapshot_every=0", "snapshot_every=1"])
def test_a_killed_server_with_weighted_ranges_is_restored(tmp_path: Path, alone: RunResult, copies: str) -> None:
    def strike() -> None:
        os.kill(pid_of(3), signal.SIGKILL)
        Gate(tmp_path).open()

    acting = at_gate(tmp_path, strike)
    strategy = f"parameter-server:servers=2,{copies},ranges=3/1"
    result = train_in_processes(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=2)
    acting.join()
    assert result.status == "finished" and result.lost == [3]
    (restored,) = records_of(result.run_dir, "restored")
    assert restored["source"] == ("replica at 2" if "replicas" in copies else "snapshot")
    assert distance(result, alone) < 1e-5


@pytest.mark.slow
def test_more_servers_come_to_weighted_ranges(tmp_path: Path, alone: RunResult) -> None:
    def more() -> None:
        (run_dir,) = tmp_path.glob("*/control.json")
        podium.scale(run_dir.parent, servers=3)
        # On a busy machine the run would be over before the newcomer has started.
        newcomer, deadline = run_dir.parent / "records" / "rank-4.jsonl", time.monotonic() + 20
        while not newcomer.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        Gate(tmp_path).open()

    acting = at_gate(tmp_path, more)
    strategy = "parameter-server:servers=2,ranges=3/1"
    result = train_in_processes(tmp_path, Faults().gate(0, step=9), strategy=strategy, workers=2)
    acting.join()
    assert records_of(result.run_dir, "regroup")[-1]["servers"] == [2, 3, 4]
    assert distance(result, alone) < 1e-5


# In virtual time: a slow server.


def virtual_seconds(tmp_path: Path, ranges: str) -> float:
    """Two workers, and servers of which one hangs on a link that is four times slower."""
    text = """
        [cluster]
        seconds_per_sample = 1e-6
        [[node]]
        name = "w"
        count = 2
        up_mbit = 1000
        down_mbit = 1000
        [[node]]
        name = "fast"
        up_mbit = 40
        down_mbit = 40
        [[node]]
        name = "slow"
        up_mbit = 10
        down_mbit = 10
        [placement]
        workers = ["w-0", "w-1"]
        servers = ["fast", "slow"]
    """
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    strategy = ParameterServer(servers=2, ranges=ranges)
    config = RunConfig(workers=2, eval_every=0, launcher="virtual", cluster=str(path), steps=6)
    job = Job(config, toy(model=partial(wide_model, 4000)), strategy, task_is_named=False)
    times = [row["t_ns"] for row in run_virtual(job, None, None).records if row["kind"] == "step" and row["rank"] == 0]
    return float(times[-1] - times[0]) / 5e9


def wide_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def test_ranges_by_speed_shorten_the_step_where_a_server_is_slow(tmp_path: Path) -> None:
    """40 KB; the slow link carries half of it by equal parts and a fifth by speed."""
    equal, by_speed = (virtual_seconds(tmp_path, ranges) for ranges in ("equal", "speed"))
    assert by_speed == pytest.approx(virtual_seconds(tmp_path, "4/1"), rel=0.01)
    assert by_speed < 0.5 * equal
