"""Ways to train a group that are timed against each other."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from podium.sweeps.executors.base import Executor

REPEATS = 3
"""Timings of each candidate, from which a ratio gets its range."""


class Candidate(NamedTuple):
    """One way to train a group, and how long it would take."""

    executor: Executor
    width: int
    step_us: float  # of one model
    start_s: float
    total_s: float
    why_not: str = ""
    unsteady: float = 1.0
    """The slowest timing over the fastest."""
    fastest_s: float | None = None
    slowest_s: float | None = None
    """`total_s` by the fastest and by the slowest timing; None where there was one timing."""

    @property
    def ends(self) -> tuple[float, float]:
        """The range of `total_s` by the timings."""
        return self.fastest_s or self.total_s, self.slowest_s or self.total_s

    def to_dict(self) -> dict[str, Any]:
        return {
            "executor": describe(self.executor),
            "width": self.width,
            "us_per_model_step": round(self.step_us, 3),
            "start_s": round(self.start_s, 2),
            "predicted_s": round(self.total_s, 3),
            "predicted_range_s": [round(end, 3) for end in self.ends],
            "why_not": self.why_not,
        }


def describe(executor: Executor) -> str:
    """An executor as the user would name it: `fused:width=32`."""
    changed = {}
    for field in dataclasses.fields(executor):  # type: ignore[arg-type]  # executors are dataclasses
        value = getattr(executor, field.name)
        if value != field.default and field.name not in ("probed", "env"):
            changed[field.name] = value
    return executor.name + (":" + ",".join(f"{k}={str(v).lower()}" for k, v in changed.items()) if changed else "")
