"""Links: where servers should live, and what of an exchange a worker's own link takes."""

from __future__ import annotations

import math
import random
from functools import partial
from itertools import combinations_with_replacement
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from podium.balance import placement
from podium.balance.placement import best_server_nodes, describe, step_seconds
from podium.balance.ranges import Parcel, Way, exposed_s
from podium.comm.base import Communicator
from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.training import Training, run_server
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, Link, Node, read_cluster, uniform
from podium.launch.inprocess import run_virtual
from podium.records.recorder import Record, Recorder
from podium.strategies.parameter_server import ParameterServer
from podium.testing.toys import Uncontrolled, toy
from podium.testing.worlds import Real


def wide_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 3))


def write_cluster(path: Path, *, mbits: list[float], servers: str, per_sample: float, speeds: list[float]) -> str:
    """A node per number, `n0` and so on; a worker on each of the first two."""
    lines = ["[cluster]", f"seconds_per_sample = {per_sample}", "seconds_per_step = 0.0"]
    for i, (mbit, speed) in enumerate(zip(mbits, speeds, strict=True)):
        lines += ["[[node]]", f'name = "n{i}"', f"speed = {speed}", f"up_mbit = {mbit}", f"down_mbit = {mbit}"]
    lines += ["[placement]", 'workers = ["n0", "n1"]', f"servers = [{servers}]"]
    path.write_text("\n".join(lines))
    return str(path)


def run_on(cluster: str, strategy: ParameterServer, task: Any, **config: Any) -> list[Record]:
    settings = RunConfig(workers=2, eval_every=0, launcher="virtual", cluster=cluster, **config)
    return run_virtual(Job(settings, task, strategy, task_is_named=False), None, None).records


def steps_of(records: list[Record], rank: int) -> list[Record]:
    return [row for row in records if row["kind"] == "step" and row["rank"] == rank]


def seconds_per_step(records: list[Record], last: int) -> float:
    times = [row["t_ns"] for row in steps_of(records, 0)][-last - 1 :]
    return float(times[-1] - times[0]) / last / 1e9


# Placement.


def node(name: str, mbit: float | None, down: float | None = None) -> Node:
    return Node(name=name, up_mbit=mbit, down_mbit=down or mbit)


def test_the_server_goes_where_links_are_fast() -> None:
    cluster = Cluster(nodes=(node("a", 100), node("b", 100), node("slow", 10), node("fast", 1000)))
    assert best_server_nodes(cluster, [0, 1], 1) == (3,)


def test_a_slow_direction_counts_as_much_as_the_other() -> None:
    cluster = Cluster(nodes=(node("a", 100), node("b", 100), node("one-way", 10, 1000), node("both", 300)))
    assert best_server_nodes(cluster, [0, 1], 1) == (3,)


def test_a_link_between_two_nodes_counts_instead_of_what_they_say() -> None:
    nodes = (node("a", 100), node("b", 100), node("c", 1000), node("d", 900))
    assert best_server_nodes(Cluster(nodes=nodes), [0, 1], 1) == (2,)
    assert best_server_nodes(Cluster(nodes=nodes, links={(1, 2): Link(mbit=5)}), [0, 1], 1) == (3,)


def test_among_equals_servers_take_the_emptiest_nodes_and_then_the_first() -> None:
    """Workers with links so slow that it is all the same to them."""
    nodes = (node("a", 1), node("b", 1), node("c", 1000), node("d", 1000), node("e", 1000))
    assert best_server_nodes(Cluster(nodes=nodes), [0, 1], 1) == (2,)
    assert best_server_nodes(Cluster(nodes=nodes), [0, 1, 2], 1) == (3,)


def test_servers_share_out_where_one_card_would_be_the_narrow_place() -> None:
    cluster = Cluster(nodes=(*(node(f"w{i}", 1000) for i in range(4)), node("s", 1000), node("t", 1000)))
    assert best_server_nodes(cluster, [0, 1, 2, 3], 2) in {(4, 5), (0, 1)}
    one, two = (step_seconds(cluster, [0, 1, 2, 3], nodes) for nodes in ((4,), (4, 5)))
    assert two == pytest.approx(one / 2, rel=0.01)


def some_cluster(chance: random.Random, nodes: int) -> Cluster:
    rates = [10, 50, 100, 400, 1000]
    made = tuple(node(f"n{i}", chance.choice(rates), chance.choice(rates)) for i in range(nodes))
    pairs = [(a, b) for a in range(nodes) for b in range(a + 1, nodes) if chance.random() < 0.1]
    return Cluster(nodes=made, links={pair: Link(mbit=chance.choice(rates)) for pair in pairs})


