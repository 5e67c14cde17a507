"""How many times faster than a baseline each cell is, and its parallel efficiency."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.stats.statistics import compare_pairs
from podium.lab.study.results import cells, finished, number
from podium.lab.study.store import Row


@dataclass(frozen=True)
class SpeedUp:
    """One cell: seconds of the baseline over the cell's, paired by seed."""

    cell: str
    nodes: int
    n: int
    value: float
    low: float | None
    high: float | None
    machines: float
    """Machines of the cell over machines of the baseline."""

    @property
    def efficiency(self) -> float:
        """Speed-up over the ratio of machines: 1 is perfect scaling."""
        return self.value / self.machines


@dataclass(frozen=True)
class SpeedUps:
    """All cells against one baseline."""

    baseline: str
    lines: tuple[SpeedUp, ...]


def speedups(rows: Sequence[Row], baseline: Mapping[str, Any]) -> SpeedUps | None:
    """Speed-ups over the one cell with these levels; None unless exactly one cell with them has a finished run."""
    done = finished(rows)
    base = cells(row for row in done if _has(row, baseline))
    if not baseline or len(base) != 1:
        return None
    times: dict[str, dict[int, float]] = {cell: {} for cell in cells(done)}
    for row in done:
        seconds = number(row.get("seconds"))
        if seconds is not None and seconds > 0:
            times[row["cell"]][int(row["seed"])] = seconds
    nodes = {row["cell"]: int(row.get("nodes") or row.get("workers") or 1) for row in done}
    lines = []
    for cell in times:
        if cell == base[0]:
            continue
        for pair in compare_pairs("seconds", {base[0]: times[base[0]], cell: times[cell]}, ratio=True):
            more = nodes[cell] / nodes[base[0]]
            lines.append(SpeedUp(cell, nodes[cell], pair.n, pair.value, pair.low, pair.high, more))
    return SpeedUps(base[0], tuple(lines))


def _has(row: Mapping[str, Any], levels: Mapping[str, Any]) -> bool:
    found = row.get("levels") or {}
    return all(found.get(name) == level for name, level in levels.items())
