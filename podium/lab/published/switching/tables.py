"""Rows to tables: one panel per setting, one line per arm.

Everything is paired by seed: runs with the same seed begin with the same parameters and see the same samples.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from podium.lab.published.switching.design import ALL_REDUCE, ALL_REDUCE_FP16, DROPPED_FP16, MAIN, TIMED_FOR, TITLES
from podium.lab.stats.statistics import Mean, mean_interval
from podium.lab.study.rows import RuleLine, deciding_rows, number, rules_by_cell
from podium.lab.study.store import Row

SLACK = 0.3
"""How far below all-reduce's final accuracy, in points of a hundred, counts as having reached it all the same."""

LOW, HIGH = 0.1, 0.5
"""A setback: the mean training loss of an epoch is above HIGH of the first after it has been below LOW of it."""

BySeed = Mapping[int, Row]


@dataclass(frozen=True, kw_only=True)
class Line:
    """One arm in one setting, over the seeds that finished."""

    arm: str
    tried: int
    accuracies: tuple[float, ...]
    """In percent, by seed."""
    accuracy: Mean | None
    gap: Mean | None
    """Minus all-reduce's with the same seed, in points of a hundred."""
    gaps: tuple[float, ...]
    """The same, by seed."""
    gap_equal: Mean | None
    """Minus that of all-reduce with the same codec."""
    time: Mean | None
    """Virtual seconds over those of all-reduce with the same seed."""
    time_equal: Mean | None
    """The same against all-reduce with the same codec."""
    reached: tuple[float, ...]
    """When all-reduce's final accuracy was reached, over all-reduce's seconds, for each seed that did."""
    nearly: tuple[float, ...]
    """The same for an accuracy a little below it."""
    staleness: float | None
    bytes_ratio: float | None
    exchanges: int | None
    """Steps after which the first worker sent something."""
    train_loss: float | None
    """Of the last epoch, mean over seeds."""
    setbacks: tuple[tuple[int, float], ...]
    """Seed and the first epoch after which the loss was high again after it had been low."""


@dataclass(frozen=True, kw_only=True)
class Switch:
    """One change of phase of one run."""

    arm: str
    seed: int
    epoch: float
    share: float
    """Of the budget."""
    why: str
    value: float | None
    threshold: float | None
    seconds: float
    cost_ms: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One setting: arms against all-reduce."""

    setting: str
    facts: Row
    lines: tuple[Line, ...]
    switches: tuple[Switch, ...]
    rules: Mapping[str, Sequence[RuleLine]]
    """By arm: when its own rule fired, and when others would have."""

    @property
    def title(self) -> str:
        return TITLES.get(self.setting, self.setting)

    def line(self, arm: str) -> Line | None:
        return next((line for line in self.lines if line.arm == arm), None)

    @property
    def share(self) -> float | None:
        """The median share of the budget at which runs switched."""
        return statistics.median(one.share for one in self.switches) if self.switches else None


def panels(rows: Sequence[Row]) -> list[Panel]:
    """One per setting that has a finished all-reduce and is not only timed, in the design's order."""
    found = [_panel(name, of_setting(rows, name)) for name in setting_names(rows) if name not in TIMED_FOR]
    return [panel for panel in found if panel is not None]


def setting_names(rows: Sequence[Row]) -> list[str]:
    """Those of the design in its order, then others by name."""
    known = [*TITLES]
    names = {str(row["setting"]) for row in rows}
    return sorted(names, key=lambda name: (known.index(name) if name in known else len(known), name))


def of_setting(rows: Sequence[Row], setting: str) -> list[Row]:
    """One row per arm and seed."""
    return deciding_rows([row for row in rows if row["setting"] == setting])


def finished_runs(rows: Sequence[Row], arm: str) -> dict[int, Row]:
    """By seed, in its order."""
    found = [row for row in rows if row["cell"] == arm and row["status"] == "finished"]
    return {int(row["seed"]): row for row in sorted(found, key=lambda row: int(row["seed"]))}