@pytest.mark.parametrize("seed", range(6))
def test_nothing_is_better_than_the_best_and_placing_in_turn_comes_near(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    cluster = some_cluster(chance, 7)
    workers, servers = [chance.randrange(7) for _ in range(5)], 3
    every = combinations_with_replacement(range(7), servers)
    least = min(step_seconds(cluster, workers, nodes) for nodes in every)
    assert step_seconds(cluster, workers, best_server_nodes(cluster, workers, servers)) == pytest.approx(least)
    monkeypatch.setattr(placement, "MOST_TRANSFERS", 0)
    in_turn = step_seconds(cluster, workers, best_server_nodes(cluster, workers, servers))
    assert least - 1e-12 <= in_turn <= 1.3 * least


def test_hundreds_of_nodes_are_no_trouble() -> None:
    chance = random.Random(1)
    cluster = some_cluster(chance, 100)
    found = best_server_nodes(cluster, list(range(64)), 4)
    assert len(found) == 4
    assert step_seconds(cluster, range(64), found) < step_seconds(cluster, range(64), (0, 1, 2, 3))


def test_what_is_said_of_a_placement() -> None:
    cluster = Cluster(nodes=(node("a", 100), node("b", 100), node("slow", 10), node("fast", 1000)))
    said = describe(cluster, [0, 1], (2,), 1_000_000)
    assert said == (
        "servers on slow: the exchange of a step (1 MB) takes 3.2e+03 ms by the links; on fast it would take 160 ms"
    )
    assert describe(cluster, [0, 1], (3,)).endswith("and no other nodes would make it shorter")
    assert describe(cluster, [0, 1], ()) == "no servers to place"
    with pytest.raises(ConfigError, match="there must be a worker and 0 servers or more, got 0 and 1"):
        best_server_nodes(cluster, [], 1)


def test_in_virtual_time_a_run_is_fastest_with_its_server_there(tmp_path: Path) -> None:
    mbits = [100.0, 60.0, 20.0, 200.0, 90.0]
    nodes = tuple(node(f"n{i}", mbit) for i, mbit in enumerate(mbits))
    (best,) = best_server_nodes(Cluster(nodes=nodes), [0, 1], 1)
    took = []
    for i in range(5):
        file = write_cluster(tmp_path / f"{i}.toml", mbits=mbits, servers=f'"n{i}"', per_sample=1e-6, speeds=[1.0] * 5)
        records = run_on(file, ParameterServer(), toy(model=partial(wide_model, 2000)), steps=4)
        took.append(seconds_per_step(records, 3))
    assert took[best] < 1.2 * min(took) < 0.3 * max(took)  # cards serve one message after the other
    predicted = [step_seconds(Cluster(nodes=nodes), [0, 1], (i,), 2000 * 10 * 4) for i in range(5)]
    assert took == pytest.approx(predicted, rel=0.25)


# What of an exchange a worker's own link takes.

WAY = Way(up=100.0, taken=1000.0, given=1000.0, down=50.0, latency_s=0.5)


def test_what_leaves_when_the_pass_is_over_is_hidden_by_nothing() -> None:
    whole = [Parcel(0, 200, 1.0)]
    assert exposed_s(whole, whole, [WAY], backward_s=0.0) == pytest.approx(2 + 4 + 2 * 0.5)
    assert exposed_s(whole, whole, [WAY], backward_s=9.0) == pytest.approx(2 + 4 + 2 * 0.5)


def test_of_what_leaves_early_the_last_remains_at_least() -> None:
    push, pull = [Parcel(0, 100, 0.25), Parcel(0, 100, 0.5), Parcel(0, 50, 1.0)], [Parcel(0, 250, 1.0)]
    fixed = 5 + 2 * 0.5
    assert exposed_s(push, pull, [WAY], backward_s=100.0) == pytest.approx(0.5 + fixed)
    assert exposed_s(push, pull, [WAY], backward_s=0.0) == pytest.approx(2.5 + fixed)
    # Ready after 0.5 s and 1 s of 2: sent until 1.5 s and 2.5 s, and the last one until 3 s.
    assert exposed_s(push, pull, [WAY], backward_s=2.0) == pytest.approx(1.0 + fixed)


def test_the_slower_of_ones_own_link_and_the_servers_counts() -> None:
    """Two servers take in turn what one's own link sends one after the other."""
    wide = Way(up=1000.0, taken=10.0, given=10.0, down=1000.0, latency_s=0.0)
    push = [Parcel(0, 100, 1.0), Parcel(1, 100, 1.0)]
    assert exposed_s(push, push, [wide, wide], 0.0) == pytest.approx(10.1 + 10)
    assert exposed_s(push, push, [wide._replace(up=5.0)] * 2, 0.0) == pytest.approx(40 + 10)


def test_without_ways_nothing_is_known() -> None:
    assert exposed_s([Parcel(0, 100, 1.0)], [], [], 1.0) == 0.0


@pytest.fixture
def one_slow_link(tmp_path: Path) -> str:
    """Two equal workers; the second hangs on a link that is ten times slower: 400 KB take 32 ms each way."""
    mbits = [1000.0, 100.0, 10000.0]
    return write_cluster(tmp_path / "c.toml", mbits=mbits, servers='"n2"', per_sample=2e-3, speeds=[1.0] * 3)


UNEVEN_TASK: dict[str, Any] = {"samples": 64 * 16, "batch_size": 64, "epochs": 2}


def test_equal_finish_gives_less_to_whoever_has_a_slow_link(one_slow_link: str) -> None:
    """10000 elements of each 4 bytes, ready at once: 6.4 ms there and back for one worker, 64 for the other."""
    task = toy(model=partial(wide_model, 10000), **UNEVEN_TASK)
    by = {b: run_on(one_slow_link, ParameterServer(), task, balance=b) for b in ("equal", "equal-finish")}
    equal, balanced = (seconds_per_step(by[b], 10) for b in ("equal", "equal-finish"))
    mine, other = (steps_of(by["equal-finish"], rank)[-2]["samples"] for rank in (0, 1))
    # 2 ms a sample: 57.6 ms are worth about 29 samples, half of which change hands.
    assert mine + other == 64
    assert mine - other == pytest.approx(29, abs=3)
    assert balanced < equal - 0.02
    (told,) = [row for row in by["equal-finish"] if row["kind"] == "balance"][-1:]
    assert [member["exchange_s"] for member in told["members"]] == pytest.approx([0.0064, 0.064], rel=0.1)


@pytest.mark.slow
def test_what_leaves_early_is_not_counted(one_slow_link: str) -> None:
    """In small buckets most of the push lies behind the backward pass: only the way back makes a difference."""
    task = toy(model=partial(deep_model, 100, 8), **UNEVEN_TASK)
    strategy: dict[str, Any] = {"unit_bytes": 40_000, "bucket_bytes": 40_000}
    by = {
        overlap: run_on(one_slow_link, ParameterServer(overlap=overlap, **strategy), task, balance="equal-finish")
        for overlap in (True, False)
    }
    slow = {}
    for overlap, records in by.items():
        (told,) = [row for row in records if row["kind"] == "balance"][-1:]
        slow[overlap] = told["members"][1]["exchange_s"]
    assert slow[True] < 0.65 * slow[False]
    assert seconds_per_step(by[True], 10) < seconds_per_step(by[False], 10)


def deep_model(width: int, layers: int) -> nn.Module:
    torch.manual_seed(0)
    inner = [layer for _ in range(layers) for layer in (nn.Linear(width, width), nn.Tanh())]
    return nn.Sequential(nn.Linear(6, width), *inner, nn.Linear(width, 3))


def test_collectives_are_waited_for_by_all_alike(tmp_path: Path) -> None:
    from podium.strategies.all_reduce import AllReduce

    file = write_cluster(tmp_path / "c.toml", mbits=[1000, 50], servers='"n0"', per_sample=1e-3, speeds=[1.0, 1.0])
    settings = RunConfig(workers=2, eval_every=0, launcher="virtual", cluster=file, balance="equal-finish", steps=20)
    job = Job(settings, toy(model=partial(wide_model, 2000), samples=640), AllReduce(), task_is_named=False)
    records = run_virtual(job, None, None).records
    assert len(steps_of(records, 0)) == 20
    assert not [row for row in records if row["kind"] == "balance"]


# Where nobody knows the links, they are measured.


def exposure_of(comm: Communicator, job: Job) -> tuple[float, float] | None:
    recorder = Recorder(comm.rank)
    if comm.rank in comm.servers:
        from podium.servers.build import make_server

        run_server(make_server(job, comm, recorder))
        return None
    training = Training(job, comm, recorder, Uncontrolled())
    worker, strategy = training.worker, job.strategy
    worker.progress.run_until(10**9)
    before = worker.gradients.times.exchange_s
    state = strategy.init(worker)
    during = worker.gradients.times.exchange_s
    strategy.finish(worker, state)
    assert worker.gradients.times.exchange_s == 0.0
    return before, during


def test_in_processes_the_way_to_the_servers_is_measured_when_it_is_asked_for() -> None:
    task = toy(model=partial(wide_model, 20000))
    job = Job(RunConfig(workers=2, eval_every=0), task, ParameterServer(servers=2), task_is_named=False)
    for before, during in Real().run(partial(exposure_of, job=job), 2, 2)[:2]:
        assert before == 0.0
        assert 1e-5 < during < 1.0  # 800 KB each way over a Unix socket: half a millisecond or so
        assert math.isfinite(during)


def test_equal_nodes_are_one_as_good_as_another() -> None:
    assert best_server_nodes(uniform(4), [0, 1, 2], 1) in {(0,), (1,), (2,), (3,)}


def test_a_cluster_file_may_leave_the_servers_place_to_the_links(tmp_path: Path) -> None:
    text = """
[[node]]
name = "slow"
count = 2
up_mbit = 100
down_mbit = 100
[[node]]
name = "hub"
up_mbit = 10000
down_mbit = 10000
[placement]
workers = ["slow-0", "slow-1"]
servers = "by-link"
"""
    file = tmp_path / "c.toml"
    file.write_text(text)
    cluster = read_cluster(file)
    assert [cluster.names[node] for node in cluster.place(2, 1)] == ["slow-0", "slow-1", "hub"]
    file.write_text(text.replace('servers = "by-link"', ""))
    assert cluster.fingerprint() != read_cluster(file).fingerprint()
    assert "servers_by_link" not in read_cluster(file).to_dict()
