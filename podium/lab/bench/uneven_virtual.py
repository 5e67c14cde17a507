"""`podium bench uneven` in virtual time: mixes of machines, a worker that slows down and recovers, and noise."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from podium.errors import ConfigError
from podium.lab.bench.uneven_runs import (
    EQUAL,
    LEARNS_STEPS,
    OTHERS_STEPS,
    SLOWER,
    Run,
    node_lines,
    run_training,
    warm_steps,
)
from podium.launch.clusters.description import Cluster

BATCH = 256
VIRTUAL_TASK = {"features": 32, "width": 128, "depth": 2, "samples": 1024, "batch_size": BATCH, "lr": 1e-3}
VIRTUAL_BUCKET = 16 << 10
_SECONDS_PER_SAMPLE = 4e-4
_JITTER = 0.2
_NEAR = 0.9


def speeds_of(mix: str) -> tuple[float, ...]:
    """`4:2:1:1` as speeds, of which the first is 1."""
    try:
        parts = [float(part) for part in mix.split(":")]
    except ValueError:
        parts = []
    if len(parts) < 2 or min(parts) <= 0:
        raise ConfigError(f"bench uneven: a mix must be two or more numbers above 0, such as 4:2:1:1, got {mix!r}")
    return tuple(part / parts[0] for part in parts)


def _cluster(speeds: Sequence[float], *, jitter: float = 0.0, changes: Sequence[tuple[float, float]] = ()) -> str:
    """A node per worker and two for servers; `changes`: (seconds, new speed) of the last worker."""
    lines = ["[cluster]", f"jitter = {jitter}", f"seconds_per_sample = {_SECONDS_PER_SAMPLE}"]
    names = [f"worker-{n}" for n in range(len(speeds))]
    for name, speed in zip((*names, "server-0", "server-1"), (*speeds, 1.0, 1.0), strict=True):
        lines += node_lines(name, speed=speed)
    for at_s, speed in changes:
        lines += ["[[change]]", f'node = "{names[-1]}"', f"at_s = {at_s}", f"speed = {speed}"]
    return "\n".join([*lines, "[placement]", f"workers = {names}", "servers = ['server-0', 'server-1']", ""])


def _alone(speed: float) -> float:
    """Samples per second of one worker alone with the whole global batch, in virtual time."""
    return speed * BATCH / (Cluster.seconds_per_step + BATCH * _SECONDS_PER_SAMPLE)


def _virtual(cluster: str, speeds: Sequence[float], strategy: str, balance: str, steps: int, **options: Any) -> Run:
    return run_training(
        cluster,
        strategy,
        balance,
        warm_steps(balance),
        steps,
        VIRTUAL_BUCKET,
        workers=len(speeds),
        task_options=VIRTUAL_TASK,
        launcher="virtual",
        **options,
    )


def virtual_rows(mix: str, strategy: str, balances: Sequence[str], steps: int) -> list[dict[str, Any]]:
    speeds = speeds_of(mix)
    ideal = sum(map(_alone, speeds))
    rows = []
    for balance in balances:
        run = _virtual(_cluster(speeds), speeds, strategy, balance, steps)
        row: dict[str, Any] = {"mix": mix, "world": "virtual", "strategy": strategy, "balance": balance}
        rows.append({**row, **_against(run.samples_per_second, ideal), **run.facts})
    equal = next((row["samples_per_second"] for row in rows if row["balance"] == EQUAL), None)
    if equal is not None:
        for row in rows:
            row["against_equal"] = row["samples_per_second"] / equal
    return rows


def _against(found: float, ideal: float) -> dict[str, float]:
    return {"samples_per_second": found, "ideal_samples_per_second": ideal, "share_of_ideal": found / ideal}


def slow_down_row(balance: str) -> dict[str, Any]:
    """One of four equal workers becomes slower, and recovers."""
    speeds = (1.0, 1.0, 1.0, 1.0)
    before, after = sum(map(_alone, speeds)), sum(map(_alone, (1.0, 1.0, 1.0, 1 / SLOWER)))
    batch = BATCH
    slower_s = 40 * batch / before  # after 40 steps at most; recovered after 80 more at most
    recovers_s = slower_s + 80 * batch / after
    cluster = _cluster(speeds, changes=((slower_s, 1 / SLOWER), (recovers_s, 1.0)))
    run = _virtual(cluster, speeds, "all-reduce", balance, 200)
    ends = run.ends_s
    return {
        "balance": balance,
        "workers": len(speeds),
        "slower_at_s": slower_s,
        "recovers_at_s": recovers_s,
        "steps_to_90_percent_after_slowdown": steps_until_near(ends, batch, after, slower_s, recovers_s),
        "steps_to_90_percent_after_recovery": steps_until_near(ends, batch, before, recovers_s),
        "share_of_ideal_after_slowdown": _share_at_end(ends, batch, after, recovers_s),
        "share_of_ideal_after_recovery": _share_at_end(ends, batch, before, ends[-1]),
        "changes": [{"step": row["step"], "after": row["after"]} for row in run.changes],
    }


def steps_until_near(
    ends_s: Sequence[float], batch: int, ideal: float, after_s: float, until_s: float = float("inf")
) -> int | None:
    """The number, counted from `after_s`, of the first step from which on all are near the ideal.

    `ends_s`: when each step ended, and so the next began. None if the last step before `until_s` is not near.
    """
    found = [
        batch / (end - began) >= _NEAR * ideal
        for began, end in itertools.pairwise((0.0, *ends_s))
        if began >= after_s and end <= until_s
    ]
    if not found or not found[-1]:
        return None
    return next((n for n in range(len(found), 0, -1) if not found[n - 1]), 0) + 1


def _share_at_end(ends_s: Sequence[float], batch: int, ideal: float, until_s: float) -> float:
    """The throughput of the last ten steps before `until_s`, over the ideal."""
    last = [end for end in ends_s if end <= until_s][-11:]
    return batch * (len(last) - 1) / (last[-1] - last[0]) / ideal


def noise_rows(mix: str, balances: Sequence[str], steps: int) -> list[dict[str, Any]]:
    speeds = speeds_of(mix)
    cluster, ideal = _cluster(speeds, jitter=_JITTER), sum(map(_alone, speeds))
    known = _virtual(cluster, speeds, "all-reduce", EQUAL, steps - OTHERS_STEPS, shares=speeds).samples_per_second
    rows = []
    for balance in balances:
        run = _virtual(cluster, speeds, "all-reduce", balance, max(2, steps - warm_steps(balance)))
        found = run.samples_per_second
        late = sum(row["step"] > LEARNS_STEPS for row in run.changes)
        rows.append(
            {
                "mix": mix,
                "jitter": _JITTER,
                "steps": steps,
                "balance": balance,
                **_against(found, ideal),
                "share_of_known_speeds": found / known,
                "changes_after_step_30": late,
                **run.facts,
            }
        )
    return rows
