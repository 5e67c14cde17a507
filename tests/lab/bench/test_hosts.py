"""`podium bench hosts`: the same work on both sides of two hosts, and a clear word where hosts cannot be made."""

from __future__ import annotations

import os

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.hosts import bench_hosts
from podium.lab.bench.peers.ddp import DDP_OPTIONS
from podium.testing.hosts import why_not

ROOT = pytest.mark.skipif(bool(why_not()), reason=why_not() or "-")


@ROOT
@pytest.mark.root
@pytest.mark.slow
def test_podium_and_ddp_do_the_same_work_across_two_hosts() -> None:
    document = bench_hosts(
        rounds=2,
        tasks=("digits-mlp",),
        gbits=(0.0,),
        ranks_per_host=(1, 2),
        steps=1,
        launchers=("local",),
        start_rounds=1,
    )
    assert [row["ranks_per_host"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        assert row["difference"] < 1e-6
        low, high = row["ratio_interval"]
        assert 0 < low <= row["ratio"] <= high
        assert row["against"] in ("ddp", "ddp_bucket_views")
        assert row["rounds"] == 2 and set(row["step_ms"]) == {"podium", "podium_tls", *DDP_OPTIONS, "barrier_only"}
        assert set(row["exchange_ms"]) == {"podium", "podium_tls", *DDP_OPTIONS}
    (started,) = document["start_up"]
    assert started["launcher"] == "local" and started["ranks"] == 8 and started["seconds"]["min"] > 0


@ROOT
@pytest.mark.root
def test_without_peers_only_podium_is_measured_over_a_shaped_link() -> None:
    options = {"tasks": ("digits-mlp",), "gbits": (1.0,), "ranks_per_host": (1,), "steps": 1, "launchers": ("none",)}
    (row,) = bench_hosts(("none",), rounds=1, **options)["rows"]  # type: ignore[arg-type]  # of several types
    assert set(row["step_ms"]) == {"podium", "podium_tls", "barrier_only"} and "ratio" not in row


def test_without_root_it_says_why_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="bench hosts cannot run here: hosts need root"):
        bench_hosts(rounds=1)


def test_unknown_peers_and_impossible_sizes_are_refused() -> None:
    with pytest.raises(UnknownName, match="ddp"):
        bench_hosts(("dpp",))
    with pytest.raises(ConfigError, match="hosts must be at least 2, got 1"):
        bench_hosts(hosts=1)
    with pytest.raises(ConfigError, match="gbits must be at least 0"):
        bench_hosts(gbits=(-1.0,))
