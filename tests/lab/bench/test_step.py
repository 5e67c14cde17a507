"""`podium bench step`: the same work on both sides, and a ratio with its uncertainty."""

from __future__ import annotations

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.harness import interleave, ratio
from podium.lab.bench.step import bench_step


def test_podium_and_ddp_do_the_same_work_in_every_round() -> None:
    document = bench_step(("ddp",), rounds=2, tasks="digits-mlp", steps=1)
    (row,) = document["rows"]
    assert row["difference"] < 1e-6
    assert row["rounds"] == 2
    assert row["ratio"] > 0
    low, high = row["ratio_interval"]
    assert low <= row["ratio"] <= high
    assert row["against"] in ("ddp", "ddp_bucket_views")
    assert set(row["step_ms"]) > {"podium", "ddp"}


def test_without_peers_only_podium_is_measured() -> None:
    (row,) = bench_step((), rounds=1, tasks="digits-mlp", steps=1)["rows"]
    assert set(row["step_ms"]) == {"podium", "podium_over_gloo"}
    assert "ratio" not in row


def test_every_contender_has_every_place_in_the_order() -> None:
    order: list[str] = []
    contenders = {name: (lambda name=name: order.append(name) or 1.0) for name in "abc"}  # type: ignore[misc]  # bound now
    times = interleave(contenders, rounds=3, warmup=0)
    assert order == list("abcbcacab")
    assert times == {name: [1.0] * 3 for name in "abc"}


def test_the_ratio_is_taken_round_by_round() -> None:
    """A machine that slows down for all alike does not move it."""
    assert ratio([1.0, 10.0, 100.0], [2.0, 20.0, 200.0])["ratio"] == pytest.approx(0.5)


def test_unknown_peers_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="ddp"):
        bench_step(("dpp",))
    with pytest.raises(ConfigError, match="steps and ranks"):
        bench_step(("ddp",), steps=0)
