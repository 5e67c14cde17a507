"""Trade-offs: each cell's change in the metric against its change in bytes or time, both relative to a reference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from podium.lab.stats.against import against
from podium.lab.study.responses import is_ratio
from podium.lab.study.results import first_level, setting_of

if TYPE_CHECKING:
    from podium.lab.study.store import Row
    from podium.lab.study.study import Study

FEWEST = 3
"""With fewer cells there is no figure; the table is enough."""


@dataclass(frozen=True)
class CellPoint:
    """One cell: ratio of the cost, difference of the metric, its interval."""

    name: str
    x: float
    y: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class Tradeoff:
    """The cells of one setting beside their reference."""

    metric: str
    cost: str
    reference: str
    setting: str
    places: tuple[CellPoint, ...]
    margin: float | None

    @property
    def name(self) -> str:
        return f"{self.metric} against {self.cost}, both over {self.reference}" + f", {self.setting}" * bool(
            self.setting
        )


def tradeoffs(study: Study, rows: Sequence[Row], metric: str) -> list[Tradeoff]:
    """A figure for each `[[against]]` table, setting and cost that at least `FEWEST` cells have."""
    at = {str(row["cell"]): row for row in rows}
    names = [metric, "seconds", *study.responses]
    found = []
    for table in study.against:
        held = [one for one in against(rows, table, names, metric) if metric in one.gaps]
        for cost in filter(is_ratio, dict.fromkeys(table.responses or names)):
            by_setting: dict[str, list[CellPoint]] = {}
            for one in held:
                if cost in one.gaps:
                    gap, row = one.gaps[metric], at[one.cell]
                    spot = CellPoint(first_level(row), one.gaps[cost].value, gap.value, gap.low, gap.high)
                    by_setting.setdefault(setting_of(row), []).append(spot)
            base = ", ".join(map(str, table.levels.values()))
            found += [
                Tradeoff(metric, cost, base, setting, tuple(some), table.margin)
                for setting, some in by_setting.items()
                if len(some) >= FEWEST
            ]
    return found
