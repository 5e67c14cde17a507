"""One run, in the process that was started for it."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import podium
from podium.errors import PodiumError
from podium.lab.published.rates.rows import failure, identity
from podium.lab.report.format import ABSENT
from podium.lab.study.store import Row, write_whole
from podium.records.manifest import versions
from podium.records.recorder import read_records, to_json

if TYPE_CHECKING:
    from podium.exchange.reducing import Packing


def train_one(options: Mapping[str, Any], folder: Path) -> Row:
    """One run in this process, its records under `folder`; a run that fails is a row that says so."""
    from podium.exchange.reducing import make_packing
    from podium.task import load_task

    began = time.monotonic()
    try:
        task = load_task(options["task"], options["task_options"], options["data_dir"])
        data, packing = task.data(), make_packing(options["codec"])
        fixed: dict[str, Any] = {"strategy": "all-reduce", "launcher": "virtual", "threads": 1, "eval_every": 0}
        result = podium.train(**options, **fixed, run_dir=str(folder / "run"))
    except PodiumError as error:
        return failure(options, f"{type(error).__name__}: {error}")
    return {
        **identity(options),
        "status": "finished",
        "accuracy": result.metrics["accuracy"],
        "loss": result.loss,
        "sent_bytes": result.sent_bytes,
        "feedback": _feedback(packing),
        "reduction": packing.codec.reduction,
        "replicas_equal": len(set(result.param_hash.values())) == 1,
        "parameters": _parameters(folder / "run"),
        "train": len(data.train),
        "test": len(data.test),
        "batch_size": task.batch_size,
        "steps": result.steps,
        "wall_s": round(time.monotonic() - began, 1),
        "versions": versions(),
    }


def _feedback(packing: Packing) -> str:
    if packing.codec.exact:
        return ABSENT  # nothing is lost that could be fed back
    return "own" if packing.codec.keeps_residual else "on" if packing.feedback else "off"


def _parameters(run_dir: Path) -> int | None:
    begins = (row for row in read_records(run_dir) if row["kind"] == "begin")
    return next(begins, {}).get("parameters")


def main(folder: Path) -> None:
    """What the process of one run does."""
    options = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    write_whole(folder / "row.json", to_json(train_one(options, folder)))
