"""Staleness of each strategy's updates over all its seeds, for the figure and the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

from podium.lab.study.results import cells, finished
from podium.lab.study.store import Row
from podium.records.staleness import Spread, Staleness, pooled

Place = TypeVar("Place", int, tuple[int, int])


def staleness_by_cell(rows: Sequence[Row]) -> dict[str, Staleness]:
    """The tables of each strategy that made updates, its runs pooled; the bound is the largest of its runs."""
    done = [row for row in finished(rows) if row.get("staleness_by")]  # older rows do not have it
    found = {}
    for cell in cells(done):
        runs = [Staleness.from_dict(row["staleness_by"]) for row in done if row["cell"] == cell]
        together = _together(runs)
        if together.overall is not None or together.dropped:
            found[cell] = together
    return found


def _together(runs: Sequence[Staleness]) -> Staleness:
    dropped: Counter[int] = Counter()
    for run in runs:
        dropped.update(run.dropped)
    return Staleness(
        overall=pooled(run.overall for run in runs if run.overall is not None),
        workers=_pooled_by([run.workers for run in runs]),
        ranges=_pooled_by([run.ranges for run in runs]),
        dropped=dict(sorted(dropped.items())),
        lead=max((run.lead for run in runs if run.lead is not None), default=None),
        bound=max((run.bound for run in runs if run.bound is not None), default=None),
    )


def _pooled_by(tables: Iterable[Mapping[Place, Spread]]) -> dict[Place, Spread]:
    some = list(tables)
    found = {}
    for place in sorted({place for table in some for place in table}):
        spread = pooled(table[place] for table in some if place in table)
        assert spread is not None
        found[place] = spread
    return found
