"""What a run leaves: one row of `rates.jsonl`, whether it finished or failed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.errors import TrainingError
from podium.lab.study.store import Row, Store


def failure(options: Mapping[str, Any], error: str) -> Row:
    return {**identity(options), "status": "failed", "accuracy": None, "sent_bytes": None, "error": error}


def is_final(row: Mapping[str, Any]) -> bool:
    """Whether this run need not be tried again: it finished, or training itself could not go on."""
    return row["status"] == "finished" or str(row.get("error")).startswith(f"{TrainingError.__name__}:")


def open_store(out: Path) -> Store:
    store = Store(out)
    store.results = out / "rates.jsonl"
    return store


def identity(options: Mapping[str, Any]) -> Row:
    same = {name: options[name] for name in ("task", "seed", "epochs", "workers", "device", "task_options")}
    return {"cell": options["codec"], **same}


def key(row: Mapping[str, Any]) -> tuple[str, str, int]:
    return str(row["task"]), str(row["cell"]), int(row["seed"])


def told(row: Mapping[str, Any]) -> str:
    name = f"{row['task']} {row['cell']} seed {row['seed']}"
    if row["status"] == "failed":
        return f"{name}: failed: {row['error']}"
    return f"{name}: {100 * row['accuracy']:.2f} %, {row['sent_bytes'] / 1e6:,.1f} MB, {row['wall_s']:.0f} s"
