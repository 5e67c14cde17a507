"""`study.json`: a study and its plan in one flat table, written and read back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from typing import TYPE_CHECKING, Any

from podium.config import build
from podium.lab.stats.factorial import Level
from podium.lab.study.parts import Against, Cell, Machine, Plan, Replications, Stop

if TYPE_CHECKING:
    from podium.lab.study.study import Study

_UNWRITTEN = ("where", "derive", "keep", "measure", "plan", "machine")
"""Fields that `study.json` lacks: code, rules already applied, and `plan` and `machine`, whose fields it has."""


def to_table(study: Study) -> dict[str, Any]:
    """The study as `study.json` stores it."""
    written = {one.name: getattr(study, one.name) for one in fields(study) if one.name not in _UNWRITTEN}
    written["against"] = [asdict(table) for table in study.against]
    written["runs"] = "own" if callable(study.runs) else study.runs
    written |= {"replications": asdict(study.repeated), "stop": asdict(study.stop), "file": str(study.file)}
    order = [{"cell": cell, "seed": seed} for cell, seed in study.order()]
    begun = asdict(study.machine) if study.machine != Machine() else {}
    return {**written, **asdict(study.plan), **begun, "seeds": list(study.seeds), "order": order}


def fields_of(kind: type[Study], values: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a study from a table; fields that an older table lacks get their defaults."""
    given = dict(values)
    if "cells" not in given:
        given = {**_of_strategies(given), **given}
    cells = tuple(
        Cell(one["cell"], one.get("levels") or {}, one.get("settings") or {}) for one in given.get("cells") or ()
    )
    known = {one.name: given[one.name] for one in fields(kind) if given.get(one.name) is not None}
    known |= {"name": given.get("name", ""), "factors": given.get("factors") or _factors_of(cells)}
    known |= {"replications": _replications(given), "stop": build(Stop, given.get("stop") or {}, who="stop")}
    known["against"] = tuple(build(Against, one, who="against") for one in given.get("against") or ())
    plan, machine = (_part(kind, given) for kind in (Plan, Machine))
    return {**known, "plan": replace(plan, cells=cells), "machine": machine}


def _part(kind: Any, given: Mapping[str, Any]) -> Any:
    return kind(**{one.name: given[one.name] for one in fields(kind) if one.name in given})


def _replications(given: Mapping[str, Any]) -> Replications:
    found = {name: value for name, value in (given.get("replications") or {}).items() if value is not None}
    seeds = tuple(given.get("seeds") or ())
    if "most" not in found and seeds:
        found |= {"least": len(seeds), "most": len(seeds), "listed": seeds}
    return Replications(**{**found, "listed": tuple(found.get("listed") or ())})


def _of_strategies(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that follow from the strategies of an older `study.json`."""
    names = [str(name) for name in given.get("strategies", ())]
    settings = {"task": given.get("task"), **given.get("settings", {})}
    settings |= {name: given[name] for name in ("workers", "launcher") if name in given}
    cells = [{"cell": name, "levels": {"strategy": name}, "settings": {"strategy": name}} for name in names]
    factors = {"strategy": names}
    return {"name": given.get("task", ""), "same_batch": True, "cells": cells, "factors": factors, "settings": settings}


def _factors_of(cells: Sequence[Cell]) -> dict[str, list[Level]]:
    names = dict.fromkeys(name for cell in cells for name in cell.levels) or {"strategy": None}
    return {name: list(dict.fromkeys(cell.levels[name] for cell in cells if name in cell.levels)) for name in names}
