"""Phases: metric and loss over epochs, with a mark at each switch, and below them the value and threshold of each rule
in force.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.report.figures.base import Line
from podium.lab.report.figures.curves import line_of
from podium.lab.study.results import cells, finished, number
from podium.lab.study.store import Row

WIDE = 10
"""A rule's values are drawn on a logarithmic scale if they differ by more than this factor."""


@dataclass(frozen=True)
class Panel:
    """One quantity of a stack."""

    quantity: str
    lines: tuple[Line, ...]
    """One per run; for a rule, one per run and phase in which it was in force."""
    log: bool
    threshold: float | None = None
    """The value at which a rule fires."""


@dataclass(frozen=True)
class Stack:
    """One strategy with phases: its metrics, its switches, and the values of the rules in force."""

    cell: str
    panels: tuple[Panel, ...]
    marks: tuple[tuple[int, float], ...]
    """Seed and epoch of each switch."""

    @property
    def name(self) -> str:
        return f"phases, {self.cell}"


def phase_stacks(rows: Sequence[Row], metric: str) -> dict[str, Stack]:
    """By strategy with phases: its runs over the epochs."""
    done = [row for row in finished(rows) if row.get("rules")]
    found = {}
    for cell in cells(done):
        runs = [row for row in done if row["cell"] == cell]
        panels = [_learned(quantity, runs) for quantity in dict.fromkeys([metric, "loss"])]
        panels += [_rule_panel(rule, runs) for rule in _rules_in_force(runs)]
        drawn = tuple(panel for panel in panels if panel.lines)
        if drawn:
            marks = [(int(row["seed"]), float(switch["epoch"])) for row in runs for switch in row["switches"]]
            found[cell] = Stack(cell, drawn, tuple(marks))
    return found


def _learned(quantity: str, runs: Sequence[Row]) -> Panel:
    lines = tuple(line for line in (line_of(row, quantity, "epoch") for row in runs) if line.x)
    return Panel(quantity, lines, quantity == "loss" and all(y > 0 for line in lines for y in line.y))


def _rules_in_force(runs: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(rule["rule"] for row in runs for rule in row["rules"] if rule["in_force"]))


def _rule_panel(name: str, runs: Sequence[Row]) -> Panel:
    lines: list[Line] = []
    thresholds: list[float] = []
    for row in runs:
        for rule in row["rules"]:
            if rule["rule"] == name and rule["in_force"]:
                lines += _readings(int(row["seed"]), rule["readings"])
                thresholds += [bound for bound in [number(rule["threshold"])] if bound is not None]
    threshold = thresholds[-1] if thresholds else None
    values = [y for line in lines for y in line.y] + ([] if threshold is None else [threshold])
    return Panel(name, tuple(lines), bool(values) and min(values) > 0 and max(values) > WIDE * min(values), threshold)


def _readings(seed: int, readings: Sequence[Mapping[str, Any]]) -> list[Line]:
    """A line per phase, since the rule was not in force in between. A rule without enough data has no value."""
    by_phase: dict[int, list[tuple[float, float]]] = {}
    for reading in readings:
        value = number(reading["value"])
        if value is not None:
            by_phase.setdefault(reading["phase"], []).append((float(reading["epoch"]), value))
    return [Line(seed, tuple(x for x, _ in some), tuple(y for _, y in some)) for some in by_phase.values()]
