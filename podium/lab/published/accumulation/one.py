"""One run: the model's stand-in in virtual time, or the model itself on shaped links."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import podium
from podium.errors import PodiumError
from podium.lab.published.accumulation.design import EPOCH
from podium.lab.published.accumulation.rows import failure
from podium.lab.study.store import Row, write_whole
from podium.records.recorder import read_records, to_json


def run_one(who: Row, options: Mapping[str, Any], cluster: str) -> Row:
    """Train as asked, on the nodes that the cluster file's text describes; a run that fails is a row that says so."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="podium-accumulation-") as scratch:
        file, run_dir = Path(scratch) / "cluster.toml", Path(scratch) / "run"
        file.write_text(cluster, encoding="utf-8")
        try:
            result = podium.train(**options, cluster=str(file), run_dir=str(run_dir))
            records = list(read_records(run_dir))
        except PodiumError as error:
            return failure(who, f"{type(error).__name__}: {error}")
    steps = [row for row in records if row["kind"] == "step"]
    begin = next(row for row in records if row["kind"] == "begin")
    mine = sorted((row["step"], row["step_ns"], row["sent"]) for row in steps if row["rank"] == 0)
    return {
        **who,
        "status": "finished",
        "seconds": _short(result.seconds),
        "epoch_s": _short(result.seconds / result.samples * EPOCH),
        "samples": result.samples,
        "steps": result.steps,
        "workers": result.workers,
        "nodes": result.workers,
        "launcher": result.launcher,
        "parameters": begin["parameters"],
        "step_s": [_short(ns / 1e9) for _, ns, _ in mine],
        "step_bytes": mine[-1][2],
        "sent_bytes": result.sent_bytes,
        "wait_share": _short(result.wait_share),
        "setup_s": _short(min(row["t_ns"] - row["step_ns"] for row in steps) / 1e9),
        "wall_s": round(time.monotonic() - began, 1),
    }


def _short(value: float) -> float:
    return float(f"{value:.6g}")


def main(folder: Path) -> None:
    """What a process with a few runs does: `asked.json` to `row.json`."""
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    rows = [run_one(one["who"], one["options"], one["cluster"]) for one in asked["runs"]]
    write_whole(folder / "row.json", to_json({"rows": rows}))
