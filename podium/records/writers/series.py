"""The points that writers write: numbers with a name, a step and a time, computed from records and results.

Workers may be synchronous or not, so all series are over global steps, computed from the number of samples so far.
Where several workers made one step, its loss is their mean weighted by samples, its bytes are their sum, and its share
of waiting is their waiting time over their step time.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from podium.records.recorder import Record
from podium.records.staleness import later

FINAL = (
    "loss", "seconds", "setup_s", "samples_per_s", "steps", "epochs", "samples", "updates", "dropped", "sent_bytes",
    "wait_share", "parameters", "nodes",
)  # fmt: skip
"""Numbers of a result that become `final/…`, besides its metrics."""


class Point(NamedTuple):
    """One number."""

    tag: str
    value: float
    step: int
    seconds: float | None = None
    """Since the run began, on its own clock; None means now."""


def global_step(position: int, samples: int, batch_size: int) -> int:
    """The number of global steps up to this position; `samples` of an epoch, whose last step may be short."""
    epochs, offset = divmod(position, samples)
    return epochs * -(-samples // batch_size) + -(-offset // batch_size)


def costs(records: Iterable[Record], config: Mapping[str, Any]) -> list[Point]:
    """Every `train/…` point of a run, step by step; empty where its records do not have the samples of an epoch."""
    rows = list(records)
    begins = [row for row in rows if row["kind"] == "begin" and row.get("role") == "worker" and row.get("samples")]
    batch_size = config.get("batch_size")
    if not begins or not batch_size:
        return []
    began, samples = min(row["t_ns"] for row in begins), begins[0]["samples"]
    steps = [row for row in rows if row["kind"] == "step"]
    workers = len({row["rank"] for row in steps})
    points: list[Point] = []
    for step, group in _by_step(steps, "position", samples, batch_size):
        seconds = (max(row["t_ns"] for row in group) - began) / 1e9
        points += [Point(f"train/{name}", x, step, seconds) for name, x in _of_step(group, workers).items()]
    updates = [row for row in rows if row["kind"] == "update"]
    for step, group in _by_step(later(updates), "lease", samples, batch_size):
        seconds = (max(row["t_ns"] for row in group) - began) / 1e9
        mean = sum(row["staleness"] for row in group) / len(group)
        points.append(Point("train/staleness", mean, step, seconds))
    return points


def _by_step(
    rows: Iterable[Record], field: str, samples: int, batch_size: int
) -> Iterator[tuple[int, Sequence[Record]]]:
    """Records that belong to one global step, in order of steps. A lease begins where the step before it ends."""
    groups: dict[int, list[Record]] = {}
    for row in rows:
        place = row[field] + (field == "lease")
        groups.setdefault(global_step(place, samples, batch_size), []).append(row)
    yield from sorted(groups.items())


def _of_step(group: Sequence[Record], workers: int) -> dict[str, float]:
    samples = sum(row["samples"] for row in group)
    busy_ns = sum(row["step_ns"] for row in group)
    losses = [(row["samples"], number(row["loss"])) for row in group if row["samples"]]
    found = {
        "sent_bytes": float(sum(row.get("sent", 0) for row in group)),
        "wait_share": sum(row["wait_ns"] for row in group) / max(1, busy_ns),
    }
    if losses:
        found["loss"] = math.fsum(n * (math.nan if x is None else x) for n, x in losses) / samples
    if busy_ns:
        found["samples_per_s"] = samples * workers / (busy_ns / 1e9)
    return found


def validations(history: Iterable[Mapping[str, Any]]) -> Iterator[Point]:
    """The `validation/…` points of a result's history."""
    for row in history:
        values = {**row, **(row.get("metrics") or {})}
        for name, value in values.items():
            x = None if name in ("step", "epoch", "samples", "seconds", "metrics") else number(value)
            if x is not None:
                yield Point(f"validation/{name}", x, int(row["step"]), number(row.get("seconds")))


def finals(result: Mapping[str, Any]) -> list[Point]:
    """The `final/…` points of a result or a study's row."""
    found = {name: result.get(name) for name in FINAL}
    found.update({f"step_ms_{name}": x for name, x in (result.get("step_ms") or {}).items()})
    found.update({f"staleness_{name}": x for name, x in (result.get("staleness") or {}).items() if name != "count"})
    found.update(result.get("metrics") or {})
    step, seconds = int(result.get("steps") or 0), number(result.get("seconds"))
    values = {name: number(value) for name, value in found.items()}
    return [Point(f"final/{name}", x, step, seconds) for name, x in values.items() if x is not None]


def number(value: Any) -> float | None:
    """A float, also from the text that records have for inf and nan; None for all else."""
    if isinstance(value, str):
        return float(value) if value in NOT_FINITE else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


NOT_FINITE = ("nan", "inf", "-inf")
"""Text of numbers that are not finite, which JSON does not have."""
