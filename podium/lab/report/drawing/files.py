"""Every figure of a study as SVG and PDF files for papers, in black; the same results give the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from podium.errors import MissingExtra, RecordError
from podium.lab.report.drawing import to_pdf, to_svg_file
from podium.lab.report.figures import (
    Figure,
    balance_courses,
    convergence_panels,
    cost_bars,
    interactions,
    phase_stacks,
    staleness_bars,
    staleness_histograms,
    timelines,
    topologies,
    tradeoffs,
)
from podium.lab.report.study_results import StudyResults
from podium.lab.study.responses import response_of
from podium.lab.study.results import cells, crossed
from podium.lab.study.store import Row

MOST_LETTERS = 80
"""The maximum length of a file name."""


def stem_of(name: str) -> str:
    """The file name of a figure, without extension; `_named` numbers duplicates."""
    return "-".join("".join(c if c.isalnum() else " " for c in name).split()).lower()[:MOST_LETTERS]


def write_figures(study: str | Path | StudyResults) -> list[Path]:
    """Write every figure of a study as SVG and PDF into `figures/` of its folder; returns the files in order."""
    results = StudyResults.read(study)
    order = {cell: place for place, cell in enumerate(dict.fromkeys([*results.study.names, *cells(results.rows)]))}
    target = results.folder / "figures"
    written: list[Path] = []
    try:
        target.mkdir(parents=True, exist_ok=True)
        for name, figure in _named(every_figure(results)).items():
            for ending, drawn in ((".svg", to_svg_file(figure, order)), (".pdf", to_pdf(figure, order))):
                if drawn is None:
                    raise MissingExtra("matplotlib", "study", "drawing figures")
                written.append(target / f"{name}{ending}")
                written[-1].write_bytes(drawn)
    except OSError as error:
        raise RecordError(f"figures cannot be written to {target}: {error.strerror or error}") from error
    return written


def every_figure(results: StudyResults) -> list[Figure]:
    """All figures that a report of these results can have, in its order."""
    study, rows, metric = results.study, results.rows, results.findings.metric
    target, maximize = results.findings.target, results.findings.maximize
    value_of = partial(_value_of, target=target, maximize=maximize)
    responses = dict.fromkeys([metric, "seconds", *study.responses])
    return [
        *tradeoffs(study, rows, metric),
        *convergence_panels(rows, metric),
        *cost_bars(rows),
        *(figure for name in responses for figure in interactions(crossed(rows), name, value_of(name))),
        *staleness_bars(rows),
        *staleness_histograms(rows).values(),
        *phase_stacks(rows, metric).values(),
        *balance_courses(rows).values(),
        *timelines(rows).values(),
        *topologies(rows).values(),
    ]


def _value_of(response: str, target: float | None, maximize: bool | None) -> Callable[[Row], float | None]:
    return partial(response_of, name=response, target=target, maximize=maximize)


def _named(figures: Sequence[Figure]) -> dict[str, Figure]:
    """Figures by file name; duplicate names are numbered."""
    found: dict[str, Figure] = {}
    for figure in figures:
        stem = stem_of(figure.name)
        name, again = stem, 1
        while name in found:
            again += 1
            name = f"{stem}-{again}"
        found[name] = figure
    return found
