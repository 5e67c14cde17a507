"""What the study leaves: rows of `accumulation.jsonl`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.lab.published.accumulation.design import Cell, Study
from podium.lab.published.accumulation.profile import Profile
from podium.lab.study.store import Row, Store

Key = tuple[str, str, int]
"""Part, cell, seed."""

ALONE, BESIDE = "alone", "beside"


def open_store(out: Path) -> Store:
    store = Store(out)
    store.results = out / "accumulation.jsonl"
    return store


def identity(study: Study, cell: Cell, seed: int, *, part: str, profile: str) -> Row:
    """Which run it is, and all that decides it."""
    return {
        "kind": "run",
        "part": part,
        "cell": cell.name,
        "levels": cell.levels,
        "seed": seed,
        "profile": profile,
        "passes": study.passes,
        "latency_us": study.latency_us,
        "strategy": study.strategy,
        "collective": study.collective,
    }


def failure(who: Mapping[str, Any], error: str) -> Row:
    return {**who, "status": "failed", "seconds": None, "error": error}


def key(row: Mapping[str, Any]) -> Key:
    return str(row["part"]), str(row["cell"]), int(row["seed"])


def runs(rows: Iterable[Row], part: str) -> list[Row]:
    """The runs that count: one for each cell and seed of this part, through to the end."""
    found: dict[Key, Row] = {}
    for row in rows:
        if row["kind"] == "run" and row["part"] == part and row["status"] == "finished":
            found.setdefault(key(row), row)
    return list(found.values())


def failures(rows: Iterable[Row]) -> list[Row]:
    """Runs that failed and have not finished since."""
    rows = list(rows)
    done = {key(row) for row in rows if row["kind"] == "run" and row["status"] == "finished"}
    return [row for row in rows if row["kind"] == "run" and row["status"] != "finished" and key(row) not in done]


def profile_name(model: str, where: str) -> str:
    return f"{model}, {where}"


def profile_rows(rows: Iterable[Row]) -> dict[str, Row]:
    """By name; the first one measured holds, since runs are made of it."""
    found: dict[str, Row] = {}
    for row in rows:
        if row["kind"] == "profile":
            found.setdefault(row["name"], row)
    return found


def profiles(rows: Iterable[Row]) -> dict[str, Profile]:
    return {name: Profile.of(row) for name, row in profile_rows(rows).items()}


def study_row(rows: Sequence[Row]) -> Row:
    return next((row for row in rows if row["kind"] == "study"), {})


def told(row: Mapping[str, Any]) -> str:
    name = f"{row['part']}: {row['cell']}, seed {row['seed']}"
    if row["status"] != "finished":
        return f"{name}: failed: {row['error']}"
    return f"{name}: {row['seconds']:,.2f} s, took {row['wall_s']:.1f} s"
