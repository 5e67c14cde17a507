"""A study as a Markdown page, for people who read it in the repository: `README.md` beside the records.

Every measured number on it stands in a row or a sentence that links to the lines of `results.jsonl` it was made from,
or to such a row. What the design sets links to `study.json`, and so do sentences that are quoted from elsewhere. Tables
of others' numbers are set as plain text under the name of their source, so that nobody takes them for ours.

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

from podium.lab.report.answer import Findings, find, tell
from podium.lab.report.drawing.files import stem_of
from podium.lab.report.format import ABSENT, MOVED, plain, probability, spread
from podium.lab.report.links import Records, mark, to
from podium.lab.report.sections import (
    MOST_BARS,
    MOST_CURVES,
    analyses_of,
    ending_of,
    kind_of,
    missing_of,
    precision_of,
    responses_of,
    title_of,
    winners_of,
)
from podium.lab.stats.anova import Term
from podium.lab.stats.checks import Analysis
from podium.lab.stats.speedup import SpeedUps, speedups
from podium.lab.stats.statistics import Mean, Summary
from podium.lab.stats.winners import Winner
from podium.lab.study.reproduce import command, python_call
from podium.lab.study.rows import arranged, crossed, finished
from podium.lab.study.store import Row, Store, modern, write_whole

PAGE = "README.md"
MOST_FIGURES = 6
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
_STUDY = "[study.json](study.json)"


def write_page(folder: str | Path) -> Path:
    """Write `README.md` into a study's folder from what lies there.

    Figures are shown where `write_figures` has drawn them before.
    """
    store = Store(folder)
    path = store.folder / PAGE
    drawn = sorted(file.stem for file in (store.folder / "figures").glob("*.svg"))
    write_whole(path, page(modern(store.read_study()), store.runs(), drawn))
    return path


def page(study: Mapping[str, Any], rows: Sequence[Row], drawn: Iterable[str] = ()) -> str:
    """The page's text; `drawn` are the names of figures that are there, without their endings."""
    records = Records("results.jsonl", rows)
    rows = arranged(rows, [str(cell["cell"]) for cell in study["cells"]])
    findings = find(rows, study.get("target"), study.get("maximize"))
    anchors = {line.cell: f"cell-{place}" for place, line in enumerate(findings.table)}
    all_records = records.whole("all records")
    # Names in sentences are no markup.
    said, caution = escape(tell(findings, rows, study), quote=False).rsplit("\n", 1)
    parts = [
        [f"# {title_of(study)}", "", *_linked(study["question"], _STUDY), ""],
        ["## Answer", "", *_linked(said, to("table", "cells")), ""],
        [
            "What may not be concluded: " + " ".join(_linked(caution, f"{all_records}, {_STUDY}" if rows else _STUDY)),
            "",
        ],
        [line for note in study["notes"] for line in (" ".join(_linked(note, _STUDY)), "")],
        _design(study, rows, findings, all_records),
        _cells(study, rows, findings, anchors, records),
        _responses(responses_of(study, rows, findings), missing_of(study, rows, findings), anchors),
        _winners(winners_of(rows, findings), anchors),
        _speedups(speedups(rows, study["baseline"]), anchors),
        _analyses(analyses_of(study, rows, findings), records.links(crossed(rows)), all_records),
        _references(study["reference"]),
        _figures(_chosen(study, findings, set(drawn)), all_records),
        _again(study),
    ]
    return "\n".join(line for part in parts for line in part).rstrip("\n") + "\n"


def _design(study: Mapping[str, Any], rows: Sequence[Row], findings: Findings, all_records: str) -> list[str]:
    seeds = {row["seed"] for row in finished(rows)} or set(study["seeds"])
    said = [f"- {name}: {', '.join(_code(level) for level in levels)}" for name, levels in study["factors"].items()]
    count = f"{len(study['cells'])} cells, {len(seeds)} seed{'s' * (len(seeds) != 1)}"
    facts = [f"Design, as {_STUDY} has it: {kind_of(study)}; {count}, in an order drawn at random within each seed."]
    for text in (precision_of(study), f"Runs end {ending_of(study)}" if ending_of(study) else ""):
        facts += _linked(f"{text}.", _STUDY) if text else []
    if findings.target is not None:
        goal = f"{plain(findings.target)} {findings.metric}"
        given = study.get("target") is not None
        why = f"set in advance ({_STUDY})" if given else f"chosen after the fact, from {all_records}"
        facts.append(f"The target is {goal}, {why}.")
    if findings.maximize is not None:
        facts.append(f"Of {findings.metric} {'lower' if findings.lower else 'higher'} is better, as {_STUDY} says.")
    return ["## Design", "", *facts, "", *said, ""]


def _cells(
    study: Mapping[str, Any],
    rows: Sequence[Row],
    findings: Findings,
    anchors: Mapping[str, str],
    records: Records,
) -> list[str]:
    """One row per cell, with the records it was made from; a cell that only failed has its failures."""
    if not rows:
        return []
    timed = findings.target is not None
    names = ["cell", "runs", findings.metric, "seconds", *(["seconds to target"] if timed else []), "MB sent"]
    lines = (
        [
            mark(anchors[line.cell]) + _code(line.cell),
            f"{line.runs}" + (f", {line.failed} failed" if line.failed else ""),
            _mean(line.metric),
            _mean(line.seconds),
            *([_to_target(line)] if timed else []),
            _mean(line.moved_mb),
            _share(line.wait_share),
            records.links(_counting(rows, line.cell)),
        ]
        for line in findings.table
    )
    lead = f"Means over seeds ± half of the 95 % t-interval, from {records.whole('all records')}. {MOVED}"
    table = _table([*names, "waiting", "records"], f"lrrr{'r' * timed}rrl", lines)
    found = ["## Cells", "", lead, "", *table]
    left = [str(cell["cell"]) for cell in study["cells"] if cell["cell"] not in anchors]
    if left:
        found += [f"Not run: {', '.join(map(_code, left))}.", ""]
    return found


