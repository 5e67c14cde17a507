"""`podium bench uneven`: the throughput of uneven machines together, beside the sum of what each reaches alone.

`rows`, one per mix of machines, strategy and balancer:

    samples_per_second         over the steps after the first ones, in which a balancer learns
    ideal_samples_per_second   the sum over workers of what each reaches alone, on the whole global batch
    share_of_ideal             the first over the second; the ideal exchanges nothing, so no run can reach it
    against_equal              the throughput over that of the equal split under the same strategy
    shares, changes            how the last step was divided, and how often the division changed
    pass_ms, wait_ms           a step's computing and waiting time, by worker

Virtual mixes are deterministic, so one run is enough. A sample takes 0.4 ms at speed 1, a pass 0.5 ms more, a global
step has 256 samples, links have 1 Gbit/s and a latency of 50 us, and the model has 88 kB of parameters in buckets of
16 kB: without overlap, an exchange by ring would take 1 to 3 % of an ideal step, an exchange with one server 4 to 11 %.
Servers have their own nodes. The ideal follows from the cluster.

The real mix is two workers with one thread each, in network namespaces with links of 1 Gbit/s, and CPU quotas of 1 and
0.25 (`cpus`, in periods of 10 ms): they need that many free cores; `real_cpus` sets another quota of the fast one. A
global step has 12,288 samples, so that a pass takes more than 100 ms; the model's gradients, 550 kB in buckets of 128
kB, take 4 ms on the wire, and processor time, of which the slow worker has little. The ideal is measured: each worker
alone on its node, in the same round. `ddp` is DistributedDataParallel with its equal split, the same model and number
of samples, in namespaces and under quotas like those; its batch is in memory, while Podium gathers one for each step.
In each round all contenders are measured, in an order that rotates; ratios are taken round by round, with intervals.
`busy_cpus` is how many of the machine's `cores` were busy in each round, with any process: where other processes take
the cores of the quotas, speeds change from run to run, and no division is right. A row that cannot be measured has the
reason in `why_absent`.

`slow_down`: four equal workers in virtual time, one of which becomes 4 times slower and recovers.
`steps_to_90_percent_after_slowdown` counts the steps after the change up to the first from which on every step has at
least 90 % of the new ideal; `..._after_recovery` likewise. None: never.

`noise`: passes that vary by 20 % of their time, 300 steps. A step that waits for the slowest of several such passes
stays below the ideal with every division; `share_of_known_speeds` is the throughput over that of shares fixed by the
true speeds, under the same noise.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from podium.balance import BALANCERS, find_balancer
from podium.config import parse_spec
from podium.errors import ConfigError
from podium.lab.bench.harness import check_names
from podium.lab.bench.uneven_real import REAL_BUCKET, Setting, real_rows
from podium.lab.bench.uneven_runs import EQUAL, EQUAL_FINISH, MBIT, SLOWER
from podium.lab.bench.uneven_virtual import (
    VIRTUAL_BUCKET,
    VIRTUAL_TASK,
    noise_rows,
    slow_down_row,
    speeds_of,
    virtual_rows,
)

PEERS = ("ddp",)
MIXES = ("2:1", "4:1", "4:2:1:1")
STRATEGIES = (
    "all-reduce",
    "all-reduce:collective=ring",
    "parameter-server:servers=1",
    "parameter-server:servers=2",
)
REAL_STRATEGIES = ("all-reduce", "parameter-server:servers=1")
_BALANCES = ("equal", "proportional", "equal-finish", "steal")
_ROUNDS = 3


def bench_uneven(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    mixes: tuple[str, ...] = MIXES,
    strategies: tuple[str, ...] = STRATEGIES,
    balances: tuple[str, ...] = (),
    steps: int = 40,
    virtual: bool = True,
    real: bool = True,
    real_strategies: tuple[str, ...] = REAL_STRATEGIES,
    real_balances: tuple[str, ...] = (EQUAL, EQUAL_FINISH),
    real_steps: int = 24,
    real_batch: int = 12288,
    real_cpus: float = 1.0,
    slow_down: bool = True,
    noise: bool = True,
    noise_steps: int = 300,
) -> dict[str, Any]:
    """`rows` by mix, strategy and balancer, then `slow_down` and `noise`. The module's docstring explains each number.

    `steps`, `real_steps`: how many are measured. `balances`: by default all. `real_cpus`: the fast worker's quota; the
    slow one has a quarter of it.
    """
    balances = balances or tuple(name for name in _BALANCES if name in BALANCERS)
    _check(peers, mixes, (*balances, *real_balances), steps, real_steps, noise_steps)
    document: dict[str, Any] = {"bench": "uneven", "peers": list(peers), "rows": []}
    if virtual:
        document["virtual"] = _facts(VIRTUAL_TASK, VIRTUAL_BUCKET)
        for mix, strategy in itertools.product(mixes, strategies):
            document["rows"] += virtual_rows(mix, strategy, balances, steps)
    if real:
        cpus = {"fast": real_cpus, "slow": real_cpus / SLOWER}
        wanted = (real_strategies, real_balances, tuple(peers))
        setting = Setting(*wanted, steps=real_steps, batch=real_batch, cpus=cpus, rounds=rounds or _ROUNDS)
        document["real"] = {
            **_facts(setting.task, REAL_BUCKET),
            "cpus": cpus,
            "cores": os.cpu_count(),
            "rounds": setting.rounds,
        }
        document["rows"] += real_rows(setting)
    following = [balance for balance in balances if balance != EQUAL]
    if slow_down:
        document["slow_down"] = [slow_down_row(balance) for balance in following]
    if noise:
        document["noise"] = [row for mix in ("1:1:1:1", "4:2:1:1") for row in noise_rows(mix, following, noise_steps)]
    return {**document, **_summary(document["rows"])}


def _check(peers: Sequence[str], mixes: Sequence[str], balances: Sequence[str], *counts: int) -> None:
    check_names("peer of bench uneven", peers, PEERS)
    for mix in mixes:
        speeds_of(mix)
    for balance in balances:
        find_balancer(parse_spec(balance, "balance")[0])
    if min(counts) < 2:
        raise ConfigError(f"bench uneven: steps must be at least 2, got {min(counts)}")


def _facts(task: Mapping[str, Any], bucket_bytes: int) -> dict[str, Any]:
    return {"task": "wide-mlp", **task, "bucket_bytes": bucket_bytes, "mbit": MBIT}


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The least share of the ideal, by world and balancer."""
    least: dict[str, dict[str, float]] = {}
    for row in rows:
        if "share_of_ideal" in row:
            name = row["balance"] if row["strategy"] != "ddp" else "ddp"
            world = least.setdefault(row["world"], {})
            world[name] = min(world.get(name, float("inf")), row["share_of_ideal"])
    return {"least_share_of_ideal": least}
