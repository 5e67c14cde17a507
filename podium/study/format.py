"""How numbers are written in tables, sentences and figures: as many digits as their spread allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

ABSENT = "–"


def plain(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent: 12,345 · 1.23 · 0.00123."""
    if value is None:
        return ABSENT
    if isinstance(value, int) or value == 0:
        return f"{int(value):,}"
    if not math.isfinite(value):
        return str(value)
    return f"{value:,.{_decimals(value, digits)}f}"


def spread(mean: float | None, low: float | None, high: float | None) -> str:
    """`mean ± half-width`, both to the half-width's second digit; the mean alone where there is no interval."""
    if mean is None:
        return ABSENT
    if low is None or high is None:
        return plain(mean)
    half = (high - low) / 2
    if half == 0:
        return f"{plain(mean)} ± 0"
    places = _decimals(half, 2)
    return f"{mean:,.{places}f} ± {half:,.{places}f}"


def percent(share: float | None) -> str:
    return ABSENT if share is None else f"{100 * share:.0f} %"


def probability(p: float | None) -> str:
    """A p-value as it may honestly be read: never `0`."""
    if p is None:
        return ABSENT
    return "< 0.001" if p < 0.001 else f"{p:.3f}" if p < 0.1 else f"{p:.2f}"


def pushes(count: int) -> str:
    return "1 push" if count == 1 else f"{count:,} pushes"


def restoration(facts: Mapping[str, Any]) -> str:
    """One entry of a result's `restored`: which server, from what, how fast, and what was lost with it."""
    text = f"server {facts['server']} from {facts['source']}"
    if facts["took_s"] is not None:
        text += f" in {plain(float(facts['took_s']), 2)} s"
    gone = facts["lost_updates"]
    return f"{text}, {gone:,} update{'s' * (gone != 1)} lost" if gone else f"{text}, no update lost"


def mishaps(row: Mapping[str, Any]) -> list[str]:
    """What happened in a run that its numbers do not tell; rows of older runs may know of less."""
    lost = row.get("lost") or ()
    said = [f"lost rank {', '.join(map(str, lost))}"] if lost else []
    said += [f"restored {restoration(facts)}" for facts in row.get("restored") or ()]
    return [*said, f"dropped {pushes(row['dropped'])}"] if row.get("dropped") else said


def _decimals(value: float, digits: int) -> int:
    size = math.floor(math.log10(abs(value))) if value else 0
    return min(8, max(0, digits - 1 - size))
