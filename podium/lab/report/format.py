"""How numbers are written in tables, sentences and figures: as many digits as their spread allows."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from podium.records.phases import COST

if TYPE_CHECKING:
    from podium.lab.stats.statistics import Contrast

MOVED = (
    "MB sent is the total of all ranks; a collective counts as the bytes that a ring would send, also where ranks of "
    "one host share memory and send nothing."
)
"""Explains the column of that name."""
ABSENT = "–"


def plain(value: float | None, digits: int = 3) -> str:
    """A number to `digits` significant digits, without an exponent: 12,345 · 1.23 · 0.00123."""
    if value is None:
        return ABSENT
    if isinstance(value, int) or value == 0:
        return f"{int(value):,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{_decimals(value, digits)}f}"


def spread(mean: float | None, low: float | None, high: float | None) -> str:
    """`mean ± half-width`, both to the half-width's second digit; the mean alone if there is no interval."""
    if mean is None:
        return ABSENT
    if low is None or high is None:
        return plain(mean)
    half = (high - low) / 2
    if half == 0:
        return f"{plain(mean)} ± 0"
    places = _decimals(half, 2)
    return f"{mean:,.{places}f} ± {half:,.{places}f}"


def gap(found: Contrast | None) -> str:
    """A paired difference or ratio, its interval and p; the number alone if it is the same in every seed."""
    if found is None:
        return ABSENT
    if found.ratio:
        told = plain(found.value)
        told += "" if found.low is None or found.exact else f" ({plain(found.low)} to {plain(found.high)})"
    else:
        told = spread(found.value, found.low, found.high)
        none = not told.partition(" ")[0].strip("-0.")  # rounds to zero, which has no sign
        told = told.lstrip("-") if none else f"{'+' * (found.value > 0)}{told}".replace("-", "−")
    return told if found.p_holm is None or found.exact else f"{told}, p {probability(found.p_holm)}"


def between(values: Sequence[float]) -> str:
    """The median, and in brackets the lowest and highest value if they differ."""
    if not values:
        return ABSENT
    middle = plain(statistics.median(values))
    ends = [plain(min(values)), plain(max(values))]
    return middle if ends[0] == ends[1] else f"{middle} ({ends[0]} to {ends[1]})"


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.0f} %"


def probability(p: float | None) -> str:
    """A p-value, never shown as `0`."""
    if p is None:
        return ABSENT
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def pushes(count: int) -> str:
    return "1 push" if count == 1 else f"{count:,} pushes"


def restoration(facts: Mapping[str, Any]) -> str:
    """One entry of a result's `restored`: which server, from which copy, how fast, and how many updates were lost."""
    text = f"server {facts['server']} from {facts['source']}"
    if facts["took_s"] is not None:
        text += f" in {plain(float(facts['took_s']), 2)} s"
    gone = facts["lost_updates"]
    return f"{text}, {gone:,} update{'s' * (gone != 1)} lost" if gone else f"{text}, no update lost"


def mishaps(row: Mapping[str, Any]) -> list[str]:
    """Losses, restorations and dropped pushes of a run; older rows may lack some of them."""
    lost = row.get("lost") or ()
    said = [f"lost rank {', '.join(map(str, lost))}"] if lost else []
    said += [f"restored {restoration(facts)}" for facts in row.get("restored") or ()]
    return [*said, f"dropped {pushes(row['dropped'])}"] if row.get("dropped") else said


def change(facts: Mapping[str, Any]) -> str:
    """One entry of a result's `switches`, as `before → after`."""
    return f"{_strategy(facts['before'])} → {_strategy(facts['after'])}"


def _strategy(phase: str) -> str:
    """A phase without the rule that ends it."""
    return phase.partition(" until ")[0]


def reason(facts: Mapping[str, Any], rules: Sequence[Mapping[str, Any]] = ()) -> str:
    """Why a phase ended: the rule's reason, its name and, if it has them, its value and threshold."""
    text = f"{facts['why']} ({facts['rule']}"
    if facts["value"] is None:  # `epoch 2 reached` says all that `epoch:at=2.0` does
        return str(facts["why"]) if facts["rule"].partition(":")[0] in facts["why"] else text + ")"
    known = [rule["threshold"] for rule in rules if rule["in_force"] and rule["rule"] == facts["rule"]]
    bound = f", threshold {plain(known[0])}" if known and isinstance(known[0], int | float) else ""
    return f"{text}: {plain(facts['value'])}{bound})"


def switch_cost(facts: Mapping[str, Any]) -> str:
    """The cost of a switch in milliseconds, by part."""
    cost = facts["cost_ms"]
    parts = ", ".join(f"{part.replace('_', ' ')} {plain(cost[part], 2)}" for part in COST)
    return f"{plain(cost['total'], 2)} ms: {parts}"


def _decimals(value: float, digits: int) -> int:
    size = math.floor(math.log10(abs(value))) if value else 0
    return min(8, max(0, digits - 1 - size))
