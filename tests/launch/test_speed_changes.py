"""Nodes whose speed changes in the middle of a run, in virtual time and on real processes."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path

import pytest

import podium
from podium.comm.clocks import SlowClock
from podium.comm.virtual import VirtualWorld
from podium.errors import ConfigError, UnknownName
from podium.launch.clusters.description import Change, Cluster, Node, read_cluster, uniform
from podium.launch.shaped import speeds_of, too_fast
from podium.records.recorder import read_records
from tests.manual_clock import ManualClock

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
NODES = '[[node]]\nname = "usual"\n[[node]]\nname = "slow"\nspeed = 0.5\n'
TWICE = (
    '[[change]]\nnode = "slow"\nat_s = 2\nspeed = 0.25\n[[change]]\nnode = "usual"\nat_s = 1\nspeed = 2\n'
    '[[change]]\nnode = "slow"\nat_s = 3.5\nspeed = 1\n'
)

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def file(text: str) -> Path:
        path = tmp_path / "cluster.toml"
        path.write_text(text)
        return path

    return file


def test_a_file_says_when_a_node_changes_its_speed(write: Write) -> None:
    cluster = read_cluster(write(NODES + TWICE))
    assert [cluster.speed_at(1, round(s * 1e9)) for s in (0, 1.999, 2, 3.499, 3.5, 1e6)] == [0.5, 0.5, 0.25, 0.25, 1, 1]
    assert [cluster.speed_at(0, round(s * 1e9)) for s in (0, 0.999, 1, 1e6)] == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ('node = "slow"\nat_s = -1\nspeed = 1', ["change", "at_s", "at least 0", "-1"]),
        ('node = "slow"\nat_s = 1\nspeed = 0', ["change", "speed", "above 0", "0"]),
        ('node = "slow"\nspeed = 1', ["[[change]]", "must give at_s"]),
        ("at_s = 1.0\nspeed = 1", ["[[change]]", "must give node"]),
        ('node = "slow"\nat_s = 1', ["[[change]]", "must give speed"]),
        ('node = "slow"\nat_s = "soon"\nspeed = 1', ["at_s", "soon"]),
        (
            'node = "slow"\nat_s = 2\nspeed = 1\n[[change]]\nnode = "slow"\nat_s = 2\nspeed = 0.5',
            ["'slow'", "later", "2"],
        ),
    ],
)
def test_a_wrong_change_says_who_what_must_hold_and_what_came(write: Write, entry: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_cluster(write(f"{NODES}[[change]]\n{entry}\n"))
    for word in ("cluster.toml", *words):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "nearest"), [('node = "slov"\nat_s = 1\nspeed = 1', "slow"), ('node = "slow"\nat = 1\nspeed = 1', "at_s")]
)
def test_an_unknown_node_or_key_of_a_change_is_refused_with_the_nearest(write: Write, entry: str, nearest: str) -> None:
    with pytest.raises(UnknownName, match=nearest):
        read_cluster(write(f"{NODES}[[change]]\n{entry}\n"))


def test_a_change_of_a_node_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 0 to 0, got 1"):
        Cluster(nodes=(Node(name="only"),), changes=(Change(node=1, at_s=1, speed=1),))


def test_a_file_without_changes_keeps_the_fingerprint_that_it_had(write: Write) -> None:
    cluster = read_cluster(write(NODES))
    plain = cluster.to_dict()
    assert "changes" not in plain
    node = {"cpus": None, "down_mbit": None, "flops": 3e10, "latency_us": 50.0, "memory_gbs": 4.0, "up_mbit": None}
    as_before = {
        "jitter": 0.0,
        "links": [],
        "local_gbs": 5.0,
        "local_latency_us": 5.0,
        "nodes": [{**node, "name": "usual", "speed": 1.0}, {**node, "name": "slow", "speed": 0.5}],
        "seconds_per_sample": None,
        "seconds_per_step": 5e-4,
        "servers": [],
        "sharing": "fifo",
        "workers": [],
    }
    text = json.dumps(as_before, sort_keys=True, separators=(",", ":"))
    assert cluster.fingerprint() == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_changes_are_in_the_dictionary_by_name_and_move_the_fingerprint(write: Write) -> None:
    cluster = read_cluster(write(NODES + TWICE))
    assert cluster.to_dict()["changes"] == [
        {"node": "usual", "at_s": 1.0, "speed": 2.0},
        {"node": "slow", "at_s": 2.0, "speed": 0.25},
        {"node": "slow", "at_s": 3.5, "speed": 1.0},
    ]
    json.dumps(cluster.to_dict())
    other = read_cluster(write(NODES + TWICE.replace("3.5", "3.6")))
    as_floats = read_cluster(write(NODES + TWICE.replace("at_s = 2\n", "at_s = 2.0\n")))
    assert len({cluster.fingerprint(), other.fingerprint(), read_cluster(write(NODES)).fingerprint()}) == 3
    assert as_floats.fingerprint() == cluster.fingerprint()


def test_in_virtual_time_a_pass_goes_by_the_speed_at_its_beginning() -> None:
    """Passes of a second: the one that the change comes in the middle of is the last at the old speed."""
    cluster = Cluster(
        nodes=uniform(1).nodes,
        seconds_per_sample=0.1,
        seconds_per_step=0.0,
        changes=(Change(node=0, at_s=1.5, speed=0.25), Change(node=0, at_s=9.0, speed=2.0)),
    )
    clock = VirtualWorld(cluster, 1).ranks[0].virtual_clock
    ends = [0]
    for _ in range(6):
        clock.begin_pass(10)
        clock.reach(1.0)
        ends.append(clock.now_ns())
    assert [(b - a) / 1e9 for a, b in itertools.pairwise(ends)] == pytest.approx([1, 1, 4, 4, 0.5, 0.5])


def test_in_virtual_time_only_the_changed_node_is_slower_and_only_for_as_long(write: Write, tmp_path: Path) -> None:
    changes = '[[change]]\nnode = "slow"\nat_s = 2\nspeed = 0.125\n[[change]]\nnode = "slow"\nat_s = 8\nspeed = 0.5\n'
    settings = "[cluster]\nseconds_per_sample = 0.01\nseconds_per_step = 0.0\n"
    result = podium.train(
        "wide-mlp",
        task_options={"features": 8, "width": 8, "depth": 1, "samples": 640, "batch_size": 32},
        workers=2,
        steps=20,
        launcher="virtual",
        cluster=str(write(settings + NODES + changes)),
        run_dir=tmp_path / "run",
    )
    steps = [row for row in read_records(Path(result.run_dir)) if row["kind"] == "step"]
    for row in steps:
        began = (row["t_ns"] - row["step_ns"]) / 1e9
        expected = 0.16 if row["rank"] == 0 else 0.16 / (0.125 if 2 <= began < 8 else 0.5)
        assert row["pass_ns"] / 1e9 == pytest.approx(expected, rel=1e-3)
    assert len({row["pass_ns"] for row in steps if row["rank"] == 1}) == 2


def test_a_slow_clock_changes_its_speed_with_the_time() -> None:
    wall = ManualClock()
    clock = SlowClock(wall, speed=1.0, changes=((30_000_000, 0.25), (150_000_000, 1.0)), sleep=wall.advance)

    def seconds_at(begin_s: float) -> float:
        wall.advance(begin_s - wall.now_s())
        clock.begin_pass(1)
        wall.advance(0.02)
        clock.reach(1.0)
        return wall.now_s() - begin_s

    assert [seconds_at(begin_s) for begin_s in (0.0, 0.029, 0.06, 0.149, 0.3)] == pytest.approx(
        [0.02, 0.02, 0.08, 0.08, 0.02]
    )


def test_a_slow_clock_cannot_become_faster_than_the_machine() -> None:
    with pytest.raises(ConfigError, match=r"above 0 and at most 1, got 1\.5"):
        SlowClock(ManualClock(), speed=0.5, changes=((1, 1.5),))


def test_on_real_processes_no_change_makes_a_node_faster_than_the_machine() -> None:
    changes = (Change(node=1, at_s=1.0, speed=4.0), Change(node=1, at_s=2.0, speed=0.5))
    cluster = Cluster(nodes=(Node(name="a"), Node(name="b", speed=0.25)), changes=changes)
    assert speeds_of(cluster, 0) == {"speed": 1.0, "speed_changes": ()}
    assert speeds_of(cluster, 1) == {"speed": 0.25, "speed_changes": ((10**9, 1.0), (2 * 10**9, 0.5))}
    (said,) = too_fast(cluster)
    assert said.endswith("got b (4)")


@pytest.mark.root
@needs_root
def test_a_real_worker_goes_by_the_changes_of_its_node(write: Write, tmp_path: Path) -> None:
    """Both change before the first step: one becomes slower, one recovers."""
    nodes = NODES.replace("0.5", "0.01")
    change = '[[change]]\nnode = "{}"\nat_s = 0.001\nspeed = {}\n'
    result = podium.train(
        "wide-mlp",
        task_options={"features": 256, "width": 256, "depth": 3, "samples": 4096, "batch_size": 1024, "lr": 1e-6},
        workers=2,
        steps=15,
        threads=1,
        launcher="shaped",
        cluster=str(write(nodes + change.format("usual", 0.1) + change.format("slow", 1.0))),
        run_dir=tmp_path / "run",
    )
    steps = [row for row in read_records(Path(result.run_dir)) if row["kind"] == "step"]
    own = [statistics.median(r["step_ns"] - r["wait_ns"] for r in steps if r["rank"] == rank) for rank in (0, 1)]
    assert own[0] > 4 * own[1]  # ten times; others may compute beside us
