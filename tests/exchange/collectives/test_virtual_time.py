"""In virtual time a schedule takes what its formula says: model, schedule and network agree."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

from podium.comm.base import Communicator
from podium.exchange.collectives import make_collective
from podium.exchange.collectives.butterfly import Butterfly
from podium.exchange.collectives.costs import FORMULAS, seconds
from podium.exchange.collectives.links import measure, partners
from podium.exchange.collectives.ring import Ring
from podium.launch.clusters.description import Cluster, read_cluster, uniform
from podium.testing.worlds import Virtual

MIB = 1 << 20


def timed(comm: Communicator, name: str, numel: int) -> float:
    collective, tensor = make_collective(name).prepare(comm), torch.ones(numel)
    comm.barrier()
    began = comm.clock.now_ns()
    comm.wait(collective.all_reduce(comm, tensor))
    assert bool((tensor == comm.size).all())
    return (comm.clock.now_ns() - began) / 1e9


@pytest.mark.parametrize("workers", [2, 4, 5, 8])
@pytest.mark.parametrize("name", FORMULAS)
def test_a_schedule_takes_what_its_formula_says(name: str, workers: int) -> None:
    world = Virtual(uniform(workers, mbit=1000, latency_us=50, seconds_per_sample=1e-4))
    took = max(world.run(partial(timed, name=name, numel=4 * MIB), workers))
    assert took == pytest.approx(seconds(name, 16 * MIB, workers, 50e-6, 8e-9), rel=0.1)


UNEVEN = """
[[node]]
name = "a"
up_mbit = 1000
down_mbit = 1000
[[node]]
name = "slow"
up_mbit = 100
down_mbit = 100
[[node]]
name = "b"
count = 2
up_mbit = 1000
down_mbit = 1000
"""


def cluster_of(folder: Path, text: str) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text)
    return read_cluster(path)


@pytest.fixture
def uneven(tmp_path: Path) -> Cluster:
    return cluster_of(tmp_path, UNEVEN)


def test_links_are_measured_as_they_are(uneven: Cluster) -> None:
    links = Virtual(uneven).run(measure, 4)
    assert all(found == links[0] for found in links)
    rates = [rate * 8 / 1e6 for rate in links[0].bandwidth]
    assert rates == pytest.approx([1000, 100, 1000, 1000], rel=0.1)


def test_a_slow_link_gets_less_to_do(uneven: Cluster) -> None:
    (chosen, *_), took = prepared(uneven, "butterfly"), {}
    assert isinstance(chosen, Butterfly)
    assert chosen.bandwidth is not None
    for name in ("butterfly", "task-graph"):
        took[name] = max(Virtual(uneven).run(partial(timed, name=name, numel=MIB), 4))
    assert took["butterfly"] < 0.8 * took["task-graph"]


TWO_SITES = """
[[node]]
name = "n"
count = 6
up_mbit = 1000
down_mbit = 1000
"""


def test_the_ring_crosses_the_slow_gap_twice_and_no_more(tmp_path: Path) -> None:
    """Workers of two sites in turns: the order that follows the ranks would cross at every hop."""
    gaps = [(a, b) for a in range(6) for b in range(a + 1, 6) if a % 2 != b % 2]
    links = "".join(f'[[link]]\nbetween = ["n-{a}", "n-{b}"]\nmbit = 50\nlatency_us = 2000\n' for a, b in gaps)
    cluster = cluster_of(tmp_path, TWO_SITES + links)
    (chosen, *_) = prepared(cluster, "ring", measure=True)
    assert isinstance(chosen, Ring)
    assert chosen.order is not None
    crossings = sum(a % 2 != b % 2 for a, b in zip(chosen.order, (*chosen.order[1:], chosen.order[0]), strict=True))
    assert crossings == 2


def prepared(cluster: Cluster, name: str, **options: object) -> list[object]:
    return Virtual(cluster).run(partial(prepare, name=name, options=options), len(cluster.nodes))


def prepare(comm: Communicator, name: str, options: dict[str, object]) -> object:
    return make_collective(name, options).prepare(comm)


@pytest.mark.parametrize("size", range(2, 12))
def test_everybody_plays_everybody_once(size: int) -> None:
    rounds = [partners(i, size) for i in range(size)]
    for i, opponents in enumerate(rounds):
        assert sorted(j for j in opponents if j >= 0) == [j for j in range(size) if j != i]
        assert all(rounds[j][n] == i for n, j in enumerate(opponents) if j >= 0)
