"""A study as a Markdown page, for people who read it in the repository: `README.md` beside the records.

Every row or sentence with a measured number links to the lines of `results.jsonl` it was made from, or to such a row.
Facts of the design and sentences quoted from elsewhere link to `study.json`. Tables of others' numbers are plain text
under the name of their source, so that they are not mistaken for ours.

The page is made from `study.json`, `results.jsonl` and the names of the files in `figures/`; the same input gives the
same bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import permutations
from pathlib import Path
from typing import Any

from podium.lab.report.answer import Findings
from podium.lab.report.drawing.files import stem_of
from podium.lab.report.figures import tradeoffs
from podium.lab.report.format import ABSENT, MOVED, between, plain, probability, spread
from podium.lab.report.links import code, mark, to
from podium.lab.report.markdown import markdown_table, section_text
from podium.lab.report.own_page import TEMPLATE, OwnPage
from podium.lab.report.sections import (
    MOST_BARS,
    MOST_CURVES,
    ending_of,
    kind_of,
    precision_of,
    title_of,
)
from podium.lab.report.shared import shared_sections
from podium.lab.report.study_results import StudyResults
from podium.lab.stats.anova import Term
from podium.lab.stats.checks import Analysis
from podium.lab.stats.statistics import Mean, Summary
from podium.lab.study.reproduce import command, python_call
from podium.lab.study.results import crossed, finished, rules_by_cell
from podium.lab.study.store import Row
from podium.lab.study.study import Study
from podium.records.disk import write_atomically

PAGE = "README.md"
MOST_FIGURES = 6
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_STUDY = "[study.json](study.json)"


def write_page(study: str | Path | StudyResults) -> Path:
    """Write `README.md` into a study's folder, from the files there.

    It shows the figures that `write_figures` has drawn before.
    """
    results = StudyResults.read(study)
    path, template, figures = results.folder / PAGE, results.folder / TEMPLATE, results.folder / "figures"
    found = parts(results, sorted(file.stem for file in figures.glob("*.svg")))
    if template.is_file():
        own = OwnPage(results.study, results.file_rows, {**found, "rules": _rules(results)})
        text = own.render(template.read_text(encoding="utf-8"))
        for name, drawing in own.drawings.items():
            write_atomically(figures / f"{name}.svg", drawing.decode())
    else:
        text = "\n\n".join(filter(None, found.values())) + "\n"
    write_atomically(path, text)
    return path


def parts(results: StudyResults, drawn: Iterable[str] = ()) -> dict[str, str]:
    """The parts of the page in order; a part may be empty.

    `drawn`: names of the existing figures, without file extension.
    """
    study, rows, records = results.study, results.rows, results.records
    all_records = records.whole("all records")
    # Names in sentences must not be read as markup.
    said, caution = (escape(text, quote=False) for text in results.said)
    shared: dict[str, list[str]] = {"responses": [], "winners": [], "speedups": [], "against": []}
    for section in shared_sections(results):
        shared[section.name] += [section_text(section, results.places(), records), ""]
    found = {
        "title": [f"# {title_of(study)}"],
        "question": _linked(study.question, _STUDY),
        "answer": ["## Answer", "", *_linked(said, to("table", "cells"))],
        "caution": [
            "What may not be concluded: " + " ".join(_linked(caution, f"{all_records}, {_STUDY}" if rows else _STUDY))
        ],
        "notes": [line for note in study.notes for line in (" ".join(_linked(note, _STUDY)), "")],
        "design": _design(study, rows, results.findings, all_records),
        "cells": _cells(results),
        **shared,
        "analyses": _analyses(results.analyses, records.links(crossed(rows)), all_records),
        "references": _references(study.reference),
        "figures": _figures(_chosen(study, rows, results.findings, set(drawn)), all_records),
        "reproduce": _reproduce(study),
    }
    return {name: "\n".join(lines).rstrip("\n") for name, lines in found.items()}


def _design(study: Study, rows: Sequence[Row], findings: Findings, all_records: str) -> list[str]:
    seeds = {row["seed"] for row in finished(rows)} or set(study.seeds)
    said = [f"- {name}: {', '.join(code(level) for level in levels)}" for name, levels in study.levels.items()]
    count = f"{len(study.cells)} cells, {len(seeds)} seed{'s' * (len(seeds) != 1)}"
    facts = [f"Design, as {_STUDY} has it: {kind_of(study)}; {count}, in an order drawn at random within each seed."]
    for text in (precision_of(study), f"Runs end {ending_of(study)}" if ending_of(study) else ""):
        facts += _linked(f"{text}.", _STUDY) if text else []
    if _is_timed(study, findings):
        goal = f"{plain(findings.target)} {findings.metric}"
        given = study.target is not None
        why = f"set in advance ({_STUDY})" if given else f"chosen after the fact, from {all_records}"
        facts.append(f"The target is {goal}, {why}.")
    if findings.maximize is not None:
        facts.append(f"Of {findings.metric} {'lower' if findings.lower else 'higher'} is better, as {_STUDY} says.")
    return ["## Design", "", *facts, "", *said, ""]


def _cells(results: StudyResults) -> list[str]:
    """One row per cell, with the records it was made from; for a cell without finished runs, its failures."""
    study, findings, records, places = results.study, results.findings, results.records, results.places()
    if not results.rows:
        return []
    timed = _is_timed(study, findings)
    names = ["cell", "runs", findings.metric, "seconds", *(["seconds to target"] if timed else []), "MB sent"]
    lines = [
        [
            mark(f"cell-{places[line.cell]}") + code(line.cell),
            f"{line.runs}" + (f", {line.failed} failed" if line.failed else ""),
            _mean(line.metric),
            _mean(line.seconds),
            *([_to_target(line)] if timed else []),
            _mean(line.moved_mb),
            _share(line.wait_share),
            records.links(results.counting(line.cell)),
        ]
        for line in findings.table
    ]
    lead = f"Means over seeds ± half of the 95 % t-interval, from {records.whole('all records')}. {MOVED}"
    table = _table(*_measured([*names, "waiting", "records"], f"lrrr{'r' * timed}rrl", lines))
    found = ["## Cells", "", lead, "", *table]
    left = [name for name in study.names if name not in places]
    if left:
        found += [f"Not run: {', '.join(map(code, left))}.", ""]
    return found


def _is_timed(study: Study, findings: Findings) -> bool:
    """Whether the page shows time to target: not if the study sets no target and no run reached the default."""
    met = study.target is not None or any(line.reached for line in findings.table)
    return findings.target is not None and met


def _measured(names: Sequence[str], sides: str, lines: Sequence[Sequence[str]]) -> tuple[Any, str, Any]:
    """A table without its empty columns."""
    kept = [i for i in range(len(names)) if any(line[i] != ABSENT for line in lines)]
    return [names[i] for i in kept], "".join(sides[i] for i in kept), [[line[i] for i in kept] for line in lines]


def _to_target(line: Summary) -> str:
    short = f" ({line.reached} of {line.runs} reached it)" if line.runs and line.reached < line.runs else ""
    return _mean(line.to_target) + short


def _rules(results: StudyResults) -> str:
    """For cells with phases: when their rules fired, and when watched rules would have. Only `PAGE.md` can show it."""
    lines = [
        [
            code(cell),
            code(rule.rule),
            "in force" if rule.in_force else "watched",
            f"{len(rule.epochs)} of {rule.runs}" if rule.measured else "not measured",
            between(rule.epochs),
            str(rule.late) if rule.epochs else ABSENT,
            results.records.links(results.counting(cell)),
        ]
        for cell, rules in rules_by_cell(results.ended).items()
        for rule in rules
    ]
    names = ["cell", "rule", "is", "fired in runs", "at epoch", "after the switch", "records"]
    return "\n".join(_table(names, "lllrrrl", lines)) if lines else ""


def _analyses(found: Sequence[Analysis], links: str, all_records: str) -> list[str]:
    if not found:
        return []
    lines = ["## Which factors matter", ""]
    lines += [
        "Analysis of variance with the seed as block; Holm's correction runs over the terms of one response. Times, "
        "rates and bytes are analysed as logarithms.",
        "",
    ]
    for one in found:
        result = one.anova
        lines += [f"### {result.response}", ""]
        lines += [*_linked(" ".join([one.said, *result.notes, one.checks_said]), all_records), ""]
        lines += _table(
            ["term", "df", "F", "p, Holm", "partial η²", "verdict", "records"],
            "lrrrrll",
            (
                [
                    code(term.name) + (f" (with {', '.join(map(code, term.aliases))})" if term.aliases else ""),
                    str(term.df),
                    plain(term.f),
                    probability(term.p_holm),
                    plain(term.partial_eta_squared),
                    _verdict(term),
                    links,
                ]
                for term in result.terms
            ),
        )
    return lines


def _verdict(term: Term) -> str:
    if term.exact is not None:
        return "exact effect" if term.exact else "exactly none"
    return "not tested" if term.p is None else "matters" if term.found else "no effect detected"


def _references(tables: Sequence[Mapping[str, Any]]) -> list[str]:
    """Others' numbers under the name of their source, as text in columns, not as a table."""
    found = []
    for table in tables:
        lines = [[str(value) for value in line] for line in (table["columns"], *table["rows"])]
        widths = [max(len(line[i]) for line in lines if i < len(line)) for i in range(max(map(len, lines)))]
        shown = [
            "  ".join(
                x.rjust(width) if i else x.ljust(width) for i, (x, width) in enumerate(zip(line, widths, strict=False))
            )
            for line in lines
        ]
        quoted = f"quoted in {_STUDY}"
        found += [f"## {table['title']}", "", "Not measured here.", *_linked(table["source"], quoted), ""]
        found += ["```", *(line.rstrip() for line in shown), "```", ""]
        found += [*_linked(table["note"], quoted), ""] if table.get("note") else []
    return found


