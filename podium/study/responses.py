"""What a study looks at: one number of a run, by its name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from podium.study.rows import final_value, metric_name, number, time_to_target

TO_TARGET = "seconds to target"

_RATIOS = ("seconds", TO_TARGET, "node_seconds", "samples_per_s", "sent_bytes")
_TIME_ENDINGS = ("_s", "_ms")


def response_of(
    row: Mapping[str, Any], name: str, target: float | None = None, metric: str | None = None
) -> float | None:
    """One run's number: a metric at the last validation, a field (`wait_share`), or one inside it (`step_ms.p50`).

    `seconds to target` needs a target, and takes the metric that strategies are judged by unless one is named.
    None where the run does not have the number, or where it is not finite.
    """
    if name == TO_TARGET:
        return None if target is None else time_to_target(row, metric or metric_name([dict(row)]), target)
    name = name.removeprefix("final ")
    if name in row or name in (row.get("metrics") or {}):
        return final_value(row, name)
    inside: Any = row
    for part in name.split("."):
        inside = inside.get(part) if isinstance(inside, Mapping) else None
    return number(inside)


def is_ratio(name: str) -> bool:
    """Whether two values of this name are compared by their ratio: times, rates and bytes are, metrics are not."""
    return name in _RATIOS or name.partition(".")[0].endswith(_TIME_ENDINGS)
