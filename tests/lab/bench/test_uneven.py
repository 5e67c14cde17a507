"""`podium bench uneven`: shares of the ideal, and how soon a balancer follows."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.uneven import bench_uneven
from podium.lab.bench.uneven_virtual import speeds_of, steps_until_near

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces and CPU quotas need root")
NOTHING: dict[str, Any] = {"virtual": False, "real": False, "slow_down": False, "noise": False}


def test_a_mix_is_speeds_beside_the_first() -> None:
    assert speeds_of("4:2:1:1") == (1.0, 0.5, 0.25, 0.25)
    assert speeds_of("1:2.5") == (1.0, 2.5)


@pytest.mark.parametrize("mix", ["", "4", "4:", "4:0", "4:-1", "fast:slow"])
def test_a_mix_that_is_none_is_refused(mix: str) -> None:
    with pytest.raises(ConfigError, match="a mix must be"):
        bench_uneven(mixes=(mix,), **NOTHING)


def test_unknown_peers_and_balancers_and_too_few_steps_are_refused() -> None:
    with pytest.raises(UnknownName, match="ddp"):
        bench_uneven(("dpd",), **NOTHING)
    with pytest.raises(UnknownName, match="equal-finish"):
        bench_uneven(balances=("equal-finnish",), **NOTHING)
    with pytest.raises(ConfigError, match="steps must be at least 2, got 1"):
        bench_uneven(steps=1, **NOTHING)


@pytest.mark.parametrize(
    ("step_s", "expected"),
    [
        ([1.0] * 4 + [1.0, 1.0], 1),  # never left it
        ([1.0] * 4 + [4.0, 4.0, 1.0, 1.0], 3),
        ([1.0] * 4 + [4.0, 1.0, 4.0, 1.1], 4),  # back for a moment does not count
        ([1.0] * 4 + [4.0, 1.0, 4.0], None),
        ([1.0] * 4, None),  # nothing came after
        ([4.0] * 1 + [1.0], 1),  # what was before the change does not matter
    ],
)
def test_steps_are_counted_from_the_change_to_the_first_that_stays_near(
    step_s: list[float], expected: int | None
) -> None:
    ends = [sum(step_s[: n + 1]) for n in range(len(step_s))]
    assert steps_until_near(ends, 10, ideal=10.0, after_s=4.0) == expected


def test_steps_that_end_after_the_next_change_do_not_count() -> None:
    assert steps_until_near([1, 2, 3, 7], 10, ideal=10.0, after_s=1.0) is None
    assert steps_until_near([1, 2, 3, 7], 10, ideal=10.0, after_s=1.0, until_s=4.0) == 1


def test_a_balancer_comes_near_the_ideal_where_equal_parts_wait_for_the_slowest() -> None:
    chosen: dict[str, Any] = {**NOTHING, "virtual": True, "mixes": ("4:1",), "strategies": ("all-reduce",)}
    document = bench_uneven(balances=("equal", "equal-finish"), steps=10, **chosen)
    json.dumps(document)
    equal, balanced = document["rows"]
    # Half of the samples on each: twice what the slower one does alone, of five times that.
    assert equal["share_of_ideal"] == pytest.approx(2 / 5, rel=0.02)
    assert equal["shares"] == [128, 128]
    assert equal["changes"] == 0
    assert 0.9 < balanced["share_of_ideal"] < 1
    assert sum(balanced["shares"]) == 256
    assert balanced["shares"][0] == pytest.approx(4 * balanced["shares"][1], rel=0.05)
    assert balanced["changes"] >= 1
    for row in (equal, balanced):
        assert row["share_of_ideal"] == pytest.approx(row["samples_per_second"] / row["ideal_samples_per_second"])
        assert row["against_equal"] == pytest.approx(row["samples_per_second"] / equal["samples_per_second"])
        assert row["step_ms"] >= max(row["pass_ms"])
    assert equal["wait_ms"][0] > equal["pass_ms"][0]  # it waits for three quarters of the step
    assert document["least_share_of_ideal"]["virtual"]["equal-finish"] == balanced["share_of_ideal"]


def test_when_a_worker_becomes_slower_and_recovers_the_ideal_is_near_again_within_20_steps() -> None:
    (row,) = bench_uneven(balances=("equal", "equal-finish"), **{**NOTHING, "slow_down": True})["slow_down"]
    assert row["balance"] == "equal-finish"  # equal parts follow nobody
    for change in ("slowdown", "recovery"):
        assert 1 < row[f"steps_to_90_percent_after_{change}"] <= 20
        assert row[f"share_of_ideal_after_{change}"] >= 0.9
    slow, recovered = row["changes"][-2:]
    assert slow["after"][-1] < recovered["after"][-1]


def test_under_noise_a_division_is_held_against_the_one_by_the_real_speeds() -> None:
    rows = bench_uneven(balances=("equal-finish",), noise_steps=45, **{**NOTHING, "noise": True})["noise"]
    assert [row["mix"] for row in rows] == ["1:1:1:1", "4:2:1:1"]
    for row in rows:
        assert row["share_of_ideal"] < 1  # the slowest of four passes is above the mean
        assert row["share_of_known_speeds"] > 0.9
        assert row["changes_after_step_30"] <= row["changes"]


def test_where_there_is_no_root_the_real_rows_say_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    rows = bench_uneven(("ddp",), real_balances=("equal",), **{**NOTHING, "real": True})["rows"]
    assert {row["strategy"] for row in rows} == {"all-reduce", "parameter-server:servers=1"}
    for row in rows:
        assert row["world"] == "real"
        assert "root" in row["why_absent"]
        assert "share_of_ideal" not in row


@pytest.mark.slow
@pytest.mark.root
@needs_root
def test_the_real_mix_is_held_against_each_worker_alone_and_against_ddp() -> None:
    chosen: dict[str, Any] = {"real_strategies": ("all-reduce",), "real_balances": ("equal",), "real_batch": 2048}
    document = bench_uneven(("ddp",), rounds=1, real_steps=4, **chosen, **{**NOTHING, "real": True})
    json.dumps(document)
    ours, ddp = document["rows"]
    assert (ours["strategy"], ddp["strategy"]) == ("all-reduce", "ddp")
    assert ours["shares"] == [1024, 1024]
    alone = ours["alone_samples_per_second"]
    assert alone["slow"] < alone["fast"]
    for row in (ours, ddp):
        assert row["ideal_samples_per_second"] == pytest.approx(alone["slow"] + alone["fast"])
        assert row["share_of_ideal"] == pytest.approx(row["samples_per_second"] / row["ideal_samples_per_second"])
    assert ours["against_ddp"] == pytest.approx(ours["samples_per_second"] / ddp["samples_per_second"])