def _chosen(study: Study, rows: Sequence[Row], findings: Findings, drawn: set[str]) -> list[str]:
    """At most six of the drawn figures: trade-offs, interactions, then convergence and cost if legible."""
    responses = dict.fromkeys([findings.metric, "seconds", *study.responses])
    wanted = [figure.name for figure in tradeoffs(study, rows, findings.metric)]
    wanted += [
        f"{response} against {one}, by {other}"
        for response in responses
        for one, other in permutations(study.factors, 2)
    ]
    if len(findings.table) <= MOST_CURVES:
        wanted += [f"{findings.metric} against {axis}" for axis in ("seconds of training", "epoch")]
    if len(findings.table) <= MOST_BARS:
        wanted += ["seconds of training", "MB sent by all ranks", "% of step time spent waiting"]
    return [name for name in wanted if stem_of(name) in drawn][:MOST_FIGURES]


def _figures(names: Sequence[str], all_records: str) -> list[str]:
    if not names:
        return []
    shown = [f"![{name}](figures/{stem_of(name)}.svg)" for name in names]
    return ["## Figures", "", f"Made from {all_records}.", "", *(line for one in shown for line in (one, ""))]


def _reproduce(study: Study) -> list[str]:
    line = command(study)
    how = ["```", line, "```"] if line else ["```python", *python_call(study).splitlines(), "```"]
    versions = ", ".join(f"{name} {code(value)}" for name, value in study.machine.versions.items())
    known = {**study.machine.hardware}
    if known.get("gpus"):
        known["gpus"] = ", ".join(known["gpus"])
    machine = ", ".join(f"{name.replace('_', ' ')} {code(value)}" for name, value in known.items())
    commit = f"; commit {code(study.machine.commit)}" if study.machine.commit else ""
    return [
        "## How to reproduce",
        "",
        *how,
        "",
        "`podium report . --figures --markdown` makes this page and `report.html`, which has every figure and run.",
        "",
        f"Versions ({_STUDY}): {versions}{commit}.",
        *(["", f"Machine: {machine}."] if machine else []),
    ]


def _linked(text: str, link: str) -> list[str]:
    """The sentences of a text; each one with a number gets the link."""
    return [_with_link(sentence, link) for sentence in _SENTENCE.split(text.strip())] if text.strip() else []


def _with_link(sentence: str, link: str) -> str:
    if not re.search(r"\d", sentence):
        return sentence
    end = sentence[-1] if sentence[-1] in ".!?" else ""
    return f"{sentence[: len(sentence) - len(end)]} ({link}){end}"


def _table(names: Sequence[str], sides: str, lines: Iterable[Sequence[str]]) -> list[str]:
    return [markdown_table(names, sides, list(lines)), ""]


def _share(value: Mean | None) -> str:
    if value is None:
        return ABSENT
    ends = [None if x is None else 100 * x for x in (value.mean, value.low, value.high)]
    return f"{spread(*ends)} %"


def _mean(value: Mean | None) -> str:
    return ABSENT if value is None else spread(value.mean, value.low, value.high)
