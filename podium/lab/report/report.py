"""The report of a study: one HTML file that needs no network, no script and no second file.

It is made from `study.json` and `results.jsonl` alone, and the same two files give the same bytes. Figures are drawn
into the page for paper and for readers without JavaScript; where plotly is installed, its script is put into the page
as well and replaces them on the screen.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment
from markupsafe import Markup

from podium.lab.report import format as written
from podium.lab.report.answer import Findings
from podium.lab.report.balance import Balanced, balanced_by_cell, division
from podium.lab.report.drawing import plotly_script, style, to_plotly, to_svg
from podium.lab.report.figures import (
    Bars,
    Figure,
    balance_courses,
    convergence_panels,
    cost_bars,
    phase_stacks,
    staleness_bars,
    staleness_histograms,
    tradeoffs,
)
from podium.lab.report.sections import (
    MOST_BARS,
    MOST_CURVES,
    curves_by_setting,
    ending_of,
    interactions_of,
    kind_of,
    pictured,
    precision_of,
    records_of,
    timelines_of,
    title_of,
    views_of,
)
from podium.lab.report.shared import shared_sections
from podium.lab.report.staleness import staleness_by_cell
from podium.lab.report.study_results import StudyResults
from podium.lab.report.templating import environment
from podium.lab.stats.power import MOST_SEEDS, power
from podium.lab.stats.statistics import Mean
from podium.lab.study.reproduce import command, python_call
from podium.lab.study.results import (
    TARGET_SHARE,
    RuleLine,
    cells,
    deciding_rows,
    finished,
    first_level,
    rules_by_cell,
)
from podium.lab.study.store import Row, place_of
from podium.lab.study.study import Study
from podium.records.disk import write_atomically
from podium.records.staleness import Staleness

_BLANK = dict.fromkeys(("error", "loss", "seconds", "steps"))
"""Fields that a row may lack: failed runs and rows of older versions have fewer."""


def write_report(study: str | Path | StudyResults, *, include_plotly: bool = True) -> Path:
    """Write `report.html` into a study's folder, from the files there; `include_plotly=False` saves 4.8 MB."""
    results = StudyResults.read(study)
    path = results.folder / "report.html"
    write_atomically(path, render(results, include_plotly=include_plotly))
    return path


def render(results: StudyResults, *, include_plotly: bool = True) -> str:
    study, rows, findings = results.study, results.rows, results.findings
    script = plotly_script() if include_plotly and rows else None
    order = _order(study, rows)
    said, caution = results.said

    def drawn(figures: Sequence[Figure], places: Mapping[str, int] = order) -> list[dict[str, Any]]:
        return [_figure(figure, places, screen=script is not None) for figure in figures]

    panels = convergence_panels(rows, findings.metric) if len(order) <= MOST_CURVES else []
    histograms = pictured(staleness_histograms(rows), len(order))
    stacks, courses = (
        pictured(phase_stacks(rows, findings.metric), len(order)),
        pictured(balance_courses(rows), len(order)),
    )
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            study=study,
            title=title_of(study),
            answer=said,
            moved=written.MOVED,
            caution=caution,
            findings=findings,
            place=order,
            short={str(row["cell"]): first_level(row) for row in rows},
            records=records_of(rows, results.records),
            sections=shared_sections(results),
            tradeoffs=drawn(tradeoffs(study, rows, findings.metric)),
            design_kind=kind_of(study),
            seeds=len({row["seed"] for row in finished(rows)}) or len(study.seeds),
            ran=len(deciding_rows(rows)),
            lower=findings.lower,
            precision=precision_of(study),
            ending=ending_of(study),
            target_share=TARGET_SHARE,
            legend=[(cell, style(cell, order)[0]) for cell in order] if panels else [],
            convergence=drawn(panels),
            by_setting=[] if panels else curves_by_setting(rows, findings, drawn),
            bytes_assumed=any(panel.assumed for panel in panels),
            cost=drawn(cost_bars(rows) if len(order) <= MOST_BARS else []),
            interactions=interactions_of(study, rows, findings.metric, drawn),
            views=views_of(rows, findings),
            staleness=drawn(staleness_bars(rows) if len(order) <= MOST_BARS else []),
            stale_cells=[
                _stale_cell(cell, tables, drawn([histograms[cell]] if cell in histograms else []))
                for cell, tables in staleness_by_cell(rows).items()
            ],
            phases=[
                _phased(cell, rows, rules, drawn([stacks[cell]] if cell in stacks else []))
                for cell, rules in rules_by_cell(rows).items()
            ],
            balanced=[
                _balanced(cell, found, drawn([courses[cell]] if cell in courses else []))
                for cell, found in balanced_by_cell(rows).items()
            ],
            analyses=results.analyses,
            power=power(findings),
            most_seeds=MOST_SEEDS,
            timelines=timelines_of(rows, drawn),
            runs=[{"line": results.records.line(row), **_run(row, findings)} for row in results.ended],
            python_call=python_call(study),
            command=command(study),
            script=Markup(script.replace("</script", "<\\/script")) if script else None,
        )
    )


