"""The data of a report's section on timelines, for `show_timeline` in `templates/timeline.html.j2`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from podium.lab.report.figures.timeline import Timeline, timelines
from podium.lab.report.figures.topology import Topology, topologies
from podium.lab.study.results import cells, finished
from podium.lab.study.store import Row
from podium.records.timeline import KINDS

Drawn = Callable[[Sequence[Timeline | Topology]], list[dict[str, Any]]]
"""Draws figures to dicts for the templates: `name`, `svg`, `json`."""


def timeline_items(rows: Sequence[Row], drawn: Drawn) -> list[dict[str, Any]]:
    """One item per cell that has a timeline or a topology.

    `place` is the path of the run's `trace.json`, relative to the study's folder; None if there is none.
    """
    times, places = timelines(rows), topologies(rows)
    done = finished(rows)
    return [
        _item(cell, [row for row in done if row["cell"] == cell], times.get(cell), places.get(cell), drawn)
        for cell in cells(done)
        if cell in times or cell in places
    ]


def _item(
    cell: str,
    runs: Sequence[Row],
    time: Timeline | None,
    place: Topology | None,
    drawn: Drawn,
) -> dict[str, Any]:
    figures = [figure for figure in (time, place) if figure is not None]
    timed = next((row for row in runs if row.get("timeline")), {})
    return {
        "cell": cell,
        "seed": int(next(row for row in runs if row.get("timeline") or row.get("topology"))["seed"]),
        "figures": drawn(figures),
        "captions": [figure.caption for figure in figures],
        "marks": [{"kind": e.kind, "seconds": e.seconds, "text": e.text} for e in (time.events if time else ())],
        "left_out": (timed.get("timeline") or {}).get("marks_left_out", 0),
        "kinds": [KINDS[kind] for kind in _kinds(timed)],
        "workers": [_shares(lane, _kinds(timed)) for lane in (timed.get("timeline") or {}).get("ranks", ())],
        "place": next((row["trace"] for row in runs if row.get("trace")), None),
    }


def _kinds(row: Mapping[str, Any]) -> list[str]:
    """The kinds of activity of any worker in the whole run."""
    seen = {kind for lane in (row.get("timeline") or {}).get("ranks", ()) for kind in lane["totals"]}
    return [kind for kind in KINDS if kind in seen]


def _shares(lane: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, Any]:
    """A worker's time by kind of activity, as shares of the time in its records."""
    totals = lane["totals"]
    whole = sum(totals.values())
    return {"rank": lane["rank"], "shares": [totals.get(kind, 0.0) / whole if whole else None for kind in kinds]}
