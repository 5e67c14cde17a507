"""The comparison of two sets of results as an HTML page."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from markupsafe import Markup

from podium.lab.report.drawing import to_svg
from podium.lab.report.figures import Bar, Bars
from podium.lab.report.format import probability
from podium.lab.report.sections import MOST_BARS
from podium.lab.report.templating import environment
from podium.lab.report.versus.base import PAGE, Change, Set, Versus
from podium.lab.report.versus.changes import compare_sets, named, read_set
from podium.lab.report.versus.prose import amount, heading, size, worded
from podium.records.disk import write_atomically


def write_versus(
    a: str | Path, b: str | Path, out: str | Path | None = None, *, maximize: bool | None = None
) -> tuple[Versus, Path]:
    """Compare two studies and write `versus.html` into `out`, by default the second study's folder.

    The page needs no network, no script and no second file; the same folders give the same bytes.
    """
    one, other = named(read_set(a, maximize), read_set(b, maximize))
    found = compare_sets(one, other)
    path = (other.folder if out is None else Path(out)) / PAGE
    write_atomically(path, render(found, one, other, path.parent))
    return found, path


def render(found: Versus, a: Set, b: Set, folder: Path) -> str:
    """The HTML; `folder` is where the page will be, for relative links to the two studies."""
    return (
        environment()
        .get_template("versus.html.j2")
        .render(
            found=found,
            sides=[("A", found.a, _seen_from(folder, a)), ("B", found.b, _seen_from(folder, b))],
            tables=[_table(found, measure, a, b, folder) for measure in found.measures],
            zeros=[
                (one.cell, heading(found, one.measure), size(one, one.first), size(one, one.second))
                for one in found.zeros
            ],
            figures=_figures(found),
        )
    )


def _seen_from(folder: Path, found: Set) -> str:
    """A study's folder relative to `folder`, for links."""
    return Path(os.path.relpath(found.folder.resolve(), folder.resolve())).as_posix()


def _table(found: Versus, measure: str, a: Set, b: Set, folder: Path) -> dict[str, Any]:
    changes = found.of(measure)
    timed = measure.startswith("seconds")
    shown = []
    for change in changes:
        records = []
        for one in (a, b):
            place = f"{_seen_from(folder, one)}/results.jsonl"
            records.append([(n, f"{place}#L{n}") for n in _numbered(one, change.cell)])
        shown.append(
            {
                "cell": change.cell,
                "first": size(change, change.first),
                "second": size(change, change.second),
                "n": change.n,
                "amount": amount(change),
                "p": "–" if change.exact else probability(change.p),
                "p_holm": "–" if change.exact else probability(change.p_holm),
                "p_unpaired": probability(change.p_unpaired),
                "test": change.test,
                "verdict": worded(found, measure, change.verdict) + ", by the same in every pair" * _certain(change),
                "records": records,
            }
        )
    return {"name": heading(found, measure), "ratio": changes[0].ratio, "timed": timed, "lines": shown}


def _certain(change: Change) -> bool:
    return change.exact and change.verdict in ("larger", "smaller")


def _numbered(found: Set, cell: str) -> list[int]:
    """The lines of `results.jsonl` that a cell's numbers come from."""
    place = {id(row): n for n, row in enumerate(found.as_written, 1)}
    return sorted(place[id(row)] for row in found.done if row["cell"] == cell)


def _figures(found: Versus) -> list[dict[str, Any]]:
    """A bar chart per ratio, second set over first. Differences get none, since they may be below 0."""
    drawn = []
    for measure in found.measures:
        changes = [change for change in found.of(measure) if change.ratio]
        if not changes or len(changes) > MOST_BARS or all(change.value == 1 for change in changes):
            continue
        bars = tuple(Bar(one.cell, one.value, one.low, one.high, one.points) for one in changes)
        name = f"{heading(found, measure)}, B over A"
        order = {change.cell: place for place, change in enumerate(changes)}
        svg = to_svg(Bars(name, bars), order)
        if svg is not None:
            drawn.append({"name": name, "svg": Markup(svg), "json": None})  # matplotlib escapes the labels
    return drawn