def _counting(rows: Sequence[Row], cell: str) -> list[Row]:
    own = [row for row in rows if row["cell"] == cell]
    return finished(own) or own


def _to_target(line: Summary) -> str:
    short = f" ({line.reached} of {line.runs} reached it)" if line.runs and line.reached < line.runs else ""
    return _mean(line.to_target) + short


def _responses(found: Sequence[Mapping[str, Any]], missing: Sequence[str], anchors: Mapping[str, str]) -> list[str]:
    said = ["## Other responses", ""] if found or missing else []
    if found:
        names = list(found[0]["means"])
        lines = ([to(_code(one["cell"]), anchors[one["cell"]]), *map(_mean, one["means"].values())] for one in found)
        said += ["What else the study looks at: means over seeds.", ""]
        said += _table(["cell", *names], "l" + "r" * len(names), lines)
    return said + [line for name in missing for line in (f"{_code(name)}: no run has it.", "")]


def _winners(found: Sequence[Winner], anchors: Mapping[str, str]) -> list[str]:
    if not found:
        return []
    measure = found[0].measure
    lead = (
        f"By {measure}. Ahead: the second's mean over the first's. Not told apart: by paired tests, Holm's correction."
    )
    lines = (
        [
            _code(won.setting),
            to(_code(won.level), anchors[won.cell]),
            _mean(won.value),
            _code(won.runner_up),
            ABSENT if won.ratio is None else f"× {plain(won.ratio)}",
            ", ".join(map(_code, won.level_with)) or ABSENT,
        ]
        for won in found
    )
    names = ["setting", "first", measure, "second", "ahead", "not told apart from"]
    return ["## Who comes first where", "", lead, "", *_table(names, "llrlrl", lines)]


def _speedups(found: SpeedUps | None, anchors: Mapping[str, str]) -> list[str]:
    if found is None:
        return []
    lead = (
        f"Seconds of {to(_code(found.baseline), anchors[found.baseline])} over the cell's, seed by seed: geometric "
        "mean and its t-interval. Efficiency: speed-up over how many times the baseline's machines it has (workers, "
        "and servers apart from them)."
    )
    lines = (
        [
            to(_code(line.cell), anchors[line.cell]),
            str(line.nodes),
            plain(line.value),
            ABSENT if line.low is None else f"{plain(line.low)} to {plain(line.high)}",
            plain(line.efficiency),
        ]
        for line in found.lines
    )
    return [
        "## Speed-up",
        "",
        lead,
        "",
        *_table(["cell", "machines", "speed-up", "interval", "efficiency"], "lrrrr", lines),
    ]


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
                    _code(term.name) + (f" (with {', '.join(map(_code, term.aliases))})" if term.aliases else ""),
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
    """Others' numbers, under the name of their source: text in columns, not a table of ours."""
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


def _chosen(study: Mapping[str, Any], findings: Findings, drawn: set[str]) -> list[str]:
    """At most six figures that are there: interactions first, then convergence and cost where these can be read."""
    responses = dict.fromkeys([findings.metric, "seconds", *study["responses"]])
    wanted = [
        f"{response} against {one}, by {other}"
        for response in responses
        for one, other in permutations(study["factors"], 2)
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


def _again(study: Mapping[str, Any]) -> list[str]:
    line = command(study)
    how = ["```", line, "```"] if line else ["```python", *python_call(study).splitlines(), "```"]
    versions = ", ".join(f"{name} {_code(value)}" for name, value in (study.get("versions") or {}).items())
    known = {**(study.get("hardware") or {})}
    if known.get("gpus"):
        known["gpus"] = ", ".join(known["gpus"])
    machine = ", ".join(f"{name.replace('_', ' ')} {_code(value)}" for name, value in known.items())
    commit = f"; commit {_code(study['commit'])}" if study.get("commit") else ""
    return [
        "## How to reproduce",
        "",
        *how,
        "",
        "`podium report . --figures --markdown` makes this page and `report.html`, which has every figure and run.",
        "",
        f"Versions ({_STUDY}): {versions}{commit}.",
        "",
        f"Machine: {machine}.",
    ]


def _linked(text: str, link: str) -> list[str]:
    """A text's sentences, each that has a number with a link to where the number is from."""
    return [_with_link(sentence, link) for sentence in _SENTENCE.split(text.strip())] if text.strip() else []


def _with_link(sentence: str, link: str) -> str:
    if not re.search(r"\d", sentence):
        return sentence
    end = sentence[-1] if sentence[-1] in ".!?" else ""
    return f"{sentence[: len(sentence) - len(end)]} ({link}){end}"


def _table(names: Sequence[str], sides: str, lines: Iterable[Sequence[str]]) -> list[str]:
    rules = ["---:" if side == "r" else "---" for side in sides]
    return [_line(names), _line(rules), *map(_line, lines), ""]


def _line(parts: Iterable[str]) -> str:
    return f"| {' | '.join(parts)} |"


def _share(value: Mean | None) -> str:
    if value is None:
        return ABSENT
    ends = [None if x is None else 100 * x for x in (value.mean, value.low, value.high)]
    return f"{spread(*ends)} %"


def _mean(value: Mean | None) -> str:
    return ABSENT if value is None else spread(value.mean, value.low, value.high)


def _code(value: object) -> str:
    """A name as it is written in programs; a pipe would end a table's cell, a backtick or a new line the code."""
    text = " ".join(str(value).split()).replace("|", chr(92) + "|")
    return f"`` {text} ``" if "`" in text else f"`{text}`"
