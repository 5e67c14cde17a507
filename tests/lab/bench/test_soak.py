"""`podium bench soak`: a leak that is planted is found, and a short real run gives every row."""

from __future__ import annotations

import pytest

from podium.errors import ConfigError, PodiumError, UnknownName
from podium.lab.bench.soak import Sample, at_end, bench_soak, grown

STEPS = 300_000


def samples(**per_step: float) -> list[Sample]:
    """A run of 300 samples, 1,000 steps apart; each value starts at 100 MB and grows by so much per step."""
    rows = []
    for n in range(300):
        wobble = (n * 7919) % 13 * 4096  # allocators move by pages
        values = {name.replace("_", " "): int(100e6 + slope * n * 1000 + wobble) for name, slope in per_step.items()}
        rows.append(Sample(n * 0.5, n * 1000, values))
    return rows


def row_of(found: list[dict[str, object]], what: str) -> dict[str, object]:
    return next(row for row in found if row["what"] == what)


def test_a_leak_of_one_small_object_per_step_is_found() -> None:
    found = grown(samples(memory_of_rank_0=56, memory_of_rank_1=0), STEPS)
    leaking, flat = row_of(found, "memory of rank 0"), row_of(found, "memory of rank 1")
    assert leaking["per_step"] == pytest.approx(56, rel=0.05) and leaking["holds"] is False
    assert flat["holds"] is True


def test_what_fills_up_in_the_first_third_and_then_stays_is_flat() -> None:
    filling = [
        s._replace(values={"memory of launcher": min(s.steps, STEPS // 4) * 100 + 1_000_000})
        for s in samples(memory_of_launcher=0)
    ]
    assert row_of(grown(filling, STEPS), "memory of launcher")["holds"] is True


def test_open_files_may_not_grow_at_all() -> None:
    leaking = [s._replace(values={"open files of rank 0": 20 + s.steps // 10_000}) for s in samples(x=0)]
    assert row_of(grown(leaking, STEPS), "open files of rank 0")["holds"] is False


def test_snapshots_that_remember_every_push_are_found() -> None:
    growing = [s._replace(values={"disk of server snapshots": 2000 + s.steps * 16}) for s in samples(x=0)]
    assert row_of(grown(growing, STEPS), "disk of server snapshots")["holds"] is False


def test_records_are_kept_and_their_growth_is_linear_or_not() -> None:
    linear = [s._replace(values={"disk of records": s.steps * 200}) for s in samples(x=0)]
    square = [s._replace(values={"disk of records": s.steps**2 // 1000}) for s in samples(x=0)]
    assert row_of(grown(linear, STEPS), "disk of records")["second_half_to_first"] == pytest.approx(1.0)
    assert float(str(row_of(grown(square, STEPS), "disk of records")["second_half_to_first"])) > 1.3


def test_a_launcher_that_loads_all_records_at_the_end_is_found() -> None:
    run = samples(memory_of_launcher=0)
    after = [Sample(200.0, run[-1].steps, {"memory of launcher": int(100e6 + 600_000 * 2200)})]
    assert at_end([*run, *after], 600_000)["holds"] is False
    assert at_end([*run, run[-1]], 600_000)["holds"] is True


@pytest.mark.slow
def test_a_short_run_has_a_row_for_every_process_and_folder() -> None:
    document = bench_soak(steps=1200, strategies=("parameter-server:mode=async",), by_workers=(), every_s=0.02)
    [arm] = document["arms"]
    assert arm["records"] > 1200 and "by_workers" not in document
    seen = {row["what"] for row in arm["rows"]}
    assert {f"memory of {name}" for name in ("launcher", "rank 0", "rank 1", "rank 2")} <= seen
    assert {"disk of records", "disk of server snapshots", "disk of checkpoints", "disk of logs"} <= seen


@pytest.mark.parametrize(
    "wrong", [{"steps": 5}, {"workers": 0}, {"by_workers": (0, 2)}, {"limit_s": 0.0}, {"every_s": 0.0}]
)
def test_sizes_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="bench soak"):
        bench_soak(**wrong)  # type: ignore[arg-type]


def test_there_are_no_peers_and_no_rounds() -> None:
    with pytest.raises(UnknownName, match="peer"):
        bench_soak(("ddp",))
    with pytest.raises(ConfigError, match="once"):
        bench_soak((), 3)


def test_a_run_that_fails_says_what_it_printed() -> None:
    with pytest.raises(PodiumError, match="no-such-strategy"):
        bench_soak(steps=100, strategies=("no-such-strategy",), by_workers=())


def test_a_run_that_takes_too_long_is_ended() -> None:
    with pytest.raises(PodiumError, match="limit_s"):
        bench_soak(steps=10_000_000, strategies=("all-reduce",), by_workers=(), limit_s=1.0)
