"""The results of a study: specification, rows and findings, each computed once for all pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from podium.lab.report.answer import Findings, find, tell
from podium.lab.report.links import Records
from podium.lab.report.sections import AgainstTable, against_tables, analyses_of, missing_of, responses_of, winners_of
from podium.lab.stats.checks import Analysis
from podium.lab.stats.speedup import SpeedUps, speedups
from podium.lab.stats.winners import Winner
from podium.lab.study.results import arranged, finished
from podium.lab.study.store import Row, Store, runs_of
from podium.lab.study.study import Study


class StudyResults:
    """A study with all rows of its file; immutable."""

    def __init__(self, study: Study, rows: Sequence[Row]) -> None:
        self.study, self.file_rows = study, rows
        self.ended = runs_of(rows)
        """Runs in the order in which they ended."""
        self.rows = arranged(self.ended, study.names)
        """Runs in the order of the study's cells."""
        self.records = Records("results.jsonl", rows)

    @classmethod
    def read(cls, folder: str | Path | StudyResults, maximize: bool | None = None) -> StudyResults:
        """Read a study's folder; a `StudyResults` is returned unchanged.

        `maximize`: whether a higher metric is better; it overrides the study.
        """
        if isinstance(folder, StudyResults):
            return folder
        store = Store(folder)
        found = cls(Study.read(store, maximize), store.all_rows())
        found.folder = store.folder
        return found

    folder: Path = Path()

    @cached_property
    def findings(self) -> Findings:
        return find(self.rows, self.study.target, self.study.maximize)

    @cached_property
    def said(self) -> tuple[str, str]:
        """The answer, and what may not be concluded."""
        answer, caution = tell(self.findings, self.rows, self.study).rsplit("\n", 1)
        return answer, caution

    @cached_property
    def responses(self) -> list[dict[str, Any]]:
        return responses_of(self.study, self.rows, self.findings)

    @cached_property
    def missing(self) -> list[str]:
        return missing_of(self.study, self.rows, self.findings)

    @cached_property
    def winners(self) -> list[Winner]:
        return winners_of(self.rows, self.findings)

    @cached_property
    def speedups(self) -> SpeedUps | None:
        return speedups(self.rows, self.study.baseline)

    @cached_property
    def beside(self) -> list[AgainstTable]:
        return against_tables(self.study, self.rows, self.findings)

    @cached_property
    def analyses(self) -> list[Analysis]:
        return analyses_of(self.study, self.rows, self.findings)

    def counting(self, cell: str) -> list[Row]:
        """A cell's finished runs; if it has none, its failures."""
        own = [row for row in self.rows if row["cell"] == cell]
        return finished(own) or own

    def lines(self, *cells: str) -> tuple[int, ...]:
        """The line numbers of the records of these cells."""
        return tuple(self.records.line(row) for cell in cells for row in self.counting(cell))

    def places(self) -> Mapping[str, int]:
        """The index of each cell in the main table."""
        return {line.cell: place for place, line in enumerate(self.findings.table)}
