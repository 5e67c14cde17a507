"""Moments kept at the switch against moments dropped, paired by seed."""

from __future__ import annotations

import importlib
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from podium.lab.published.switching.design import DROPPED_FP16, SWITCH_FP16, TITLES
from podium.lab.published.switching.tables import finished_runs, of_setting, percent, setting_names
from podium.lab.stats.statistics import Mean, mean_interval
from podium.lab.study.store import Row

LATER = 3
"""Epochs."""


@dataclass(frozen=True, kw_only=True)
class Ablation:
    """Moments kept at the switch against dropped, kept minus dropped."""

    setting: str
    accuracies: tuple[tuple[int, float, float], ...]
    """Seed, kept, dropped, in percent."""
    accuracy: Mean
    losses: tuple[tuple[int, float, float], ...]
    """Mean training loss of the epoch's worth of samples after the switch; of seeds that switched at the same place."""
    loss: Mean | None
    later: tuple[tuple[int, float, float], ...]
    """Mean training loss of the three whole epochs that follow that one, of the same seeds."""
    loss_later: Mean | None

    @property
    def apart(self) -> tuple[int, ...]:
        """Seeds whose two runs did not switch at the same place."""
        return tuple(seed for seed, *_ in self.accuracies if seed not in {seed for seed, *_ in self.losses})

    @property
    def title(self) -> str:
        return TITLES.get(self.setting, self.setting)


def ablations(rows: Sequence[Row]) -> list[Ablation]:
    """One per setting in which both were run."""
    found = [_ablation(name, of_setting(rows, name)) for name in setting_names(rows)]
    return [one for one in found if one is not None]


def _ablation(setting: str, rows: Sequence[Row]) -> Ablation | None:
    kept, dropped = finished_runs(rows, SWITCH_FP16.name), finished_runs(rows, DROPPED_FP16.name)
    seeds = sorted(set(kept) & set(dropped))
    accuracies = [(seed, percent(kept[seed]), percent(dropped[seed])) for seed in seeds]
    mean = mean_interval([a - b for _, a, b in accuracies])
    if mean is None:
        return None
    pairs = [(seed, _first_switch(kept[seed]), _first_switch(dropped[seed])) for seed in seeds]
    losses = [
        (s, a["loss_after"], b["loss_after"]) for s, a, b in pairs if a and a.get("position") == b.get("position")
    ]
    later = [(s, _later(kept[s]), _later(dropped[s])) for s, *_ in losses if _later(kept[s]) and _later(dropped[s])]
    return Ablation(
        setting=setting,
        accuracies=tuple(accuracies),
        accuracy=mean,
        losses=tuple(losses),
        loss=mean_interval([a - b for _, a, b in losses]),
        later=tuple(later),
        loss_later=mean_interval([a - b for _, a, b in later]),
    )


class Chance(NamedTuple):
    """How probable a difference at least this large is by luck, of one test alone and after Holm's correction."""

    p: float
    p_holm: float


def chances(tests: Sequence[Sequence[tuple[int, float, float]]]) -> list[Chance | None]:
    """Paired t-tests, one per sequence of (seed, one, other), corrected together; None for fewer than three pairs."""
    stats = importlib.import_module("scipy.stats")
    differences = {i: [a - b for _, a, b in pairs] for i, pairs in enumerate(tests) if len(pairs) > 2}
    alone = {i: _p(stats, values) for i, values in differences.items()}
    highest, found = 0.0, dict[int, Chance]()
    for place, i in enumerate(sorted(alone, key=lambda i: alone[i])):
        highest = max(highest, min(1.0, alone[i] * (len(alone) - place)))
        found[i] = Chance(alone[i], highest)
    return [found.get(i) for i in range(len(tests))]


def _p(stats: Any, values: Sequence[float]) -> float:
    if len(set(values)) == 1:  # no spread: either no difference at all, or the same one every time
        return 1.0 if values[0] == 0 else 0.0
    p = float(stats.ttest_1samp(values, 0.0).pvalue)
    return p if math.isfinite(p) else 1.0  # differences so small that their spread rounds to nothing


def _later(row: Row) -> float:
    """0 where there are not that many epochs."""
    first = math.ceil(_first_switch(row)["epoch"]) + 1
    losses = row["train_loss"][first : first + LATER]
    return statistics.fmean(losses) if len(losses) == LATER else 0.0


def _first_switch(row: Row) -> Mapping[str, Any]:
    return row["switches"][0] if row["switches"] else {}