def _panel(setting: str, rows: Sequence[Row]) -> Panel | None:
    base = finished_runs(rows, ALL_REDUCE.name)
    if not base:
        return None
    known = [arm.name for arm in (*MAIN, DROPPED_FP16)]
    names = dict.fromkeys(str(row["cell"]) for row in rows)
    arms = [name for name in known if name in names] + [name for name in names if name not in known]
    done = [row for arm in arms for row in finished_runs(rows, arm).values()]
    told = [{**row, "rules": [{**rule, "step": rule["epoch"]} for rule in row["rules"]]} for row in done]
    return Panel(
        setting=setting,
        facts=next(iter(base.values())),
        lines=tuple(_line(arm, rows, base) for arm in arms),
        switches=tuple(switch for row in done for switch in _switches(row)),
        rules=rules_by_cell(told),
    )


def _line(arm: str, rows: Sequence[Row], base: BySeed) -> Line:
    mine = finished_runs(rows, arm)
    equal = finished_runs(rows, ALL_REDUCE_FP16.name) if any(_is_fp16(row) for row in mine.values()) else base
    staleness = [row["staleness"]["mean"] for row in mine.values() if row["staleness"]]
    return Line(
        arm=arm,
        tried=sum(row["cell"] == arm for row in rows),
        accuracies=tuple(percent(row) for row in mine.values()),
        accuracy=mean_interval([percent(row) for row in mine.values()]),
        gap=mean_interval(_gaps(mine, base)),
        gaps=tuple(_gaps(mine, base)),
        gap_equal=mean_interval(_gaps(mine, equal)),
        time=mean_interval(_ratios(mine, base, "seconds")),
        time_equal=mean_interval(_ratios(mine, equal, "seconds")),
        reached=_reached(mine, base, 0.0),
        nearly=_reached(mine, base, SLACK),
        staleness=statistics.fmean(staleness) if staleness else None,
        bytes_ratio=_mean(_ratios(mine, base, "sent_bytes")),
        exchanges=max((int(row["exchanges"]) for row in mine.values()), default=None),
        train_loss=_mean([row["train_loss"][-1] for row in mine.values()]),
        setbacks=tuple((seed, at) for seed, row in mine.items() if (at := setback(row["train_loss"])) is not None),
    )


def _is_fp16(row: Row) -> bool:
    return bool(row["config"]["codec"] == "fp16")


def percent(row: Row) -> float:
    """Final accuracy."""
    return 100 * float(row["accuracy"])


def _ratios(mine: BySeed, base: BySeed, name: str) -> list[float]:
    return [mine[seed][name] / base[seed][name] for seed in mine if seed in base]


def _gaps(mine: BySeed, base: BySeed) -> list[float]:
    return [percent(mine[seed]) - percent(base[seed]) for seed in mine if seed in base]


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _reached(mine: BySeed, base: BySeed, slack: float) -> tuple[float, ...]:
    times = [(time_to(mine[seed], percent(base[seed]) - slack), base[seed]["seconds"]) for seed in mine if seed in base]
    return tuple(seconds / whole for seconds, whole in times if seconds is not None)


def time_to(row: Row, wanted: float) -> float | None:
    """Virtual seconds at the first validation with at least this accuracy; None when none had it."""
    history = row["history"]
    for seconds, accuracy in zip(history["seconds"], history["accuracy"], strict=True):
        if 100 * accuracy >= wanted - 1e-9:
            return float(seconds)
    return None


def setback(losses: Sequence[float]) -> float | None:
    """The number of the first epoch, from 1, whose loss is high again after it had been low; None when none is."""
    was_low = False
    for epoch, loss in enumerate(losses, 1):
        was_low = was_low or loss < LOW * losses[0]
        if was_low and loss > HIGH * losses[0]:
            return float(epoch)
    return None


def _switches(row: Row) -> list[Switch]:
    bounds = {rule["rule"]: rule["threshold"] for rule in row["rules"] if rule["in_force"]}
    return [
        Switch(
            arm=row["cell"],
            seed=int(row["seed"]),
            epoch=one["epoch"],
            share=one["position"] / row["samples"],
            why=one["why"],
            value=number(one["value"]),
            threshold=number(bounds.get(one["rule"])),
            seconds=one["seconds"],
            cost_ms=one["cost_ms"],
        )
        for one in row["switches"]
    ]
