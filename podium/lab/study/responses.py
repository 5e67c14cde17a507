"""Responses of a study: one number of a run, by its name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import fields
from typing import Any, get_type_hints

from podium.config import RunResult
from podium.lab.study.results import final_value, metric_name, number, time_to_target

TO_TARGET = "seconds to target"

_RATIOS = ("seconds", TO_TARGET, "node_seconds", "samples_per_s", "sent_bytes")
_TIME_ENDINGS = ("_s", "_ms")

_ADDED = ("nodes", "wall_s", "parameters", "setup_s")
"""Numbers of a study's rows that `RunResult` does not have."""
_INSIDE = {"step_ms": ("p50", "p90"), "staleness": ("mean", "max", "count"), "audit": ("missing", "repeated")}
_OPEN = ("balance", "codec_choice", "staleness_by")
"""Tables of a row with arbitrary names."""


def response_of(
    row: Mapping[str, Any],
    name: str,
    target: float | None = None,
    metric: str | None = None,
    maximize: bool | None = None,
) -> float | None:
    """One run's number: a metric at the last validation, a field (`wait_share`), or a nested one (`step_ms.p50`).

    `seconds to target` needs a target. Its default metric is the one that strategies are judged by; `maximize` None
    decides by the metric's name. Returns None if the run lacks the number or it is not finite.
    """
    if name == TO_TARGET:
        judged = metric or metric_name([dict(row)])
        return None if target is None else time_to_target(row, judged, target, maximize)
    name = name.removeprefix("final ")
    if name in row or name in (row.get("metrics") or {}):
        return final_value(row, name)
    inside: Any = row
    for part in name.split("."):
        inside = inside.get(part) if isinstance(inside, Mapping) else None
    return number(inside)


def known_responses() -> list[str]:
    """Names of numbers that any run may have, besides `seconds to target` and its task's metrics."""
    hints = get_type_hints(RunResult)
    own = [field.name for field in fields(RunResult) if hints[field.name] in (int, float)]
    inside = [f"{name}.{part}" for name, parts in _INSIDE.items() for part in parts]
    return [*own, *_ADDED, *inside]


def is_response(name: str, metrics: Collection[str] = ()) -> bool:
    """Whether a run may have a number of this name, given its task's metrics."""
    if name == TO_TARGET:
        return True
    bare = name.removeprefix("final ")
    if bare in known_responses() or bare.removeprefix("metrics.") in metrics:
        return True
    table, _, inside = bare.partition(".")
    return table in _OPEN and bool(inside)


def is_ratio(name: str) -> bool:
    """Whether values of this name are compared by their ratio: times, rates and bytes are, metrics are not."""
    return name in _RATIOS or name.partition(".")[0].endswith(_TIME_ENDINGS)
