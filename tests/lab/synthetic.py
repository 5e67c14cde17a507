"""Result rows as runs would leave them, made from a formula."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from podium.lab.study.parts import this_machine
from podium.lab.study.store import Row, Store
from podium.lab.study.study import strategies_study
from podium.records.staleness import tables

STRATEGIES = ["solo", "all-reduce", "parameter-server:mode=async"]


def make_row(
    cell: str, seed: int, *, seconds: float = 1.0, final: float = 0.97, metric: str = "accuracy", **fields: Any
) -> Row:
    """A finished run of eight validations, whose metric ends at `final` after `seconds`."""
    history = []
    for epoch in range(1, 9):
        gap = 0.6 * (math.exp(-0.6 * epoch) - math.exp(-0.6 * 8))
        shown = final + gap if metric in ("mae", "mse") else final - gap
        point = {"step": 10 * epoch, "epoch": epoch, "samples": 640 * epoch, "seconds": seconds * epoch / 8}
        history.append({**point, "loss": 2 * math.exp(-0.4 * epoch), metric: shown})
    row = {
        "run_dir": f"runs/{cell}-{seed}",
        "status": "finished",
        "task": "digits-mlp",
        "strategy": cell,
        "workers": 1 if cell == "solo" else 2,
        "seed": seed,
        "launcher": "local",
        "metrics": {metric: final},
        "loss": history[-1]["loss"],
        "param_hash": {"0": "00"},
        "steps": 80,
        "samples": 5120,
        "epochs": 8.0,
        "seconds": seconds,
        "samples_per_s": 5120 / seconds,
        "sent_bytes": 0 if cell == "solo" else 4_000_000,
        "step_ms": {"p50": 1.0, "p90": 2.0},
        "wait_share": 0.0 if cell == "solo" else 0.25,
        "staleness": {"mean": 1.0, "max": 3.0, "count": 80.0} if "async" in cell else {},
        "history": history,
        "lost": [],
        "model": "",
        "cell": cell,
        "parameters": 9610,
    }
    return {**row, **fields}


def stale(workers: int = 2, *, most: int = 3, bound: int | None = None, dropped: int = 0) -> dict[str, Any]:
    """A row's `staleness_by`: two servers with one range each, every worker's updates from 0 to `most` stale."""
    facts = {"first": False, "range": 0, "lead": 2}
    records: list[Row] = [
        {"kind": "update", "rank": server, "worker": worker, "staleness": staleness, **facts}
        for server in (workers, workers + 1)
        for worker in range(workers)
        for staleness in range(most + 1)
    ]
    records += [{"kind": "dropped", "rank": workers, "worker": 0, "lease": lease} for lease in range(dropped)]
    return tables(records, bound).to_dict()


def phased(*values: float | None, threshold: float = 0.1, latest: bool = False) -> dict[str, Any]:
    """A row's `switches` and `rules`: one value of the rule per epoch, then a switch; `latest`: without its firing."""
    epoch, last = len(values), values[-1]
    readings = [
        {"phase": 0, "step": 10 * k, "epoch": float(k), "value": v, "threshold": threshold, "fires": False}
        for k, v in enumerate(values, 1)
    ]
    when = {"step": 10 * epoch, "epoch": float(epoch), "seconds": 0.1 * epoch}
    cost = {"drain": 0.5, "home": 1.0, "hand_over": 0.25, "begin": 2.0, "total": 3.5}
    why = {"why": "too late", "value": None} if latest else {"why": "settled", "value": last}
    change = {"before": "all-reduce until plateau", "after": "parameter-server:mode=async", "rule": "plateau"}
    ends = {"value": last, "threshold": threshold, "after_switch": False}
    fired = {"step": None, "epoch": None, "seconds": None} if latest else when
    early = {"step": 3, "epoch": 0.25, "seconds": 0.05, "value": 1.0, "threshold": 1.0, "after_switch": False}
    late = {**early, "step": 70, "epoch": 7.0, "seconds": 0.7, "after_switch": True}
    return {
        "switches": [{**change, **why, **when, "position": 640, "cost_ms": cost}],
        "rules": [
            {"rule": "plateau", "in_force": True, **fired, **ends, "readings": readings},
            {"rule": "share:at=0.125", "in_force": False, **early},
            {"rule": "share:at=0.5", "in_force": False, **late},
        ],
    }


def make_rows(times: dict[str, list[float]], finals: dict[str, list[float]] | None = None) -> list[Row]:
    """One row per strategy and seed, with these seconds and these final accuracies."""
    return [
        make_row(cell, seed, seconds=seconds, final=(finals or {}).get(cell, [0.97] * len(values))[seed])
        for cell, values in times.items()
        for seed, seconds in enumerate(values)
    ]


def failed_row(cell: str, seed: int, error: str = "RankFailed: rank 1 ran out of <luck>") -> Row:
    return {"cell": cell, "seed": seed, "status": "failed", "error": error, "run_dir": f"runs/{cell}-{seed}"}


def write_study(folder: Path, rows: list[Row], seeds: int = 3) -> Store:
    """A study's folder that holds these rows."""
    store = Store(folder)
    settings = {"epochs": 8, "workers": 2, "launcher": "local"}
    study = strategies_study("digits-mlp", STRATEGIES, seeds, settings)
    store.write_study(replace(study, machine=this_machine()).to_dict())
    for row in rows:
        store.append(row)
    return store
