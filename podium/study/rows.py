"""What result rows say: which runs count, which number is the metric, when a target was reached.

Rows come from a file, so numbers that are not finite are text and a metric may be absent; both read as "unknown".
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from podium.study.store import Key, Row

LOWER_IS_BETTER = ("loss", "mae", "mse", "rmse", "error", "perplexity")
"""A metric is better when lower if its name is one of these or ends in one, as `val_loss` does."""

TARGET_SHARE = 0.95
"""A target that nobody set is this share of the best strategy's mean final metric."""


def number(value: Any) -> float | None:
    """A finite float, or None for what is absent, not finite or not a number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if math.isfinite(result) else None


def lower_is_better(metric: str) -> bool:
    return metric.lower().replace("-", "_").split("_")[-1] in LOWER_IS_BETTER


def deciding_rows(rows: Iterable[Row]) -> list[Row]:
    """One row per cell and seed, in order of first appearance: the finished one, else the last try."""
    chosen: dict[Key, Row] = {}
    for row in rows:
        key = (str(row["cell"]), int(row["seed"]))
        if key not in chosen or chosen[key].get("status") != "finished":
            chosen[key] = row
    return list(chosen.values())


def finished(rows: Iterable[Row]) -> list[Row]:
    """The runs that count: one per cell and seed, through to the end."""
    return [row for row in deciding_rows(rows) if row.get("status") == "finished"]


def cells(rows: Iterable[Row]) -> list[str]:
    """The strategies, in order of first appearance."""
    return list(dict.fromkeys(str(row["cell"]) for row in rows))


def arranged(rows: Iterable[Row], strategies: Sequence[str]) -> list[Row]:
    """Rows in the order in which strategies were asked for, not in which they happened to run."""
    place = {cell: i for i, cell in enumerate(strategies)}
    return sorted(rows, key=lambda row: place.get(str(row["cell"]), len(place)))  # stable: tries stay in order


def metric_name(rows: Iterable[Row]) -> str:
    """What strategies are judged by: `accuracy` where there is one, else the task's first metric, else the loss."""
    names = list(dict.fromkeys(name for row in finished(rows) for name in row.get("metrics") or {}))
    if "accuracy" in names:
        return "accuracy"
    return names[0] if names else "loss"


def final_value(row: Mapping[str, Any], metric: str) -> float | None:
    """A run's value of the metric (or of any other field) at its last validation."""
    return number((row.get("metrics") or {}).get(metric, row.get(metric)))


def at_validation(point: Mapping[str, Any], name: str) -> float | None:
    """A number from one row of a run's history; metrics may lie flat in it or in a table of their own."""
    return number(point.get(name, (point.get("metrics") or {}).get(name)))


def time_to_target(row: Mapping[str, Any], metric: str, target: float) -> float | None:
    """Training seconds at the first validation that met the target; None when none did.

    Nothing is interpolated, so the answer is late by up to the time between two validations.
    """
    lower = lower_is_better(metric)
    for point in row.get("history") or ():
        value = at_validation(point, metric)
        if value is not None and (value <= target if lower else value >= target):
            return at_validation(point, "seconds")
    return None


def default_target(rows: Sequence[Row], metric: str) -> float | None:
    """Five per cent short of the best strategy's mean final metric, to three significant digits.

    Short of, not a share of: so it also means something for a metric that is better when lower, or below zero.
    It is chosen after the fact; a claim made in advance needs a target given in advance.
    """
    means = []
    for cell in cells(rows):
        values = [final_value(row, metric) for row in finished(rows) if row["cell"] == cell]
        known = [value for value in values if value is not None]
        if known:
            means.append(sum(known) / len(known))
    if not means:
        return None
    lower = lower_is_better(metric)
    best = min(means) if lower else max(means)
    slack = (1 - TARGET_SHARE) * abs(best)
    return float(f"{best + slack if lower else best - slack:.3g}")
