"""Sections of a report on a study of several factors: design, settings side by side, analyses, figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from podium.lab.report import format as written
from podium.lab.report.answer import Findings
from podium.lab.report.drawing import style
from podium.lab.report.figures import Interaction, convergence, interactions
from podium.lab.report.figures.items import timeline_items
from podium.lab.report.links import Records
from podium.lab.report.views import views
from podium.lab.stats.against import Pairing, against
from podium.lab.stats.checks import Analysis, analyse
from podium.lab.stats.statistics import Mean, mean_interval
from podium.lab.stats.winners import Winner, winners
from podium.lab.study.responses import is_ratio, response_of
from podium.lab.study.results import by_setting, cells, crossed, finished, first_level
from podium.lab.study.store import Row
from podium.lab.study.study import Study

MOST_CURVES = 8
"""The most cells in one panel; with more, each setting gets its own panels."""
MOST_BARS = 16
MOST_PICTURED = 6
"""The number of cells of a large study that get their own figures; the rows have the data for the others."""


def title_of(study: Study) -> str:
    what = "strategies" if list(study.factors) == ["strategy"] else "cells"
    return f"{study.name}: {len(study.cells)} {what} compared"


def records_of(rows: Sequence[Row], records: Records) -> dict[str, list[int]]:
    """By cell, the lines of `results.jsonl` that its numbers come from."""
    found: dict[str, list[int]] = {cell: [] for cell in cells(rows)}
    for row in finished(rows):
        found[str(row["cell"])].append(records.line(row))
    return found


def winners_of(rows: Sequence[Row], findings: Findings) -> list[Winner]:
    if len(by_setting(finished(rows))) < 2:
        return []
    measure = findings.speed_measure
    return winners(rows, findings.table, findings.contrasts, findings.metric, measure, maximize=findings.maximize)


def responses_of(study: Study, rows: Sequence[Row], findings: Findings) -> list[dict[str, Any]]:
    """Each cell's means of the study's responses that are not columns of the main table."""
    shown = {findings.metric, "seconds", "seconds to target", "samples_per_s", "sent_bytes", "wait_share"}
    absent = missing_of(study, rows, findings)
    names = [name for name in study.responses if name not in shown and name not in absent]
    done = finished(rows)

    def mean(cell: str, name: str) -> Mean | None:
        values = [response_of(row, name, findings.target) for row in done if row["cell"] == cell]
        return mean_interval([value for value in values if value is not None])

    if not names:
        return []
    return [{"cell": cell, "means": {name: mean(cell, name) for name in names}} for cell in cells(done)]


def missing_of(study: Study, rows: Sequence[Row], findings: Findings) -> list[str]:
    """Responses that no finished run has; empty while no run has finished."""
    done = finished(rows)

    def known(row: Row, name: str) -> bool:
        return response_of(row, name, findings.target, maximize=findings.maximize) is not None

    return [name for name in dict.fromkeys(study.responses) if done and not any(known(row, name) for row in done)]


@dataclass(frozen=True)
class AgainstTable:
    """A table of cells beside a reference."""

    title: str
    levels: tuple[str, ...]
    """Of the reference."""
    margin: float | None
    names: tuple[str, ...]
    """Of responses that any pair has."""
    held: tuple[Pairing, ...]

    @property
    def judged(self) -> bool:
        return any(one.verdict for one in self.held)

    @property
    def columns(self) -> list[str]:
        return [f"{name}, {'ratio' if is_ratio(name) else 'difference'}" for name in self.names]

    def line(self, one: Pairing) -> list[str]:
        """A cell's values as texts: pairs, each response, and the verdict where there is one."""
        pairs = max((gap.n for gap in one.gaps.values()), default=0)
        gaps = [written.gap(one.gaps.get(name)) for name in self.names]
        return [str(pairs), *gaps, *([one.verdict or written.ABSENT] if self.judged else [])]


