"""A study's own page: `PAGE.md` beside its records, prose with placeholders for tables, figures and numbers.

`PAGE.md` is a Jinja template, and `podium report DIR --markdown` makes `README.md` from it. Its author types no
numbers: each comes from an expression and links to its lines of `results.jsonl`. The names that a template may use:

    runs, failed             pandas tables of the finished and the failed runs (`podium.lab.report.frame`)
    sessions                 the same for sessions: machine, time and versions of the runs
    missing                  names of cells without a run
    where(frame, task="x", arm=["a", "b"])  its rows with these levels
    means(runs, by, values)  means over seeds with 95 % intervals, one row per group
    table(frame, columns)    a table in Markdown; `columns` maps headings to columns
    grid(frame, down, across, value)  one value by two factors
    curves(name, frame, …)   a figure: lines over a number, a panel for each level of a factor
    bars(name, frame, …)     a figure: a bar per row of the frame
    cite(text, frame)        a text that links to the first of these runs
    plain(number, digits)    a number as in tables
    part.NAME                a part of the default page: `part.answer`, `part.cells` …
    part.rules               when the rules that end phases fired, and when watched rules would have
    study                    the contents of `study.json`
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment

from podium.errors import ConfigError
from podium.lab.report.drawing.panels import draw_bars, draw_curves
from podium.lab.report.format import ABSENT, plain, spread
from podium.lab.report.frame import frame, means, sessions, where
from podium.lab.report.links import Records, code, mark, place
from podium.lab.report.markdown import markdown_table
from podium.lab.stats.statistics import Mean
from podium.lab.study.store import Row
from podium.lab.study.study import Study

TEMPLATE = "PAGE.md"


class OwnPage:
    """The page of one study from its template; `render` puts the template's figures into `drawings`."""

    def __init__(self, study: Study, rows: Sequence[Row], parts: Mapping[str, str]) -> None:
        lines = {id(row): number for number, row in enumerate(rows, 1)}
        runs = frame([row for row in rows if "cell" in row], lines)
        self._links = Records("results.jsonl", rows)
        self._factors = set(study.factors)
        self.drawings: dict[str, bytes] = {}
        done = runs["status"] == "finished"
        known = set(runs["cell"])
        self._names = {
            "study": study, "part": parts, "runs": runs[done], "failed": runs[~done], "means": means, "plain": _text,
            "sessions": sessions(rows), "missing": [name for name in study.names if name not in known], "where": where,
            "table": self.table, "grid": self.grid, "curves": self.curves, "bars": self.bars, "cite": self.cite,
        }  # fmt: skip

    def render(self, template: str) -> str:
        """The page's text. An error in the template raises `ConfigError` with its line."""
        environment = SandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        try:
            return environment.from_string(template).render(self._names).rstrip("\n") + "\n"
        except TemplateError as error:
            line = getattr(error, "lineno", None)
            raise ConfigError(f"{TEMPLATE}{f', line {line}' if line else ''}: {error}") from error

    def table(self, some: pd.DataFrame, columns: Mapping[str, str], *, places: str = "", digits: int = 3) -> str:
        """One row per row of the frame; the last column links to the records.

        `columns` maps headings to columns of the frame. With `places`, each row has an anchor of that text and the
        row's levels: `[text](#row-all-reduce-4)`.
        """
        told = []
        for line in some.to_dict("records"):
            texts = [self._cell(column, line.get(column), digits) for column in columns.values()]
            levels = [line[column] for column in columns.values() if column in self._factors]
            at = mark(place(places, *levels)) if places else ""
            told.append([at + texts[0], *texts[1:], self._lines(line["line"])])
        sides = "".join("r" if _is_number(some, column) else "l" for column in columns.values())
        return markdown_table([*columns, "records"], sides + "l", told)

    def grid(
        self, some: pd.DataFrame, down: str, across: str, value: str, *, heading: str = "", digits: int = 3
    ) -> str:
        """One value by two factors; every number links to its record."""
        columns = sorted(dict.fromkeys(some[across]))
        lines = []
        for level, mine in some.groupby(down, sort=False):
            found = {line[across]: line for line in mine.to_dict("records")}
            shown = (found.get(column) for column in columns)
            cells = [ABSENT if one is None else self._link(_text(one[value], digits), one["line"]) for one in shown]
            lines.append([code(level), *cells])
        heads = [self._link(f"{across} {column}", some[some[across] == column]["line"].iloc[0]) for column in columns]
        return markdown_table([heading or down, *heads], "l" + "r" * len(columns), lines)

    def cite(self, text: object, some: pd.DataFrame) -> str:
        """A text, or a number, that links to the first of these runs."""
        return self._link(_text(text), some["line"].iloc[0])

    def curves(self, name: str, some: pd.DataFrame, caption: str = "", **options: Any) -> str:
        """Lines of `y` over `x`, one for each level of `by`, a panel for each level of `panel`."""
        self.drawings[name] = draw_curves(some, **options)
        return f"![{caption or name}](figures/{name}.svg)"

    def bars(self, name: str, some: pd.DataFrame, caption: str = "", **options: Any) -> str:
        """A bar of `value` for each level of `by`, a panel for each level of `panel`."""
        self.drawings[name] = draw_bars(some, **options)
        return f"![{caption or name}](figures/{name}.svg)"

    def _cell(self, column: str, value: Any, digits: int) -> str:
        name = column in self._factors and isinstance(value, str)
        return code(value) if name else _text(value, digits).replace("|", r"\|")

    def _lines(self, lines: Any) -> str:
        return self._links.spans(lines if isinstance(lines, list) else [int(lines)])

    def _link(self, text: str, line: Any) -> str:
        first = line[0] if isinstance(line, list) else line
        return f"[{text}]({self._links.name}#L{int(first)})"


def _text(value: Any, digits: int = 3) -> str:
    if isinstance(value, Mean):
        return spread(value.mean, value.low, value.high)
    if value is None or (not isinstance(value, str) and pd.isna(value)):
        return ABSENT
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return plain(int(value) if float(value).is_integer() and abs(value) >= 1 else float(value), digits)


def _is_number(some: pd.DataFrame, column: str) -> bool:
    kinds = {type(value) for value in some.get(column, ()) if value is not None}
    return bool(kinds) and kinds <= {int, float, Mean}
