"""Sections that the HTML report and the Markdown page share."""

from __future__ import annotations

from collections.abc import Iterator

from podium.lab.report.blocks import Entry, Lines, Name, Section, Source, Table, Text
from podium.lab.report.format import plain
from podium.lab.report.sections import AgainstTable
from podium.lab.report.study_results import StudyResults
from podium.lab.stats.against import Pairing

STUDY = Source("study.json", "study.json")


def shared_sections(results: StudyResults) -> list[Section]:
    """All sections that are not empty, in order."""
    return [*_responses(results), *_winners(results), *_speedups(results), *_against(results)]


def _responses(results: StudyResults) -> Iterator[Section]:
    found, blocks = results.responses, list[Text | Table]()
    if found:
        names = list(found[0]["means"])
        rows = tuple((Name(one["cell"], one["cell"]), *one["means"].values()) for one in found)
        blocks += [["The study's other responses: means over seeds."]]
        blocks += [Table(("cell", *names), "l" + "r" * len(names), rows)]
    blocks += [[Name(name), ": no run has it."] for name in results.missing]
    if blocks:
        yield Section("responses", "Other responses", tuple(blocks))


def _winners(results: StudyResults) -> Iterator[Section]:
    if not (found := results.winners):
        return
    measure = found[0].measure
    rows = tuple(
        (
            Name(won.setting),
            Name(won.level, won.cell),
            won.value,
            Name(won.runner_up),
            None if won.ratio is None else f"× {plain(won.ratio)}",
            [Name(level) for level in won.level_with],
        )
        for won in found
    )
    lead = (
        f"By {measure}. Ahead: the second's mean over the first's. Tied: no difference detected by paired tests with "
        "Holm's correction."
    )
    names = ("setting", "first", measure, "second", "ahead", "tied with")
    yield Section("winners", "Who comes first where", ([lead], Table(names, "llrlrl", rows)))


def _speedups(results: StudyResults) -> Iterator[Section]:
    if (found := results.speedups) is None:
        return
    lead: Text = [
        "Seconds of ",
        Name(found.baseline, found.baseline),
        " over the cell's, seed by seed: geometric mean and its 95 % t-interval. Efficiency: speed-up over the ratio "
        "of machines, the cell's to the baseline's (workers, and servers on machines of their own).",
    ]
    rows = tuple(
        (
            Name(line.cell, line.cell),
            str(line.nodes),
            plain(line.value),
            None if line.low is None else f"{plain(line.low)} to {plain(line.high)}",
            plain(line.efficiency),
        )
        for line in found.lines
    )
    names = ("cell", "machines", "speed-up", "interval", "efficiency")
    yield Section("speedups", "Speed-up", (lead, Table(names, "lrrrr", rows)))


def _against(results: StudyResults) -> Iterator[Section]:
    for table in results.beside:
        names = ("cell", "pairs", *table.columns, *(["verdict"] if table.judged else []), "records")
        rows = tuple(_row(results, table, one) for one in table.held)
        sides = "lr" + "r" * len(table.columns) + "l" * table.judged + "l"
        yield Section("against", table.title, (_beside(table), Table(names, sides, rows)))


def _row(results: StudyResults, table: AgainstTable, one: Pairing) -> tuple[Entry, ...]:
    return Name(one.cell, one.cell), *table.line(one), Lines(results.lines(one.cell, one.reference))


def _beside(table: AgainstTable) -> Text:
    names = [inline for level in table.levels for inline in (", ", Name(level))][1:]
    said: Text = [
        "Each cell beside the one with ",
        *names,
        " and otherwise the same levels, seed by seed: differences, and ratios of times, rates and bytes. Mean, 95 % "
        "t-interval, p after Holm's correction over a column (",
        STUDY,
        ").",
    ]
    if table.margin is None:
        return said
    within = f" Within: at most {table.margin:g} worse by the mean ("
    return [*said, within, STUDY, "). Not settled: the interval crosses that margin."]
