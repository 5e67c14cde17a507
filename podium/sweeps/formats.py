"""Numbers and options of a sweep as text."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from podium.sweeps.ranking import Point

_SMALL = 1e-6
"""Below this, numbers are written with an exponent."""


def format_trials(point: Point, config: Mapping[str, Any]) -> str:
    """How many trials a mean is over, as folds and seeds."""
    folds, seeds = (config.get("folds") or {}).get("count", 1), len(config["seeds"])
    if not point.is_whole or folds * seeds != point.n or point.n == 1:
        return f"{point.n} trial{'s' * (point.n != 1)}"
    parts = [f"{n} {what}" for n, what in ((folds, "folds"), (seeds, "seeds")) if n > 1]
    return " × ".join(parts)


def format_options(options: Mapping[str, Any]) -> str:
    """Options on one line, numbers to four digits."""
    return ", ".join(f"{name}={format_value(value)}" for name, value in options.items()) or "the task as it is"


def format_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list | tuple):
        return format_value(value[0]) if len(value) == 1 else f"[{','.join(map(format_value, value))}]"
    return str(value)


def format_mean(point: Point) -> str:
    """`0.971 ± 0.008`: the mean and half of its interval, if it has one."""
    if point.mean is None:
        return "–"
    if point.low is None or point.high is None:
        return format_number(point.mean)
    half = (point.high - point.low) / 2
    if half == 0:
        return f"{format_number(point.mean)} ± 0"
    if half < _SMALL:
        return f"{format_number(point.mean, 8)} ± {format_number(half, 2)}"
    places = _places(half, 2)
    return f"{point.mean:,.{places}f} ± {half:,.{places}f}"


def format_p(p: float | None) -> str:
    """`= 0.012` or `< 0.001`, never `= 0`."""
    if p is None:
        return "–"
    return "< 0.001" if p < 0.001 else f"= {p:.3f}" if p < 0.1 else f"= {p:.2f}"


def format_number(value: float | None, digits: int = 4) -> str:
    """A number to `digits` significant digits, without an exponent unless it is very small."""
    if value is None:
        return "–"
    if 0 < abs(value) < _SMALL:
        return f"{value:.{digits - 1}e}"
    return f"{value:,.{_places(value, digits)}f}" if math.isfinite(value) else str(value)


def _places(value: float, digits: int) -> int:
    size = math.floor(math.log10(abs(value))) if value else 0
    return min(8, max(0, digits - 1 - size))
