"""A comparison's table for the terminal, with rich or as plain text of at most 80 columns."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from podium.lab.report.format import ABSENT, percent, plain, spread
from podium.lab.stats.statistics import Mean, Summary

if TYPE_CHECKING:
    from rich.table import Table

    from podium.lab.study.run import Comparison

COLUMNS = 80
_WIDTHS = (20, 15, 8, 8, 7, 6, 4, 5)


def format_table(comparison: Comparison) -> Table:
    """The table as rich draws it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    # No edges and no padding: eight columns then fit into 80.
    table = Table(title=title(comparison), title_justify="left", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    names = headings(comparison)
    table.add_column(names[0], overflow="fold", min_width=18)
    for name in names[1:]:
        table.add_column(name, justify="right", no_wrap=True)
    for line in comparison.table:
        # Text, not markup: a label may contain brackets.
        table.add_row(*[Text(cell) for cell in values(line)])
    return table


def format_plain(comparison: Comparison) -> str:
    """The same table as text for pipes and logs; long names take several lines."""
    lines = [title(comparison), _row(headings(comparison)), _row(["-" * width for width in _WIDTHS])]
    lines += [_row(values(line)) for line in comparison.table]
    return "\n".join(lines)


def title(comparison: Comparison) -> str:
    intervals = any(line.seconds is not None and line.seconds.low is not None for line in comparison.table)
    spread_over = "mean over seeds ± half of the 95 % interval" if intervals else "one run each, no interval"
    return f"{comparison.name}: {spread_over}"


def headings(comparison: Comparison) -> list[str]:
    target = "to target" if comparison.target is None else f"to {plain(comparison.target)}"
    return ["strategy", comparison.metric, "seconds", target, "samp/s", "MB", "wait", "stale"]


def values(line: Summary) -> list[str]:
    """One strategy's cells as text, failures beside its name."""
    # Broken before its options, which distinguish strategies of the same name.
    name = line.cell if len(line.cell) <= _WIDTHS[0] else line.cell.replace(":", ":\n", 1)
    name += f" ({line.failed} failed)" if line.failed else ""
    reached = _mean(line.to_target) if line.reached == line.runs else f"{line.reached}/{line.runs} runs"
    return [
        name,
        ABSENT if line.metric is None else spread(line.metric.mean, line.metric.low, line.metric.high),
        _mean(line.seconds),
        reached if line.runs else ABSENT,
        _mean(line.samples_per_s),
        _mean(line.moved_mb),
        ABSENT if line.wait_share is None else percent(line.wait_share.mean),
        _mean(line.staleness),
    ]


def _mean(mean: Mean | None) -> str:
    return ABSENT if mean is None else plain(mean.mean)


def _row(cells: list[str]) -> str:
    wrapped = [textwrap.wrap(cell, width) or [""] for cell, width in zip(cells, _WIDTHS, strict=True)]
    lines = []
    for k in range(max(map(len, wrapped))):
        parts = [part[k] if k < len(part) else "" for part in wrapped]
        padded = [
            f"{part:<{width}}" if place == 0 else f"{part:>{width}}"
            for place, (part, width) in enumerate(zip(parts, _WIDTHS, strict=True))
        ]
        lines.append(" ".join(padded).rstrip())
    return "\n".join(lines)
