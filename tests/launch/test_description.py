"""The cluster file: what it says is what comes out, and what it cannot say is refused by name."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from podium.errors import ConfigError, UnknownName
from podium.launch.clusters.description import Cluster, Link, Node, read_cluster, uniform

EXAMPLES = Path(__file__).parents[2] / "examples" / "clusters"
FULL = """
[cluster]
sharing = "fair"
jitter = 0.05
seconds_per_sample = 1e-4
local_gbs = 2

[[node]]
name = "fast"
count = 2
up_mbit = 1000
down_mbit = 800
latency_us = 100
cpus = 1.0

[[node]]
name = "slow"
speed = 0.25
latency_us = 300

[[link]]
between = ["slow", "fast-0"]
mbit = 100
latency_us = 500

[placement]
workers = ["fast-1", "slow"]
servers = ["fast-0"]
"""


@pytest.fixture
def write(tmp_path: Path):
    def to_file(text: str) -> Path:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return to_file


def test_a_file_says_nodes_links_and_placement(write) -> None:
    cluster = read_cluster(write(FULL))
    assert cluster.names == ("fast-0", "fast-1", "slow")
    assert cluster.nodes[1] == Node(name="fast-1", up_mbit=1000, down_mbit=800, latency_us=100, cpus=1.0)
    assert cluster.nodes[2].speed == 0.25 and cluster.nodes[2].up_mbit is None
    assert (cluster.sharing, cluster.jitter, cluster.seconds_per_sample) == ("fair", 0.05, 1e-4)
    assert cluster.links == {(0, 2): Link(mbit=100, latency_us=500)}
    assert (cluster.workers, cluster.servers) == ((1, 2), (0,))


def test_a_path_takes_the_senders_up_and_the_receivers_down(write) -> None:
    cluster = read_cluster(write(FULL))
    assert cluster.path(0, 1) == (125e6, 100e6, 100_000)
    assert cluster.path(1, 2) == (125e6, 2e9, 200_000), "unshaped is the same-node rate; each end adds half its latency"


def test_a_link_replaces_what_the_nodes_say_in_both_directions(write) -> None:
    cluster = read_cluster(write(FULL))
    assert cluster.path(0, 2) == cluster.path(2, 0) == (12.5e6, 12.5e6, 500_000)


def test_ranks_on_one_node_meet_on_a_fast_path() -> None:
    assert uniform(2, mbit=1).path(1, 1) == (5e9, 5e9, 5_000)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[node]]\nname = "a"\nspead = 1', ["'spead'", "Did you mean 'speed'", "[[node]]"]),
        ('[[node]]\nname = "a"\ncout = 1', ["Did you mean 'count'"]),
        ('[cluster]\njiter = 1\n[[node]]\nname = "a"', ["Did you mean 'jitter'", "[cluster]"]),
        ('[[nodes]]\nname = "a"', ["Did you mean 'node'"]),
        ('[[node]]\nname = "fast"\n[placement]\nworkers = ["fats"]', ["Did you mean 'fast'", "[placement] workers"]),
        ('[cluster]\nsharing = "fare"\n[[node]]\nname = "a"', ["Did you mean 'fair'"]),
        ('[[node]]\nname = "a"\n[[link]]\nbetween = ["a", "b"]\nmbit = 1', ["'b'", "[[link]] between"]),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest_match_and_the_file(write, text: str, words: list[str]) -> None:
    with pytest.raises(UnknownName) as caught:
        read_cluster(write(text))
    for word in [*words, "cluster.toml"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[[node]]\nname = "a"\nspeed = 0', ["node 'a'", "speed", "above 0", "got 0"]),
        ('[[node]]\nname = "a"\nspeed = nan', ["speed", "finite", "got nan"]),
        ('[[node]]\nname = "a"\nup_mbit = -5', ["up_mbit", "above 0", "got -5"]),
        ('[[node]]\nname = "a"\ndown_mbit = true', ["down_mbit", "a number", "got True"]),
        ('[[node]]\nname = "a"\nlatency_us = -1', ["latency_us", "at least 0"]),
        ('[[node]]\nname = "a"\ncpus = 0.001', ["cpus", "at least 0.01"]),
        ('[[node]]\nname = "a"\ncount = 0', ["count", "at least 1", "got 0"]),
        ('[[node]]\nname = "a b"', ["name", "got 'a b'"]),
        ("[[node]]\nspeed = 1", ["must have a name"]),
        ('[node]\nname = "a"', ["[[node]]"]),
        ('[[node]]\nname = "a"\n[[node]]\nname = "a"', ["must differ", "'a'"]),
        ("", ["at least one node"]),
        ('[cluster]\njitter = inf\n[[node]]\nname = "a"', ["jitter", "finite"]),
        ('[cluster]\nseconds_per_sample = 0\n[[node]]\nname = "a"', ["seconds_per_sample", "above 0"]),
        ('[[node]]\nname = "a"\n[[link]]\nbetween = ["a", "a"]\nmbit = 1', ["two different nodes"]),
        ('[[node]]\nname = "a"\ncount = 2\n[[link]]\nbetween = ["a-0", "a-1"]', ["mbit or latency_us"]),
        ('[[node]]\nname = "a"\n[placement]\nworkers = "a"', ["list of node names", "got 'a'"]),
        ("[[node]\n", ["not a TOML file"]),
    ],
)
def test_a_wrong_value_says_who_what_must_hold_and_what_came(write, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster(write(text))
    for word in [*words, "cluster.toml"]:
        assert word in str(caught.value)


def test_a_pair_linked_twice_is_refused_in_either_order(write) -> None:
    nodes = '[[node]]\nname = "a"\ncount = 2\n'
    links = '[[link]]\nbetween = ["a-0", "a-1"]\nmbit = 1\n[[link]]\nbetween = ["a-1", "a-0"]\nmbit = 2\n'
    with pytest.raises(ConfigError, match="named once"):
        read_cluster(write(nodes + links))


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read"):
        read_cluster(tmp_path / "absent.toml")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_are_read_and_carry_a_run(path: Path) -> None:
    cluster = read_cluster(path)
    assert set(cluster.place(workers=4, servers=1)) <= set(range(len(cluster.nodes)))
    assert cluster.ring_seconds(1e6, cluster.place(4)) > 0


def test_there_are_examples() -> None:
    assert len(list(EXAMPLES.glob("*.toml"))) >= 3


def test_workers_fill_the_nodes_in_turn_and_servers_go_where_there_is_room() -> None:
    cluster = uniform(3)
    assert cluster.place(2, 1) == (0, 1, 2)
    assert cluster.place(4, 2) == (0, 1, 2, 0, 1, 2)
    assert cluster.place(2, 4) == (0, 1, 2, 0, 1, 2)


def test_a_written_placement_is_followed_from_the_front_again() -> None:
    cluster = dataclasses.replace(uniform(4), workers=(2, 3), servers=(1,))
    assert cluster.place(3, 2) == (2, 3, 2, 1, 1)
    assert dataclasses.replace(cluster, servers=()).place(2, 3) == (2, 3, 0, 1, 0)


@given(st.integers(1, 5), st.integers(1, 9), st.integers(0, 9))
def test_a_colocated_server_sits_with_its_worker(nodes: int, workers: int, servers: int) -> None:
    placed = dataclasses.replace(uniform(nodes), servers=(0,)).place(workers, servers, colocated=True)
    assert len(placed) == workers + servers
    assert all(placed[workers + m] == placed[m % workers] for m in range(servers))


def test_a_placement_on_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 0 to 1, got 2"):
        dataclasses.replace(uniform(2), workers=(0, 2))
    with pytest.raises(ConfigError, match="1 worker"):
        uniform(2).place(0)


@given(st.integers(2, 40), st.integers(0, 10**9))
def test_a_ring_of_equal_nodes_follows_the_closed_form(nodes: int, nbytes: int) -> None:
    cluster = uniform(nodes, mbit=1000, latency_us=50)
    expected = 2 * (nodes - 1) * (50e-6 + nbytes / nodes / 125e6)
    assert math.isclose(cluster.ring_seconds(nbytes, range(nodes)), expected, rel_tol=1e-12)


def test_a_ring_of_one_costs_nothing() -> None:
    assert uniform(3).ring_seconds(1e9, [2]) == 0.0 == uniform(3).ring_seconds(1e9, [])


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.data())
def test_slowing_a_node_never_makes_the_ring_faster(mbits: list[int], data: st.DataObject) -> None:
    nodes = tuple(Node(name=f"n{i}", up_mbit=m, down_mbit=m) for i, m in enumerate(mbits))
    victim = data.draw(st.integers(0, len(nodes) - 1))
    slower = tuple(dataclasses.replace(n, up_mbit=n.up_mbit / 2) if i == victim else n for i, n in enumerate(nodes))
    ring = range(len(nodes))
    before, after = (Cluster(nodes=x).ring_seconds(1e6, ring) for x in (nodes, slower))
    assert after >= before
    slowest = 1e6 / len(nodes) / (min(mbits) * 125_000) + 50e-6
    assert math.isclose(before, 2 * (len(nodes) - 1) * slowest, rel_tol=1e-9), "the slowest hop is everyone's"


def test_hops_that_leave_one_node_share_its_rate() -> None:
    cluster = uniform(2, mbit=100, latency_us=0)
    alternating, side_by_side = cluster.ring_seconds(4e6, [0, 1, 0, 1]), cluster.ring_seconds(4e6, [0, 0, 1, 1])
    assert math.isclose(alternating, 2 * side_by_side)
    assert math.isclose(side_by_side, 6 * 1e6 / 12.5e6)


def test_the_fingerprint_follows_the_content_and_nothing_else(write) -> None:
    base = read_cluster(write(FULL))
    assert base.fingerprint() == read_cluster(write(FULL + "\n# a remark\n")).fingerprint()
    assert uniform(2, mbit=1000).fingerprint() == uniform(2, mbit=1000.0).fingerprint()
    changed = [
        dataclasses.replace(base, jitter=0.06),
        dataclasses.replace(base, workers=(2, 1)),
        dataclasses.replace(base, links={(0, 2): Link(mbit=101, latency_us=500)}),
        dataclasses.replace(base, nodes=(dataclasses.replace(base.nodes[0], speed=2.0), *base.nodes[1:])),
    ]
    assert len({base.fingerprint(), *(c.fingerprint() for c in changed)}) == 5


def test_the_dictionary_is_json_and_names_nodes(write) -> None:
    plain = json.loads(json.dumps(read_cluster(write(FULL)).to_dict()))
    assert plain["workers"] == ["fast-1", "slow"]
    assert plain["links"] == [{"between": ["fast-0", "slow"], "mbit": 100.0, "latency_us": 500.0}]


def test_reading_a_cluster_does_not_import_torch() -> None:
    script = "import sys, podium.launch.clusters.description; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], cwd=EXAMPLES.parents[1], timeout=60, check=True)
