"""Numbers and tables as Markdown."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from podium.lab.report.format import ABSENT, plain, spread
from podium.lab.stats.statistics import Mean


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> str:
    """A table; all but the first columns are set to the right."""
    rule = ["---"] * left + ["---:"] * (len(head) - left)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in [head, rule, *rows])


def interval(mean: Mean | None) -> str:
    return ABSENT if mean is None else spread(mean.mean, mean.low, mean.high)


def part(mean: Mean | None) -> str:
    """A part of a whole, to three places: virtual time varies too little for its own spread to say how many."""
    if mean is None:
        return ABSENT
    if mean.low is None or mean.high is None:
        return f"{mean.mean:.3f}"
    half = f"{(mean.high - mean.low) / 2:.3f}"
    return f"{mean.mean:.3f} ± {half}" if float(half) else f"{mean.mean:.3f}"


def signed(mean: Mean | None) -> str:
    """A difference, with its sign."""
    text = interval(mean)
    if mean is None or not text.partition(" ")[0].strip("-0."):  # rounds to zero, which has no sign
        return text.lstrip("-")
    return f"+{text}" if mean.mean > 0 else text.replace("-", "−")


def reached(times: Sequence[float], of: int) -> str:
    """The median over the seeds that got there, and how many did where not all."""
    if not times:
        return "never"
    text = plain(statistics.median(times), 2)
    return text if len(times) == of else f"{text} ({len(times)} of {of})"


def listed(values: Sequence[float], decimals: int) -> str:
    return " ".join(f"{value:.{decimals}f}" for value in values)
