"""A run's phases from its records: when each ended and why, its cost, and when other rules would have fired.

Seconds are those of training, as in a run's history: validations that all workers waited for are left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.records.recorder import Record

COST = ("drain", "home", "hand_over", "begin")
"""The parts of a switch's cost, in order: waiting for steps in flight, bringing the state back to the workers, changing
over, starting the next strategy."""

FIXED = ("step", "epoch", "share")
"""Rules whose position is known beforehand: no worker evaluates them, so only the `switch` record shows that they
fired."""

MOST_READINGS = 400
"""How many values of a rule are kept: as many as a figure can show."""


class PhaseRows:
    """Takes a run's records one after another and keeps those that `switches` and `other_rules` need.

    A rule in force may be evaluated after every step. Readings that fired are kept, readings just before a firing or a
    switch, and others at even intervals, so that there are never more than a few times `MOST_READINGS`.
    """

    def __init__(self) -> None:
        self._others: list[tuple[int, Record]] = []
        self._readings: dict[tuple[str, bool], _Thinned] = {}
        self._seen = 0

    def add(self, row: Record) -> None:
        kind = row["kind"]
        if kind not in ("switch", "trigger", "eval"):
            return
        self._seen += 1
        if kind == "trigger":
            self._readings.setdefault((row["rule"], row["in_force"]), _Thinned()).add(self._seen, row)
            return
        if kind == "switch":
            for thinned in self._readings.values():
                thinned.keep_last()
        self._others.append((self._seen, row))

    @property
    def rows(self) -> list[Record]:
        """In the order of the records."""
        kept = [*self._others, *(item for thinned in self._readings.values() for item in thinned.items())]
        return [row for _, row in sorted(kept, key=lambda item: item[0])]


class _Thinned:
    """The readings of one rule."""

    def __init__(self) -> None:
        self._for_good: dict[int, Record] = {}
        self._some: dict[int, Record] = {}
        self._count, self._every = 0, 1
        self._last: tuple[int, Record] | None = None

    def add(self, place: int, row: Record) -> None:
        if row["fires"]:
            self.keep_last()
            self._for_good[place] = row
        elif self._count % self._every == 0:
            self._some[place] = row
            if len(self._some) > MOST_READINGS:
                self._every *= 2
                self._some = dict(list(self._some.items())[::2])
        self._count += not row["fires"]
        self._last = (place, row)

    def keep_last(self) -> None:
        if self._last is not None:
            self._for_good[self._last[0]] = self._last[1]

    def items(self) -> list[tuple[int, Record]]:
        self.keep_last()
        return sorted({**self._some, **self._for_good}.items())


def switches(rows: Sequence[Record], began: int) -> list[dict[str, Any]]:
    """One row per change of phase, costs in milliseconds: each part is the largest of all workers'.

    `total` is the largest of the workers' totals, so the parts may add up to more.
    """
    by_place: dict[tuple[int, str, str], list[Record]] = {}
    for row in rows:
        if row["kind"] == "switch":  # recorded by each worker; twice, where workers retried after a loss
            by_place.setdefault((row["position"], row["before"], row["after"]), []).append(row)
    clock = _clock(rows, began)
    told = sorted(by_place.values(), key=lambda some: some[0]["t_ns"])
    return [_switch(some, _unheard(rows, some), clock) for some in told]


def _switch(told: Sequence[Record], unheard: Record | None, clock: Callable[[int], float]) -> dict[str, Any]:
    first = min(told, key=lambda row: (row["value"] is None, row["rank"]))  # the worker that evaluated has the value
    cost = {part: max(row[f"{part}_ns"] for row in told) / 1e6 for part in COST}
    whole = max(sum(row[f"{part}_ns"] for part in COST) for row in told) / 1e6
    facts = {name: first[name] for name in ("before", "after", "rule", "why", "value", "step", "epoch", "position")}
    if unheard is not None:
        facts |= {"why": unheard["why"], "value": unheard["value"]}
    return {**facts, "seconds": clock(max(row["t_ns"] for row in told)), "cost_ms": {**cost, "total": whole}}


def _unheard(rows: Sequence[Record], told: Sequence[Record]) -> Record | None:
    """The reading that ended the phase, if the worker that evaluated it was lost before it recorded the switch."""
    rule, at = told[0]["rule"], min(row["t_ns"] for row in told)
    readings = [row for row in rows if _in_force(row) and row["rule"] == rule and row["t_ns"] <= at]
    if not readings or not readings[-1]["fires"] or readings[-1]["position"] > told[0]["position"]:
        return None
    earlier = [row["t_ns"] for row in rows if row["kind"] == "switch" and row["position"] < told[0]["position"]]
    is_old = any(readings[-1]["t_ns"] <= t for t in earlier)  # it ended a phase before this one
    return None if is_old or readings[-1]["rank"] in {row["rank"] for row in told} else readings[-1]


def _in_force(row: Record) -> bool:
    return bool(row["kind"] == "trigger" and row["in_force"])


def other_rules(rows: Sequence[Record], began: int) -> list[dict[str, Any]]:
    """When each rule fired or would have fired: those in force first, then the others in order of firing.

    `after_switch`: the rule would have fired after the run had already switched, so it saw a different run.
    Rules in force have their `readings`: the value at every evaluation. A rule without a reading has no row.
    """
    told: dict[tuple[str, bool], list[Record]] = {}
    for row in rows:
        if row["kind"] == "trigger":
            told.setdefault((row["rule"], row["in_force"]), []).append(row)
    clock = _clock(rows, began)
    table = [_fired(rule, in_force, of_rule, clock) for (rule, in_force), of_rule in told.items()]
    by_rule: dict[str, dict[str, Any]] = {}
    for switch in switches(rows, began):
        if switch["rule"].partition(":")[0] in FIXED:
            by_rule.setdefault(switch["rule"], _known(switch))
    return sorted(
        [*table, *by_rule.values()],
        key=lambda row: (not row["in_force"], row["step"] is None, row["step"] or 0, row["rule"]),
    )


def _fired(rule: str, in_force: bool, told: Sequence[Record], clock: Callable[[int], float]) -> dict[str, Any]:
    fired: Mapping[str, Any] = _firing(in_force, [row for row in told if row["fires"]])
    last = fired or told[-1]
    found = {
        "rule": rule,
        "in_force": in_force,
        "step": fired.get("step"),
        "epoch": fired.get("epoch"),
        "seconds": clock(fired["t_ns"]) if fired else None,
        "value": last["value"],
        "threshold": last["threshold"],
        "after_switch": bool(fired) and fired["phase"] > 0 and not in_force,
    }
    return {**found, "readings": _readings(told)} if in_force else found


def _firing(in_force: bool, firings: Sequence[Record]) -> Mapping[str, Any]:
    """The first firing. Of several in one phase only the last counts: the workers that fired before were lost."""
    if not firings:
        return {}
    phase = firings[0]["phase"]
    return [row for row in firings if row["phase"] == phase][-1] if in_force else firings[0]


def _known(switch: Mapping[str, Any]) -> dict[str, Any]:
    facts = {name: switch[name] for name in ("rule", "step", "epoch", "seconds")}
    return {**facts, "in_force": True, "value": None, "threshold": None, "after_switch": False, "readings": []}


def _readings(told: Sequence[Record]) -> list[dict[str, Any]]:
    """In order of position; of two at one position the later: the first worker was lost, and the next one evaluated."""
    by_position = {row["position"]: row for row in told}
    rows = [by_position[position] for position in sorted(by_position)]
    every = -(-len(rows) // MOST_READINGS)
    kept = [row for i, row in enumerate(rows) if i % every == 0 or row["fires"] or row is rows[-1]]
    names = ("phase", "step", "epoch", "value", "threshold", "fires")
    return [{name: row[name] for name in names} for row in kept]


def _clock(rows: Sequence[Record], began: int) -> Callable[[int], float]:
    """A function from a record's time to seconds of training."""
    waited = [(row["t_ns"], row["eval_ns"]) for row in rows if row["kind"] == "eval" and row.get("waited", True)]

    def seconds(t_ns: int) -> float:
        validating = sum(took for ended, took in waited if ended <= t_ns)
        return float(t_ns - began - validating) / 1e9

    return seconds
