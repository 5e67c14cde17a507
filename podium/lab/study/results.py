"""Reading result rows: which runs count, which number is the metric, when a target was reached.

Rows come from a file, so numbers that are not finite are text and a metric may be absent; both become None.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from podium.imports import find_class
from podium.records.metrics import lower_is_better
from podium.strategies.triggers import TRIGGERS, WATCHED

if TYPE_CHECKING:
    from podium.lab.study.store import Key, Row

TARGET_SHARE = 0.95
"""Without a target in the study, the target is this share of the best strategy's mean final metric."""


def number(value: Any) -> float | None:
    """A finite float, or None for what is absent, not finite or not a number."""
    if isinstance(value, bool) or value is None:
        return None
    try:
        result = float(value)
    except (TypeError, ValueError):
        return None
    return result if math.isfinite(result) else None


def deciding_rows(rows: Iterable[Row]) -> list[Row]:
    """One row per cell and seed, in order of first appearance: the finished one, else the last try."""
    chosen: dict[Key, Row] = {}
    for row in rows:
        key = (str(row["cell"]), int(row["seed"]))
        if key not in chosen or chosen[key].get("status") != "finished":
            chosen[key] = row
    return list(chosen.values())


def finished(rows: Iterable[Row]) -> list[Row]:
    """The runs that count: one finished run per cell and seed."""
    return [row for row in deciding_rows(rows) if row.get("status") == "finished"]


def cells(rows: Iterable[Row]) -> list[str]:
    """The names of cells, in order of first appearance."""
    return list(dict.fromkeys(str(row["cell"]) for row in rows))


def setting_of(row: Mapping[str, Any]) -> str:
    """The levels of all factors but the first, as text; empty if there is one factor."""
    levels = dict(row.get("levels") or {})
    levels.pop(next(iter(levels), ""), None)
    # With its factor's name where a comma would look like two levels, or a number would have no meaning.
    bare = {name: isinstance(level, str) and "," not in level for name, level in levels.items()}
    return ", ".join(str(level) if bare[name] else f"{name} {level}" for name, level in levels.items())


