"""Which numbers changed between two sets, and whether by more than chance."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, variance
from typing import Any, Literal, NamedTuple

from podium.errors import RecordError
from podium.lab.report.versus.base import Change, Difference, FromZero, Set, Side, Versus
from podium.lab.report.versus.prose import answer, limits
from podium.lab.stats.statistics import ALPHA, Contrast, compare_pairs, corrected, holm, mean_interval
from podium.lab.study.results import (
    arranged,
    cells,
    default_target,
    final_value,
    finished,
    metric_name,
    number,
    time_to_target,
)
from podium.lab.study.store import Row, Store
from podium.lab.study.study import Study
from podium.records.intervals import load


def read_set(folder: str | Path, maximize: bool | None = None) -> Set:
    """Read the study in this folder; raises `RecordError` without a finished run."""
    store = Store(folder)
    study = Study.read(store, maximize)
    rows = store.runs()
    if not finished(rows):
        raise RecordError(f"report: {store.folder} must hold at least one finished run to compare, got none")
    return Set(store.folder.resolve().name, store.folder, study, arranged(rows, study.names), rows)


def compare_results(a: str | Path, b: str | Path, *, maximize: bool | None = None) -> Versus:
    """Compare the results in two studies' folders, cell by cell; `a` is the reference.

    `maximize`: whether a higher metric is better; it overrides the studies.
    """
    return compare_sets(*named(read_set(a, maximize), read_set(b, maximize)))


def compare_sets(a: Set, b: Set) -> Versus:
    """`compare_results` of folders already read."""
    metric = metric_name(a.rows)
    # Where the two studies disagree the first decides, and the difference is listed.
    maximize = next((way for one in (a, b) if (way := one.study.maximize) is not None), None)
    target = a.study.target
    if target is None or target != b.study.target:
        target = default_target(a.rows, metric, maximize)
    changes, zeros = _changes(a.done, b.done, metric, target, maximize)
    differences = tuple(_differences(a, b))
    same = _same_parameters(a.done, b.done)
    shared = [cell for cell in cells(a.done) if cell in cells(b.done)]
    found = Versus(
        a=_side(a, b),
        b=_side(b, a),
        metric=metric,
        target=target,
        answer="",
        limits="",
        changes=tuple(changes),
        differences=differences,
        same_parameters=same,
        zeros=tuple(zeros),
        maximize=maximize,
    )
    return replace(found, answer=answer(found, shared), limits=limits(found, a, b))


def named(a: Set, b: Set) -> tuple[Set, Set]:
    """Prefix folders of the same name with their parent's name."""
    if a.name != b.name:
        return a, b
    one, other = (f"{found.folder.resolve().parent.name}/{found.name}" for found in (a, b))
    return (a, b) if one == other else (a._replace(name=one), b._replace(name=other))


def _side(own: Set, other: Set) -> Side:
    done, there = own.done, set(cells(other.done))
    keys = {(row["cell"], row["seed"]) for row in own.rows}
    only = tuple(cell for cell in cells(done) if cell not in there)
    return Side(own.name, str(own.folder), len(done), len(keys) - len(done), only)


def _changes(
    a: Sequence[Row], b: Sequence[Row], metric: str, target: float | None, maximize: bool | None
) -> tuple[list[Change], list[FromZero]]:
    """The changes of all shared cells, by measure; separately, those without a ratio because a value is 0."""

    def reached(row: Row) -> float | None:
        return None if target is None else time_to_target(row, metric, target, maximize)

    measures: list[tuple[str, bool, Callable[[Row], float | None]]] = [
        ("seconds", True, lambda row: number(row.get("seconds"))),
        (f"final {metric}", False, lambda row: final_value(row, metric)),
        ("seconds to target", True, reached),
        ("bytes sent", True, lambda row: number(row.get("sent_bytes"))),
    ]
    found: list[Change] = []
    zeros: list[FromZero] = []
    for name, ratio, value in measures:
        pairs = []
        for cell in cells(a):
            sides = [[row for row in rows if row["cell"] == cell] for rows in (a, b)]
            known = [{int(row["seed"]): x for row in some if (x := value(row)) is not None} for some in sides]
            # A mean without runs that missed the target would be too low: such a cell has no time to target.
            whole = name != "seconds to target" or [*map(len, known)] == [*map(len, sides)]
            if not all(known) or not whole:
                continue
            if not ratio or all(x > 0 for side in known for x in side.values()):
                pairs.append(_pair(cell, name, *known, ratio=ratio))
            elif known[0] != known[1] and any(x for side in known for x in side.values()):
                first, second = (mean_interval([*side.values()]) for side in known)
                assert first is not None and second is not None
                zeros.append(FromZero(cell=cell, measure=name, first=first, second=second))
        found += _family(pairs)
    return found, zeros


class _Pair(NamedTuple):
    contrast: Contrast
    change: Change