def against_tables(study: Study, rows: Sequence[Row], findings: Findings) -> list[AgainstTable]:
    """The study's `[[against]]` tables, without empty ones."""
    names = list(dict.fromkeys([findings.metric, "seconds", *study.responses]))
    found = []
    for table in study.against:
        held = against(rows, table, names, findings.metric, lower=findings.lower)
        known = tuple(dict.fromkeys(name for one in held for name in one.gaps))
        levels = tuple(map(str, table.levels.values()))
        title = table.title or f"Against {', '.join(levels)}"
        found.append(AgainstTable(title, levels, table.margin, known, tuple(held)))
    return [table for table in found if table.names]


def kind_of(study: Study) -> str:
    runs = math.prod(len(levels) for levels in study.levels.values())
    if study.kind == "fractional":
        return f"a fraction of the {runs} combinations, resolution {study.plan.resolution}"
    if study.kind == "latin-hypercube":
        return "a Latin hypercube: points spread evenly through the ranges"
    left = runs - len(study.cells)
    return "every combination of levels" if not left else f"every combination of levels but {left} left out by design"


def precision_of(study: Study) -> str:
    asked = study.repeated
    if asked.half_width is None:
        return ""
    return (
        f"After {asked.least}, more were added until each cell's interval of {asked.response} reached no further "
        f"than {100 * asked.half_width:g} % of its mean, {asked.most} at most"
    )


def ending_of(study: Study) -> str:
    stop = study.stop
    said = [f"{written.plain(stop.seconds)} s of training"] if stop.seconds is not None else []
    said += ["the target"] if stop.target else []
    return f"at the first validation that has reached {' or '.join(said)}" if said else ""


def curves_by_setting(rows: Sequence[Row], findings: Findings, drawn: Any) -> list[dict[str, Any]]:
    """Convergence in each setting: one curve per level of the first factor, with the same colour in all settings."""
    levels = {level: place for place, level in enumerate(dict.fromkeys(first_level(row) for row in rows))}
    found = []
    for setting, some in by_setting(finished(rows)).items():
        named = [{**row, "cell": first_level(row)} for row in some]
        panels = [convergence(named, findings.metric, axis) for axis in ("seconds", "mb")]
        known = [panel for panel in panels if panel is not None]
        if known:
            chips = [(level, style(level, levels)[0]) for level in cells(named)]
            found.append({"setting": setting, "figures": drawn(known, levels), "legend": chips})
    return found


def interactions_of(study: Study, rows: Sequence[Row], metric: str, drawn: Any) -> list[dict[str, Any]]:
    """How two factors act together on the metric and on time."""
    if len(study.factors) < 2:
        return []
    found: list[Interaction] = []
    for name in (metric, "seconds"):
        found += interactions(crossed(rows), name, partial(response_of, name=name))
    levels = {level: place for place, level in enumerate(dict.fromkeys(first_level(row) for row in rows))}
    return list(drawn(found, levels))


def views_of(rows: Sequence[Row], findings: Findings) -> list[dict[str, Any]]:
    """The views of each setting separately: they compare runs that differ only in the first factor."""
    found = []
    for setting, some in by_setting(rows).items():
        named = [{**row, "cell": first_level(row)} for row in some] if setting else some
        if shown := views(named, findings.metric, findings.maximize):
            found.append({"setting": setting, "views": shown})
    return found


def analyses_of(study: Study, rows: Sequence[Row], findings: Findings) -> list[Analysis]:
    """The analysis of variance of each response with its checks; empty for a single factor."""
    if len(study.factors) < 2:
        return []
    return analyse(
        crossed(rows),
        list(dict.fromkeys([findings.metric, "seconds", *study.responses])),
        target=findings.target,
        factors=study.levels,
        aliases=study.plan.aliases,
        order=study.order(),
        maximize=findings.maximize,
    )


def pictured(found: Mapping[str, Any], count: int) -> Mapping[str, Any]:
    """Figures by cell: all of a small study, those of the first cells of a large one."""
    return found if count <= MOST_BARS else dict(list(found.items())[:MOST_PICTURED])


def timelines_of(rows: Sequence[Row], drawn: Any) -> list[dict[str, Any]]:
    """For the first cells: when ranks computed and waited, the traffic between ranks, and the path of the trace."""
    names = cells(row for row in finished(rows) if row.get("timeline") or row.get("topology"))[:MOST_PICTURED]
    return timeline_items([row for row in rows if row["cell"] in names], drawn)
