"""Slow nodes on real processes: a node's speed draws out its workers' passes."""

from __future__ import annotations

import os
import statistics
from pathlib import Path

import pytest

import podium
from podium.comm.clocks import SlowClock
from podium.errors import ConfigError
from podium.launch.clusters.description import Cluster, Node
from podium.launch.shaped import too_fast
from podium.records.manifest import read_manifest
from podium.records.recorder import read_records
from tests.manual_clock import ManualClock

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")

PASS_S = 0.02


def slow(speed: float) -> tuple[SlowClock, ManualClock]:
    """A slow clock, and the wall's, on which sleeping takes exactly as long as was asked."""
    wall = ManualClock()
    return SlowClock(wall, speed=speed, sleep=wall.advance), wall


@pytest.mark.parametrize("fractions", [(1.0,), (0.3, 0.9, 1.0)])
@pytest.mark.parametrize("speed", [1.0, 0.5, 0.2])
def test_a_pass_takes_as_much_longer_as_the_node_is_slower(speed: float, fractions: tuple[float, ...]) -> None:
    clock, wall = slow(speed)
    clock.begin_pass(8)
    for fraction in fractions:
        wall.advance(PASS_S / len(fractions))
        clock.reach(fraction)
    assert clock.now_s() == pytest.approx(PASS_S / speed, rel=1e-6)


def test_gradients_come_as_late_as_they_would() -> None:
    """What is done halfway through is there halfway through the longer pass, not before all of the sleep."""
    clock, wall = slow(0.25)
    clock.begin_pass(8)
    for part in (1, 2):
        wall.advance(PASS_S)
        clock.reach(part / 2)
        assert clock.now_s() == pytest.approx(part * 4 * PASS_S, rel=1e-6)


def test_between_passes_nothing_is_drawn_out() -> None:
    clock, wall = slow(0.001)
    clock.reach(1.0)
    clock.begin_pass(8)
    clock.reach(1.0)
    wall.advance(PASS_S)
    clock.reach(0.7)
    clock.reach(1.0)
    assert clock.now_s() == pytest.approx(PASS_S)


@pytest.mark.parametrize("speed", [0.0, -1.0, 1.5])
def test_a_clock_cannot_be_faster_than_the_machine(speed: float) -> None:
    with pytest.raises(ConfigError, match="above 0 and at most 1"):
        SlowClock(ManualClock(), speed=speed)


def test_a_speed_above_one_is_a_warning() -> None:
    fast, equal = Node(name="fast", speed=2.0), Node(name="equal")
    (said,) = too_fast(Cluster(nodes=(equal, fast)))
    assert said == "no node is faster than this machine: speed above 1 counts as 1, got fast (2)"
    assert too_fast(Cluster(nodes=(equal,))) == []


@pytest.mark.root
@needs_root
def test_a_slow_worker_takes_longer_as_the_file_says(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text('[[node]]\nname = "usual"\nspeed = 2.0\n[[node]]\nname = "slow"\nspeed = 0.1\n')
    result = podium.train(
        "wide-mlp",
        task_options={"features": 256, "width": 256, "depth": 3, "samples": 4096, "batch_size": 1024, "lr": 1e-6},
        workers=2,
        strategy="parameter-server:servers=2,placement=colocated",
        steps=15,
        threads=1,
        launcher="shaped",
        cluster=str(file),
        out=str(tmp_path),
    )
    steps = [row for row in read_records(Path(result.run_dir)) if row["kind"] == "step"]
    own = [statistics.median(r["step_ns"] - r["wait_ns"] for r in steps if r["rank"] == rank) for rank in (0, 1)]
    assert own[1] > 4 * own[0]  # ten times; others may compute beside us
    (warning,) = [w for w in read_manifest(Path(result.run_dir))["network"]["warnings"] if "faster" in w]
    assert "usual (2)" in warning