def _pair(cell: str, measure: str, a: Mapping[int, float], b: Mapping[int, float], *, ratio: bool) -> _Pair:
    first, second = mean_interval([*a.values()]), mean_interval([*b.values()])
    assert first is not None and second is not None
    seeds = sorted(set(a) & set(b))
    points = tuple(b[seed] / a[seed] if ratio else b[seed] - a[seed] for seed in seeds)
    logs = [[math.log(x) if ratio else x for x in side.values()] for side in (a, b)]
    unpaired = welch(*logs)
    gap = fmean(logs[1]) - fmean(logs[0])
    blank = Contrast(
        measure=measure, first="b", second="a", n=len(seeds), ratio=ratio, value=math.exp(gap) if ratio else gap
    )
    contrast = next(iter(compare_pairs(measure, {"b": b, "a": a}, ratio=ratio)), None)
    test: Literal["paired", "Welch", "none"] = "none"
    if contrast is not None and contrast.n > 1:
        test = "paired"
    elif unpaired is not None:
        value, low, high = (math.exp(x) if ratio else x for x in unpaired[:3])
        contrast, test = replace(blank, value=value, low=low, high=high, p=unpaired[3]), "Welch"
    contrast = contrast or blank
    change = Change(
        cell=cell,
        measure=measure,
        ratio=ratio,
        first=first,
        second=second,
        n=len(seeds),
        value=contrast.value,
        low=contrast.low,
        high=contrast.high,
        p=contrast.p,
        p_holm=None,
        test=test,
        p_unpaired=unpaired[3] if unpaired and measure.startswith("seconds") else None,
        points=points,
    )
    return _Pair(contrast, change)


def _family(pairs: Sequence[_Pair]) -> list[Change]:
    """One measure of all cells, with Holm's correction over them."""
    found = [
        replace(pair.change, p_holm=contrast.p_holm)
        for pair, contrast in zip(pairs, corrected([pair.contrast for pair in pairs]), strict=True)
    ]
    tested = [i for i, change in enumerate(found) if change.p_unpaired is not None]
    for i, p in zip(tested, holm([found[i].p_unpaired or 0.0 for i in tested]), strict=True):
        found[i] = replace(found[i], p_unpaired=p)
    return found


def welch(a: Sequence[float], b: Sequence[float]) -> tuple[float, float, float, float] | None:
    """Mean of b minus mean of a, its 95 % interval and p, by Welch's test (unpaired, unequal variances).

    None if a side has fewer than two values, or if neither side varies.
    """
    if min(len(a), len(b)) < 2:
        return None
    parts = [variance(side) / len(side) for side in (a, b)]
    gap, error = fmean(b) - fmean(a), math.sqrt(sum(parts))
    if error <= 1e-12 * max(map(abs, (*a, *b))):
        return None
    # Not scipy's `ttest_ind`, which warns where the values of one side are all the same.
    freedom = sum(parts) ** 2 / sum(part**2 / (len(side) - 1) for part, side in zip(parts, (a, b), strict=True))
    t = load("scipy.stats").t
    reach = float(t.ppf(1 - ALPHA / 2, freedom)) * error
    return gap, gap - reach, gap + reach, float(2 * t.sf(abs(gap) / error, freedom))


def _same_parameters(a: Sequence[Row], b: Sequence[Row]) -> tuple[int, int]:
    there = {(row["cell"], row["seed"]): row for row in b}
    known = []
    for row in a:
        other = there.get((row["cell"], row["seed"]))
        hashes = [set((one or {}).get("param_hash", {}).values()) for one in (row, other)]
        if all(hashes):
            known.append(hashes[0] == hashes[1])
    return sum(known), len(known)


# What the two studies do not have in common.


def _differences(a: Set, b: Set) -> list[Difference]:
    one, other = _facts(a), _facts(b)
    found = []
    for key in dict.fromkeys([*one, *other]):
        first, second = one.get(key, "–"), other.get(key, "–")
        if first != second:
            found.append(Difference(*key, first, second))
    return found


def _facts(found: Set) -> dict[tuple[Any, str], str]:
    """The recorded settings, versions and hardware of a study; only of cells that ran."""
    study, ran = found.study, set(cells(found.done))
    settings = {**_flat(study.settings), **_flat({"stop": asdict(study.stop)})}
    common = {"task": study.plan.task, "launcher": study.plan.launcher, "workers": study.plan.workers}
    settings = {**common, "target": study.target, "maximize": study.maximize, **settings}
    for cell in study.cells:
        if cell.cell in ran:
            settings |= {f"{cell.cell}: {name}": value for name, value in _flat(cell.settings).items()}
    sizes = sorted({row["parameters"] for row in found.done if isinstance(row.get("parameters"), int)})
    settings["parameters of the model"] = ", ".join(f"{size:,}" for size in sizes) or None
    facts: dict[tuple[Any, str], str] = {}
    groups = {"settings": settings, "versions": study.machine.versions, "hardware": study.machine.hardware}
    for kind, values in groups.items():
        facts |= {(kind, name.replace("_", " ")): str(x) for name, x in values.items() if x is not None}
    facts["commit", "commit"] = str(study.machine.commit or "unknown")
    facts["seeds", "seeds"] = ", ".join(map(str, sorted({int(row["seed"]) for row in found.done})))
    return facts


def _flat(values: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Flatten nested tables to names such as `task.lr`."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        full = before + name.replace("task_options", "task").replace("strategy_options", "strategy")
        found |= _flat(value, f"{full}.") if isinstance(value, Mapping) else {full: value}
    return found
