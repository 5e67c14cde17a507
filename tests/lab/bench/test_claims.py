"""`podium bench claims`: simulated studies go through the code that reports use, and what is planted is found."""

from __future__ import annotations

import numpy as np
import pytest

from podium.errors import ConfigError, UnknownName
from podium.lab.bench.claims import SHAPES, _scales, bench_claims, factor_rows, strategy_rows
from podium.lab.report.answer import answer
from podium.lab.stats.statistics import contrasts


def generator(key: int = 0) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=key))


@pytest.mark.slow
def test_rates_have_their_counts_interval_and_nominal_value() -> None:
    document = bench_claims(repetitions=12, shapes="normal")
    assert document["repetitions"] == 12 and len(document["rows"]) == 20
    for row in document["rows"]:
        assert row["rate"] == row["found"] / 12 and row["low"] <= row["rate"] <= row["high"]
        power = 0.7 if "× workers planted" in row["case"] else 0.8  # the interaction's correction costs some
        assert row["nominal"] == pytest.approx(0.05 if row["wanted"] == "at most" else power, abs=1e-3)
        assert row["holds"], row
    planted = [row["rate"] for row in document["rows"] if row["wanted"] == "at least"]
    false = [row["rate"] for row in document["rows"] if row["wanted"] == "at most"]
    assert np.mean(planted) > 0.6 and np.mean(false) < 0.2


def test_the_same_seed_gives_the_same_rates() -> None:
    one, other = (bench_claims(repetitions=2, shapes="heavy-tailed", seed=s) for s in (3, 3))
    assert one == other


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_has_the_same_variance_in_every_shape(shape: str) -> None:
    rows = strategy_rows(shape, [0.0] * 3, 4000, generator())
    values = np.array([[r["metrics"]["accuracy"] for r in rows if r["cell"] == cell] for cell in ("s0", "s1", "s2")])
    noise = values - values.mean(axis=0)  # without what a seed does to all
    assert float((noise**2).sum() / (2 * 4000)) == pytest.approx(0.002**2, rel=0.25)
    spread = noise.std(axis=1)
    assert (spread[2] > 1.5 * spread[0]) == (shape == "unequal") == (_scales(shape, 3)[0] != 1)


def test_runs_of_a_seed_are_alike_so_that_an_unpaired_test_would_find_nothing() -> None:
    """Seeds that belong to each other by chance lose what pairing gains."""
    hits = {"paired": 0, "mixed": 0}
    for key in range(15):
        rows = strategy_rows("normal", [0.0, 2.4], 5, generator(key))
        mixed = [r | {"seed": (r["seed"] + 2) % 5 if r["cell"] == "s1" else r["seed"]} for r in rows]
        for name, some in (("paired", rows), ("mixed", mixed)):
            hits[name] += contrasts(some, "accuracy", None)[0].distinct
    assert hits["paired"] >= 9 and hits["mixed"] <= 6


def test_rows_are_such_as_reports_read() -> None:
    none = answer(strategy_rows("normal", [0.0] * 3, 5, generator(1)))
    some = answer(strategy_rows("normal", [0.0, 0.0, 9.0], 5, generator(1)))
    assert "Final accuracy: no difference that we can detect" in none
    assert "Final accuracy: best is s2" in some
    cells = {row["cell"] for row in factor_rows("normal", np.zeros((2, 3)), 2, generator())}
    assert len(cells) == 6 and "strategy=all-reduce, workers=2" in cells


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UnknownName, match="shape of noise"):
        bench_claims(shapes="normal,cauchy")
    with pytest.raises(UnknownName, match="peer"):
        bench_claims(["ddp"])
    with pytest.raises(ConfigError, match="seeds at least 2, got 5 and 1"):
        bench_claims(repetitions=5, seeds=1)
