"""The best level of the first factor in each setting: the most common question to a study of several factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from podium.lab.stats.statistics import Contrast, Mean, Summary
from podium.lab.study.results import by_setting, crossed, first_level
from podium.lab.study.store import Row
from podium.records.metrics import lower_is_better


@dataclass(frozen=True)
class Winner:
    """The best level in one setting, and the levels tied with it."""

    setting: str
    cell: str
    level: str
    value: Mean
    measure: str
    of: int
    """How many levels had a value to compare."""
    level_with: tuple[str, ...]
    """Levels tied with it: no difference was detected."""
    runner_up: str = ""
    ratio: float | None = None
    """The runner-up's mean over the best's."""


def winners(
    rows: Sequence[Row],
    table: Sequence[Summary],
    contrasts: Sequence[Contrast],
    metric: str,
    measure: str,
    *,
    maximize: bool | None = None,
) -> list[Winner]:
    """The best level of each setting. `measure` is `seconds to target`, `seconds` or `final METRIC`."""
    lines = {line.cell: line for line in table}
    found = []
    for setting, some in by_setting(crossed(rows)).items():
        names = {str(row["cell"]): first_level(row) for row in some}
        values = {cell: mean for cell in names if (mean := _value(lines[cell], measure)) is not None}
        if len(values) < 2:
            continue
        lower = measure.startswith("seconds") or lower_is_better(metric, maximize)
        order = sorted(values, key=lambda cell: values[cell].mean if lower else -values[cell].mean)
        best = order[0]
        pairs = [c for c in contrasts if c.measure == measure and c.setting == setting and best in (c.first, c.second)]
        apart = {c.second if c.first == best else c.first for c in pairs if c.distinct}
        alike = [cell for cell in order[1:] if cell not in apart]  # untested levels, too
        found.append(
            Winner(
                setting,
                best,
                names[best],
                values[best],
                measure,
                len(values),
                tuple(names[cell] for cell in alike),
                names[order[1]],
                values[order[1]].mean / values[best].mean if values[best].mean else None,
            )
        )
    return found


def tell(found: Sequence[Winner], claim: str, settings: int) -> str:
    """A sentence: in which settings each level wins, in which the best is tied, how many cannot be compared."""
    if not found:
        return f"{claim}: no setting has two to compare."
    ranked: dict[str, list[str]] = {}
    for winner in found:
        if not winner.level_with:
            ranked.setdefault(winner.level, []).append(winner.setting)
    open_ = [winner.setting for winner in found if winner.level_with]
    parts = [f"{level} {_where(won, len(found))}" for level, won in sorted(ranked.items(), key=lambda x: -len(x[1]))]
    if open_:
        nobody = "no difference that we can detect between the first and at least one other"
        parts.append(f"{nobody} {_where(open_, len(found))}")
    if (rest := settings - len(found)) > 0:
        parts.append(f"{rest} more setting{'s have' if rest > 1 else ' has'} fewer than two to compare")
    return f"{claim}: {'; '.join(parts)}."


def _where(settings: Sequence[str], total: int) -> str:
    """The number of settings, with their names if there are at most three."""
    if len(settings) == total:
        one = f"in the one setting that has two to compare ({settings[0]})"
        return one if total == 1 else "in both settings" if total == 2 else f"in all {total} settings"
    which = f" ({' · '.join(settings)})" if len(settings) <= 3 else ""
    return f"in {len(settings)} of {total} settings{which}"


def _value(line: Summary, measure: str) -> Mean | None:
    if measure == "seconds":
        return line.seconds
    if measure == "seconds to target":
        return line.to_target if line.runs and line.reached == line.runs else None
    return line.metric
