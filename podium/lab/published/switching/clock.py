"""Milliseconds of virtual time per global step, and what comes of them for a run that switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podium.lab.published.switching.design import (
    ALL_REDUCE,
    ALL_REDUCE_FP16,
    ASYNC,
    ASYNC_FP16,
    BALANCED_SMALL,
    DIVIDED,
    SMALL,
    SMALL_FP16,
    TIMED,
    TIMED_FOR,
    TITLES,
)
from podium.lab.published.switching.tables import Panel, of_setting, setting_names
from podium.lab.study.store import Row


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Milliseconds of virtual time per global step in one setting, and what switching would make of a run."""

    setting: str
    steps: int
    step_ms: Mapping[str, float]
    """By arm."""
    share: float | None
    """Of the budget at which the setting's runs switched."""

    @property
    def title(self) -> str:
        return TITLES.get(self.setting, self.setting)

    def ratio(self, before: str, after: str, against: str) -> float | None:
        """Time of a run that is `before` up to the switch and `after` from it on, over that of `against`."""
        if self.share is None or not {before, after, against} <= self.step_ms.keys():
            return None
        mixed = self.share * self.step_ms[before] + (1 - self.share) * self.step_ms[after]
        return mixed / self.step_ms[against]


def timings(rows: Sequence[Row], settings: Sequence[Panel]) -> list[Timing]:
    """One per timed setting, its arms in the design's order."""
    shares = {panel.setting: panel.share for panel in settings}
    found = []
    for name in setting_names(rows):
        done = {row["cell"]: row for row in of_setting(rows, name) if row["status"] == "finished"}
        if name in TIMED_FOR and done:
            step_ms = {arm.name: _step_ms(done[arm.name]) for arm in (*TIMED, *DIVIDED) if arm.name in done}
            steps = next(iter(done.values()))["steps"]
            found.append(Timing(setting=name, steps=steps, step_ms=step_ms, share=shares.get(TIMED_FOR[name])))
    return found


def _step_ms(row: Row) -> float:
    """Of a run that learns how to divide its steps, over the second half of them."""
    return float(row.get("later_ms") or 1000 * float(row["seconds"]) / int(row["steps"]))


COMPARED = (
    ("dense, against dense all-reduce", ALL_REDUCE.name, ASYNC.name, ALL_REDUCE.name),
    ("dense, both with small buckets", SMALL.name, ASYNC.name, SMALL.name),
    ("fp16, against dense all-reduce", ALL_REDUCE_FP16.name, ASYNC_FP16.name, ALL_REDUCE.name),
    ("fp16, against fp16 all-reduce", ALL_REDUCE_FP16.name, ASYNC_FP16.name, ALL_REDUCE_FP16.name),
    ("fp16, both with small buckets", SMALL_FP16.name, ASYNC_FP16.name, SMALL_FP16.name),
    ("dense, small buckets, against `equal-finish` with small buckets", SMALL.name, ASYNC.name, BALANCED_SMALL.name),
)
"""What a run that switches is held against: name, before, after, against."""
