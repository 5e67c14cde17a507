"""`podium bench sweep` on the CPU: every arm has a row, and says what it measured or why it could not."""

from __future__ import annotations

import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.sweep import bench_sweep


@pytest.mark.slow
def test_rows_hold_what_was_measured_and_what_is_absent() -> None:
    found = bench_sweep(
        rounds=1, tasks="digits-mlp", trials="4", arms="eager,graph,fused,processes,mps", seconds=0.02, device="cpu"
    )
    rows = {row["executor"]: row for row in found["rows"]}
    for arm in ("eager", "fused", "processes"):
        assert rows[arm]["us_per_model_step"] > 0 and rows[arm]["start_s"] > 0 and not rows[arm]["why_absent"]
        assert rows[arm]["joules_per_trial"] is None and rows[arm]["reading"]["absent"]["energy_j"]
    for arm in ("graph", "mps"):
        assert rows[arm]["us_per_model_step"] is None and "GPU" in rows[arm]["why_absent"]
    assert rows["fused"]["width"] == 4
    (cell,) = found["cells"]
    best = min(row["us_per_model_step"] for row in rows.values() if row["us_per_model_step"])
    assert cell["best_us_per_model_step"] == best
    chosen = rows[cell["auto_arm"]]["us_per_model_step"]
    assert cell["auto_regret"] == pytest.approx(chosen / best - 1)


def test_an_arm_that_nobody_knows_and_a_window_too_short_are_refused() -> None:
    with pytest.raises(UnknownName, match="fusd"):
        bench_sweep(arms="fusd")
    with pytest.raises(ConfigError, match="at least 60 seconds"):
        bench_sweep(energy_s=5.0)
