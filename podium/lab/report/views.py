"""The same runs on equal terms: each strategy's metric after equal samples, seconds or bytes, and on equal nodes.

A budget is the largest amount that every run reached, so that no run is judged beyond its end. A run counts by its last
validation at or before the budget; nothing is interpolated, so that validation may lie almost one interval earlier, and
`Standing.at` gives its position. The best is chosen by the same numbers that are tested, so Holm's correction runs over
all pairs, not only over those with the best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from podium.lab.report.format import plain, probability, spread
from podium.lab.stats.statistics import Contrast, Mean, compare_pairs, mean_interval
from podium.lab.study.results import at_validation, cells, final_value, finished, number
from podium.lab.study.store import Row
from podium.records.metrics import lower_is_better

_SLACK = 1 + 1e-9
"""Two sums of the same seconds may differ in their last digits."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """One strategy's results at the budget."""

    cell: str
    n: int
    metric: Mean | None
    seconds: Mean | None
    at: Mean | None = None
    """The amount used at its last validation; None on equal nodes, where whole runs are compared."""
    node_seconds: Mean | None = None


@dataclass(frozen=True, kw_only=True)
class View:
    """One kind of equality; for equal nodes there is one view per number of nodes."""

    name: str
    """`equal samples`, `equal seconds`, `equal bytes` or `equal nodes`."""
    unit: str
    budget: float | None
    """None if there is no common budget; `said` gives the reason."""
    standings: tuple[Standing, ...]
    best: str | None
    """By the metric."""
    contrasts: tuple[Contrast, ...]
    """Pairs with the best, in the metric and, unless seconds are the budget, in seconds."""
    left_out: Mapping[str, str]
    """Strategies without a number here, and why."""
    assumed: bool
    """Whether bytes were spread evenly over a run's samples, because validations did not record them."""
    said: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class _Point(NamedTuple):
    """One validation."""

    used: float
    metric: float | None
    """None if it was not finite."""
    seconds: float | None


Amount = Callable[[Row, Mapping[str, Any]], float | None]


def views(rows: Sequence[Row], metric: str, maximize: bool | None = None) -> list[View]:
    """All views of the finished runs; empty if fewer than two strategies have any.

    `maximize`: whether a higher metric is better; None decides by its name.
    """
    lower = lower_is_better(metric, maximize)
    done = finished(rows)
    if len(cells(done)) < 2:
        return []
    silent = {cell: "it sends nothing" for cell in cells(done) if not any(_sent(row) for row in _of(done, cell))}
    sending = [row for row in done if row["cell"] not in silent]
    bytes_view = _at_budget("equal bytes", "MB", sending, metric, lower, _megabytes, silent)
    return [
        _at_budget("equal samples", "samples", done, metric, lower, _recorded("samples"), {}),
        _at_budget("equal seconds", "s", done, metric, lower, _recorded("seconds"), {}),
        replace(bytes_view, assumed=bytes_view.budget is not None and _assumed(sending)),
        *_by_nodes(done, metric, lower),
    ]


def _recorded(name: str) -> Amount:
    return lambda row, point: at_validation(point, name)