def _order(study: Study, rows: Sequence[Row]) -> dict[str, int]:
    names = dict.fromkeys([*study.names, *cells(rows)])
    return {cell: place for place, cell in enumerate(names)}


def _figure(figure: Figure, order: Mapping[str, int], *, screen: bool) -> dict[str, Any]:
    svg = to_svg(figure, order)
    name = f"{figure.name}, per strategy" if isinstance(figure, Bars) else figure.name
    return {
        "name": name,
        "svg": Markup(svg) if svg else None,  # matplotlib escapes the labels
        "json": _script_json(to_plotly(figure, order)) if screen else None,
    }


def _stale_cell(cell: str, tables: Staleness, figures: list[dict[str, Any]]) -> dict[str, Any]:
    workers = sorted({*tables.workers, *tables.dropped})  # all pushes of a worker may have been dropped
    return {
        "cell": cell,
        "figures": figures,
        "lead": tables.lead,
        "bound": tables.bound,
        "dropped": bool(tables.dropped),
        "workers": [
            {"name": f"worker {worker}", "spread": tables.workers.get(worker), "dropped": tables.dropped.get(worker, 0)}
            for worker in workers
        ],
        "ranges": [
            {"name": f"server {server}, range {number}", "spread": spread}
            for (server, number), spread in tables.ranges.items()
        ],
    }


def _phased(cell: str, rows: Sequence[Row], rules: Sequence[RuleLine], figures: list[dict[str, Any]]) -> dict[str, Any]:
    """One strategy's part of the section on phases."""
    return {
        "cell": cell,
        "figures": figures,
        "switches": [
            {
                "seed": row["seed"],
                "change": written.change(facts),
                "why": written.reason(facts, row["rules"]),
                "facts": facts,
            }
            for row in finished(rows)
            if row["cell"] == cell
            for facts in row["switches"]
        ],
        "rules": [_rule(line) for line in rules],
    }


def _balanced(cell: str, found: Balanced, figures: list[dict[str, Any]]) -> dict[str, Any]:
    """One strategy's part of the section on uneven workers."""
    return {
        "cell": cell,
        "figures": figures,
        "parts": found.parts,
        "unit": found.unit,
        "advice": found.advice,
        "seed": found.seed,
        "changes": [
            {"seed": seed, "facts": facts, "before": division(facts["before"]), "after": division(facts["after"])}
            for seed, facts in found.changes
        ],
    }


def _rule(line: RuleLine) -> dict[str, Any]:
    count = f"{len(line.epochs)} of {line.runs}" if line.runs > 1 else "yes"
    return {
        "line": line,
        "fired": count if line.epochs else "not fired" if line.measured else "not measured",
        "epochs": written.between(line.epochs),
        "late": "" if not line.late else "yes" if line.runs == 1 else f"{line.late} of {len(line.epochs)}",
    }


def _script_json(value: Any) -> Markup:
    """JSON that cannot close the script element around it."""
    text = json.dumps(value, separators=(",", ":"), sort_keys=True)
    return Markup(text.replace("<", "\\u003c"))


def _run(row: Row, findings: Findings) -> dict[str, Any]:
    return {
        "cell": row["cell"],
        "seed": row["seed"],
        "status": row.get("status", "unknown"),
        "value": (row.get("metrics") or {}).get(findings.metric, row.get(findings.metric)),
        "row": {**_BLANK, **row},
        "mishaps": written.mishaps(row),
        "place": place_of(str(row.get("run_dir") or "")),
    }


def _environment() -> Environment:
    found = environment()
    found.filters["plain"] = _plain
    found.filters["mean"] = _mean
    found.filters["percent"] = _percent
    found.filters["share"] = written.percent
    found.filters["probability"] = written.probability
    return found


def _plain(value: Any, digits: int = 3) -> str:
    """A number as in tables; a text (`nan` of a diverged run) unchanged."""
    return written.plain(value, digits) if value is None or isinstance(value, int | float) else str(value)


def _mean(value: Mean | None) -> Markup:
    """The mean, with the half-width of its interval below it."""
    if value is None:
        return Markup(written.ABSENT)
    mean, sign, half = written.spread(value.mean, value.low, value.high).partition(" ± ")
    return Markup("{}<small>± {}</small>").format(mean, half) if sign else Markup(mean)


def _percent(value: Mean | None) -> str:
    return written.ABSENT if value is None else written.percent(value.mean)
