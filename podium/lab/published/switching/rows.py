"""What a run leaves: one row of `switching.jsonl`, whether it finished or failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.errors import TrainingError
from podium.lab.published.switching.design import Cell
from podium.lab.study.store import Row, Store

Key = tuple[str, str, int]


def identity(cell: Cell, options: Mapping[str, Any]) -> Row:
    """Which run it is, and all that decides it."""
    config = {name: value for name, value in options.items() if name not in ("data_dir", "seed")}
    machines = {"cluster": cell.setting.machines.as_toml()}
    return {"setting": cell.setting.name, "cell": cell.arm.name, "seed": cell.seed, "config": {**config, **machines}}


def failure(who: Mapping[str, Any], error: str) -> Row:
    return {**who, "status": "failed", "accuracy": None, "error": error}


def is_final(row: Mapping[str, Any]) -> bool:
    """Whether this run need not be tried again: it finished, or training itself could not go on."""
    return row["status"] == "finished" or str(row.get("error")).startswith(f"{TrainingError.__name__}:")


def open_store(out: Path) -> Store:
    store = Store(out)
    store.results = out / "switching.jsonl"
    return store


def key(row: Mapping[str, Any]) -> Key:
    return str(row["setting"]), str(row["cell"]), int(row["seed"])


def accuracies(rows: Sequence[Row]) -> dict[Key, float]:
    """Final accuracy of every run that need not be tried again; 0 where training could not go on."""
    return {key(row): float(row["accuracy"] or 0.0) for row in rows if is_final(row)}


def told(row: Mapping[str, Any]) -> str:
    name = f"{row['setting']}, {row['cell']}, seed {row['seed']}"
    if row["status"] == "failed":
        return f"{name}: failed: {row['error']}"
    switched = "".join(f", switched at epoch {one['epoch']:.2f}" for one in row["switches"])
    clock = f"{row['seconds']:,.1f} virtual s, took {row['wall_s']:.0f} s"
    return f"{name}: {100 * row['accuracy']:.2f} %{switched}, {clock}"