def by_setting(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Groups of rows that differ in the first factor alone; one group if there is no other factor."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(setting_of(row), []).append(row)
    return found


def first_level(row: Mapping[str, Any]) -> str:
    """A row's name within its setting: its level of the first factor."""
    levels = row.get("levels") or {}
    return str(next(iter(levels.values()), row["cell"]))


def crossed(rows: Sequence[Row]) -> list[Row]:
    """Rows whose level of the first factor is in several settings: leaves out a baseline that is in one only."""
    settings = by_setting(finished(rows))
    counts = Counter(level for some in settings.values() for level in {first_level(row) for row in some})
    most = max(counts.values(), default=0)
    return [row for row in finished(rows) if counts[first_level(row)] > 1 or most <= 1]


def arranged(rows: Iterable[Row], strategies: Sequence[str]) -> list[Row]:
    """Rows in the order of `strategies`, not in the order of the runs."""
    place = {cell: i for i, cell in enumerate(strategies)}
    return sorted(rows, key=lambda row: place.get(str(row["cell"]), len(place)))  # stable: tries stay in order


def metric_name(rows: Iterable[Row]) -> str:
    """The metric that strategies are judged by: `accuracy`, else the task's first metric, else the loss."""
    return judged_by(list(dict.fromkeys(name for row in finished(rows) for name in row.get("metrics") or {})))


def judged_by(metrics: Sequence[str]) -> str:
    if "accuracy" in metrics:
        return "accuracy"
    return metrics[0] if metrics else "loss"


def final_value(row: Mapping[str, Any], metric: str) -> float | None:
    """A run's metric at its last validation, or any other field."""
    return number((row.get("metrics") or {}).get(metric, row.get(metric)))


def at_validation(point: Mapping[str, Any], name: str) -> float | None:
    """A number from one row of a run's history; metrics may be fields of it or of its table `metrics`."""
    return number(point.get(name, (point.get("metrics") or {}).get(name)))


def time_to_target(row: Mapping[str, Any], metric: str, target: float, maximize: bool | None = None) -> float | None:
    """Training seconds at the first validation that reached the target; None if none did.

    Nothing is interpolated, so the result is late by up to the time between two validations.
    """
    lower = lower_is_better(metric, maximize)
    for point in row.get("history") or ():
        value = at_validation(point, metric)
        if value is not None and (value <= target if lower else value >= target):
            return at_validation(point, "seconds")
    return None


def default_target(rows: Sequence[Row], metric: str, maximize: bool | None = None) -> float | None:
    """Five per cent worse than the best strategy's mean final metric, to three significant digits.

    Worse, not 95 % of it, so that it also works for metrics that are better when lower, or below zero. It is chosen
    after the fact; a claim made in advance needs a target given in advance.
    """
    means = []
    for cell in cells(rows):
        values = [final_value(row, metric) for row in finished(rows) if row["cell"] == cell]
        known = [value for value in values if value is not None]
        if known:
            means.append(sum(known) / len(known))
    if not means:
        return None
    lower = lower_is_better(metric, maximize)
    best = min(means) if lower else max(means)
    slack = (1 - TARGET_SHARE) * abs(best)
    return float(f"{best + slack if lower else best - slack:.3g}")


class Others(NamedTuple):
    """The rules that were not in force in a run with phases."""

    fired: tuple[Mapping[str, Any], ...]
    """In order of firing, as in `RunResult.rules`."""
    silent: tuple[str, ...]
    """Evaluated, and never fired."""
    unmeasured: tuple[str, ...]
    """Not evaluated: their values cost an exchange, and no rule in force needed them."""


def other_rules(row: Mapping[str, Any]) -> Others:
    """A run's rules that were not in force. A rule in force is listed only if it would have fired later."""
    rules = row.get("rules") or ()
    if not rules:
        return Others((), (), ())
    own = {rule["rule"]: rule["step"] for rule in rules if rule["in_force"]}
    others = [rule for rule in rules if not rule["in_force"]]
    fired = tuple(rule for rule in others if rule["step"] is not None and own.get(rule["rule"]) is None)
    told = {*own, *(rule["rule"] for rule in fired)}
    # Most rules record a reading only when they fire.
    rest = [name for name in dict.fromkeys([*(rule["rule"] for rule in others), *WATCHED]) if name not in told]
    measured = {need for rule in rules for need in _needs(rule["rule"])}
    unmeasured = tuple(name for name in rest if _needs(name) - measured)
    return Others(fired, tuple(name for name in rest if name not in unmeasured), unmeasured)


def _needs(rule: str) -> set[str]:
    """What must be measured for one of Podium's rules."""
    name = rule.partition(":")[0]
    if name not in TRIGGERS:
        return set()
    kind: Any = find_class("trigger", name, TRIGGERS)
    return {need for need in ("needs_times", "needs_noise") if getattr(kind, need)}


class RuleLine(NamedTuple):
    """One rule over all runs of a strategy."""

    rule: str
    in_force: bool
    runs: int
    epochs: tuple[float, ...]
    """The epoch at which it fired, for each run in which it did."""
    late: int
    """In how many runs it fired only after the run had switched."""
    measured: bool = True


def rules_by_cell(rows: Iterable[Row]) -> dict[str, list[RuleLine]]:
    """The rules of each strategy with phases: rules in force, then watched rules in order of firing, then the rest."""
    done = [row for row in finished(rows) if row.get("rules")]
    return {cell: _rule_lines([row for row in done if row["cell"] == cell]) for cell in cells(done)}


def _rule_lines(runs: Sequence[Row]) -> list[RuleLine]:
    own: dict[str, list[Mapping[str, Any]]] = {}
    others: dict[str, list[Mapping[str, Any]]] = {}
    unmeasured: dict[str, int] = {}
    for row in runs:
        for rule in row["rules"]:
            if rule["in_force"]:
                own.setdefault(rule["rule"], []).append(rule)
        told = other_rules(row)
        for rule in told.fired:
            others.setdefault(rule["rule"], []).append(rule)
        for name in (*told.silent, *told.unmeasured):
            others.setdefault(name, [])
        for name in told.unmeasured:
            unmeasured[name] = unmeasured.get(name, 0) + 1
    lines = [_rule_line(name, True, len(runs), found) for name, found in own.items()]
    rest = [_rule_line(name, False, len(runs), found) for name, found in others.items()]
    rest = [line._replace(measured=unmeasured.get(line.rule, 0) < len(runs)) for line in rest]
    return lines + sorted(rest, key=lambda line: (not line.epochs, min(line.epochs, default=0.0), not line.measured))


def _rule_line(name: str, in_force: bool, runs: int, found: Sequence[Mapping[str, Any]]) -> RuleLine:
    epochs = tuple(float(rule["epoch"]) for rule in found if rule["epoch"] is not None)
    return RuleLine(name, in_force, runs, epochs, sum(bool(rule["after_switch"]) for rule in found))