def _at_budget(
    name: str, unit: str, rows: Sequence[Row], metric: str, lower: bool, amount: Amount, left_out: Mapping[str, str]
) -> View:
    courses = [(row, _course(row, metric, amount)) for row in rows]
    out = {**left_out, **{str(row["cell"]): f"no validation with {metric}" for row, course in courses if not course}}
    kept = [(row, course) for row, course in courses if str(row["cell"]) not in out]
    blank = View(
        name=name,
        unit=unit,
        budget=None,
        standings=(),
        best=None,
        contrasts=(),
        left_out=out,
        assumed=False,
        said="",
    )
    if len({row["cell"] for row, _ in kept}) < 2:
        return replace(blank, said=f"{_title(name)}: fewer than two strategies have validations to compare.{_why(out)}")
    budget = min(course[-1].used for _, course in kept)
    early: dict[str, float] = {}
    for row, course in kept:
        if course[0].used > budget * _SLACK:
            early[str(row["cell"])] = max(early.get(str(row["cell"]), 0.0), course[0].used)
    for cell, first in early.items():
        out[cell] = f"its first validation is at {_amount(first, unit)}, beyond the budget: validations are too coarse"
    reached = {
        (str(row["cell"]), int(row["seed"])): [point for point in course if point.used <= budget * _SLACK][-1]
        for row, course in kept
        if str(row["cell"]) not in early
    }
    for cell in [cell for (cell, _), point in reached.items() if point.metric is None]:
        out[cell] = f"its {metric} is not finite there"
    reached = {run: point for run, point in reached.items() if run[0] not in out}
    whole = replace(blank, budget=budget, left_out=out, standings=tuple(_standings(reached, cells(rows))))
    if len(whole.standings) < 2:
        return replace(
            whole, said=f"{_title(name)} ({_amount(budget, unit)}): fewer than two strategies have a value.{_why(out)}"
        )
    pairs = compare_pairs(metric, _by_cell(reached, lambda point: point.metric), ratio=False)
    if unit != "s":
        pairs += compare_pairs("seconds", _by_cell(reached, lambda point: point.seconds), ratio=True)
    return _judged(whole, metric, lower, pairs)


def _by_nodes(rows: Sequence[Row], metric: str, lower: bool) -> list[View]:
    nodes = {cell: _nodes(_of(rows, cell)) for cell in cells(rows)}
    return [
        _on_nodes(count, [row for row in rows if nodes[row["cell"]] == count], metric, lower)
        for count in sorted({count for count in nodes.values() if count is not None})
    ]


def _on_nodes(count: int, rows: Sequence[Row], metric: str, lower: bool) -> View:
    standings = []
    for cell in cells(rows):
        runs = _of(rows, cell)
        seconds = [x for row in runs if (x := number(row.get("seconds"))) is not None]
        standings.append(
            Standing(
                cell=cell,
                n=len(runs),
                metric=mean_interval([x for row in runs if (x := final_value(row, metric)) is not None]),
                seconds=mean_interval(seconds),
                node_seconds=mean_interval([count * x for x in seconds]),
            )
        )
    view = View(
        name="equal nodes",
        unit="node" if count == 1 else "nodes",
        budget=float(count),
        standings=tuple(standings),
        best=None,
        contrasts=(),
        left_out={},
        assumed=False,
        said="",
    )
    known = {(str(row["cell"]), int(row["seed"])): row for row in rows}
    pairs = compare_pairs(metric, _by_cell(known, lambda row: final_value(row, metric)), ratio=False)
    pairs += compare_pairs("seconds", _by_cell(known, lambda row: number(row.get("seconds"))), ratio=True)
    if len([line for line in standings if line.metric]) < 2:
        return replace(view, said=f"{_title(view.name)} ({_amount(count, view.unit)}): nothing to compare with.")
    return _judged(view, metric, lower, pairs)


