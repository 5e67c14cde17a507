"""A sweep's points as a table: for the terminal, and as CSV."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from podium.lab.sweeps.figures import varied
from podium.records.disk import write_atomically
from podium.sweeps.formats import format_mean, format_number, format_value
from podium.sweeps.ranking import Point
from podium.sweeps.result import Sweep

if TYPE_CHECKING:
    from rich.table import Table

MOST = 15
"""The most points in the terminal; the file has all."""


def format_table(sweep: Sweep) -> Table:
    """The best points, for the terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title(sweep), title_justify="left", box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
    names = headings(sweep)
    table.add_column("", justify="right", no_wrap=True)
    for name in names[1:]:
        table.add_column(name, justify="right", overflow="fold")
    for place, point in enumerate(sweep.points[:MOST], 1):
        table.add_row(*[Text(cell) for cell in values(sweep, place, point)])  # text, not markup: it may have brackets

    return table


def title(sweep: Sweep) -> str:
    intervals = any(point.low is not None for point in sweep.points)
    spread = "mean ± half of the 95 % interval" if intervals else "one trial each, no interval"
    spread += ", options at the start" if sweep.copies else ""
    shown = f"the best {MOST} of " if len(sweep.points) > MOST else ""
    return f"{sweep.task}: {shown}{len(sweep.points)} point{'s' * (len(sweep.points) != 1)}, {spread}"


def headings(sweep: Sweep) -> list[str]:
    return ["", *_options(sweep), sweep.metric, "sd", "trials"]


def values(sweep: Sweep, place: int, point: Point) -> list[str]:
    """One point's cells as text."""
    options = [format_value(point.options[name]) if name in point.options else "" for name in _options(sweep)]
    return [str(place), *options, format_mean(point), format_number(point.sd, 2), format_statuses(point)]


def format_statuses(point: Point) -> str:
    """`5`, or `3, 2 stopped`: the trials in the mean, then the other trials by status."""
    others = [f"{count} {status}" for status, count in point.statuses.items() if status != "finished"]
    without = point.statuses.get("finished", 0) - point.n
    return ", ".join([str(point.n), *others, *([f"{without} without a score"] if without > 0 else [])])


def write_csv(sweep: Sweep) -> Path:
    """Write `points.csv` into the sweep's folder: one row per point, the best first."""
    path = Path(sweep.folder) / "points.csv"
    out = io.StringIO(newline="")
    names = list(dict.fromkeys(name for point in sweep.points for name in point.options))
    against = {rival.point: rival for rival in sweep.rivals}
    statuses = ("finished", "stopped", "diverged", "failed")
    writer = csv.writer(out, lineterminator="\n")
    measures = [f"{sweep.metric}_{what}" for what in ("mean", "sd", "low", "high")]
    writer.writerow(["place", "point", *names, *measures, "n", *statuses, "p_against_best"])
    for place, point in enumerate(sweep.points, 1):
        row: list[Any] = [place, point.number, *(_cell(point.options.get(name)) for name in names)]
        row += [point.mean, point.sd, point.low, point.high, point.n, *(point.statuses.get(s, 0) for s in statuses)]
        rival = against.get(point.number)
        writer.writerow([*row, None if rival is None else rival.p])
    write_atomically(path, out.getvalue())
    return path


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | tuple | dict | bool) else value


def _options(sweep: Sweep) -> list[str]:
    """The options that vary; all options if there is only one point."""
    return varied(sweep.points) or list(sweep.points[0].options if sweep.points else ())
