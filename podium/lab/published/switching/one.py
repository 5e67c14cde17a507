"""One run, in the process that was started for it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import podium
from podium.config import RunResult
from podium.errors import PodiumError
from podium.lab.published.switching.rows import failure
from podium.lab.study.store import Row, write_whole
from podium.records.manifest import versions
from podium.records.recorder import Record, read_records, to_json
from podium.task import load_task

_RULE = ("rule", "in_force", "epoch", "seconds", "value", "threshold", "after_switch")


def train_one(who: Row, options: Mapping[str, Any], folder: Path) -> Row:
    """One run in this process, its records under `folder`; a run that fails is a row that says so."""
    began = time.monotonic()
    cluster = folder / "cluster.toml"
    cluster.write_text(who["config"]["cluster"], encoding="utf-8")
    fixed: dict[str, Any] = {"launcher": "virtual", "threads": 1, "cluster": str(cluster), "deadline_s": 3600.0}
    try:
        data = load_task(options["task"], options["task_options"], options["data_dir"]).data()
        result = podium.train(**options, **fixed, run_dir=str(folder / "run"))
    except PodiumError as error:
        return failure(who, f"{type(error).__name__}: {error}")
    facts = _facts(result, list(read_records(folder / "run")), len(data.train))
    sizes = {"train": len(data.train), "test": len(data.test)}
    later = {"later_ms": _later_ms(read_records(folder / "run"))} if "balance" in options else {}
    return {**who, **facts, **later, **sizes, "wall_s": round(time.monotonic() - began, 1)}


def _facts(result: RunResult, records: Sequence[Record], epoch: int) -> Row:
    steps = [row for row in records if row["kind"] == "step" and row["samples"]]
    return {
        "status": "finished",
        "accuracy": result.metrics["accuracy"],
        "loss": _short(result.loss),
        "seconds": round(result.seconds, 3),
        "steps": result.steps,
        "samples": result.samples,
        "sent_bytes": result.sent_bytes,
        "exchanges": sum(bool(row["sent"]) for row in steps if row["rank"] == 0),
        "wait_share": round(result.wait_share, 4),
        "staleness": {name: _short(value) for name, value in result.staleness.items()},
        "updates": result.updates,
        "audit": dict(result.audit),
        "history": {
            "epoch": [round(point["epoch"], 3) for point in result.history],
            "seconds": [round(point["seconds"], 2) for point in result.history],
            "loss": [_short(point["loss"]) for point in result.history],
            "accuracy": [point["accuracy"] for point in result.history],
        },
        "train_loss": [_short(_mean_loss(steps, first, epoch)) for first in range(0, result.samples, epoch)],
        "switches": [{**one, "loss_after": _mean_loss(steps, one["position"], epoch)} for one in result.switches],
        "rules": [_rule(rule) for rule in result.rules],
        "versions": versions(),
    }


def _later_ms(records: Iterable[Record]) -> float:
    """Milliseconds per global step over the second half of them: workers first learn how to divide a step."""
    ends = [row["t_ns"] for row in records if row["kind"] == "step" and row["rank"] == 0]
    half = len(ends) // 2
    return float(round((ends[-1] - ends[half]) / (len(ends) - 1 - half) / 1e6, 3))


def _mean_loss(steps: Sequence[Record], first: int, samples: int) -> float | None:
    """Mean training loss of so many samples from a place in the order on, whoever trained on them."""
    mine = [row for row in steps if first <= row["first"] < first + samples]
    count = sum(row["samples"] for row in mine)
    return sum(row["loss"] * row["samples"] for row in mine) / count if count else None


def _rule(rule: Mapping[str, Any]) -> Row:
    """When a rule fired or would have fired; of one in force, its readings too, as pairs of epoch and value."""
    found = {name: rule[name] for name in _RULE}
    if rule["in_force"]:
        found["readings"] = [[round(one["epoch"], 3), _short(one["value"])] for one in rule["readings"]]
    return found


def _short(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.5g}")


def main(folder: Path) -> None:
    """What the process of one run does."""
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    write_whole(folder / "row.json", to_json(train_one(asked["who"], asked["options"], folder)))