def _judged(view: View, metric: str, lower: bool, pairs: Sequence[Contrast]) -> View:
    """Name the best, keep its contrasts, and summarise them."""
    known = {line.cell: line.metric for line in view.standings if line.metric is not None}
    best = (min if lower else max)(known, key=lambda cell: known[cell].mean)
    own = tuple(c for c in pairs if best in (c.first, c.second))
    mean = known[best]
    budget = _amount(view.budget or 0.0, view.unit)
    text = f"{_title(view.name)} ({budget}): {best} has the best {metric}, {_mean(mean)}"
    by_metric = [c for c in own if c.measure == metric]
    behind = [f"{_other(c, best)} (Holm p {_p(c)})" for c in by_metric if c.distinct]
    level = [_other(c, best) for c in by_metric if not c.distinct and c.p is not None]
    tested = {_other(c, best) for c in by_metric if c.p is not None}
    untested = [cell for cell in known if cell != best and cell not in tested]
    if not tested:
        text += f"; {_join([f'{cell} has {_mean(known[cell])}' for cell in untested])}"
        if all(line.n == 1 for line in view.standings):
            text += "; one run each, so this is no more than one observation"
        else:
            text += "; fewer than two pairs of runs with the same seed, so nothing is tested"
    elif not untested and all(c.value == 0 and c.p == 1 for c in by_metric):
        text = f"{_title(view.name)} ({budget}): {metric} is the same for all, {_mean(mean)}"
    elif not behind:
        text += f", but no difference that we can detect from {_join(level)}"
    else:
        text += f", better than {_join(behind)}"
        text += f"; not distinguishable from {_join(level)}" if level else ""
    if tested and untested:
        text += f"; too few runs with the same seed to test it against {_join(untested)}"
    return replace(view, best=best, contrasts=own, said=f"{text}.{_why(view.left_out)}")


def _course(row: Row, metric: str, amount: Amount) -> list[_Point]:
    """A run's validations with the metric, sorted by the amount used."""
    found = []
    for point in row.get("history") or ():
        used = amount(row, point)
        if used is not None and (metric in point or metric in (point.get("metrics") or {})):
            found.append(_Point(used, at_validation(point, metric), at_validation(point, "seconds")))
    return sorted(found, key=lambda point: point.used)


def _standings(reached: Mapping[tuple[str, int], _Point], order: Sequence[str]) -> list[Standing]:
    found = []
    for cell in order:
        points = [point for (name, _), point in reached.items() if name == cell]
        if points:
            found.append(
                Standing(
                    cell=cell,
                    n=len(points),
                    metric=mean_interval([point.metric for point in points if point.metric is not None]),
                    seconds=mean_interval([point.seconds for point in points if point.seconds is not None]),
                    at=mean_interval([point.used for point in points]),
                )
            )
    return found


def _by_cell(known: Mapping[tuple[str, int], Any], value: Callable[[Any], float | None]) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {}
    for (cell, seed), one in known.items():
        x = value(one)
        if x is not None:
            found.setdefault(cell, {})[seed] = x
    return found


def _megabytes(row: Row, point: Mapping[str, Any]) -> float | None:
    """MB sent up to a validation: as recorded, else the run's total in proportion to samples."""
    recorded = at_validation(point, "sent_bytes")
    if recorded is not None:
        return recorded / 1e6
    total, samples, part = number(row.get("sent_bytes")), number(row.get("samples")), at_validation(point, "samples")
    return None if total is None or not samples or part is None else total * part / samples / 1e6


def _assumed(rows: Sequence[Row]) -> bool:
    return any(at_validation(point, "sent_bytes") is None for row in rows for point in row.get("history") or ())


def _sent(row: Row) -> float:
    return number(row.get("sent_bytes")) or 0.0


def _nodes(rows: Sequence[Row]) -> int | None:
    """Number of workers and servers of a strategy; older rows have workers only."""
    known = [number(row.get("nodes", row.get("workers"))) for row in rows]
    return next((int(count) for count in known if count is not None), None)


def _of(rows: Sequence[Row], cell: str) -> list[Row]:
    return [row for row in rows if row["cell"] == cell]


def _mean(mean: Mean) -> str:
    return spread(mean.mean, mean.low, mean.high)


def _title(name: str) -> str:
    return name.capitalize()


def _amount(value: float, unit: str) -> str:
    return f"{plain(int(value) if value == int(value) else value)} {unit}"


def _why(left_out: Mapping[str, str]) -> str:
    return "".join(f" Left out: {cell}, {why}." for cell, why in left_out.items())


def _other(contrast: Contrast, cell: str) -> str:
    return contrast.second if contrast.first == cell else contrast.first


def _p(contrast: Contrast) -> str:
    text = probability(contrast.p_holm)
    return text if text.startswith("<") else f"= {text}"


def _join(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
