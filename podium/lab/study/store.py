"""A study on disk: its design, and one row per run, appended as runs end.

    study.json       the design: factors, cells, seeds, order of runs, settings, versions, hardware
    results.jsonl    one row per run, in the order they ended, including failures
    report.html      made from those two alone
    runs/            a folder per run

Rows are only ever appended. A killed comparison resumes with the cells and seeds that lack finished rows. The file may
then end in half a line: readers skip it, and the next writer cuts it off.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from podium.errors import RecordError
from podium.records.disk import write_atomically
from podium.records.folder_lock import folder_lock
from podium.records.journal import Journal, read_journal
from podium.records.recorder import to_json

Row = dict[str, Any]
"""A RunResult as a dict, with `cell` and its `levels`; or cell, levels, seed, status and error of a failure.

Added: `nodes` (workers, and servers that are not colocated), `wall_s` (of the whole run, by the study's clock),
`ended_by` (the study's rule that ended it). From the run's records: `parameters` (of the model), `setup_s` (from launch
to the first step), for asynchronous updates `staleness_by` (`records.staleness.Staleness` as a dict), and for each
cell's first seed `timeline`, `topology` and `trace` (its path below the study's folder).
"""

SESSION = "session"
"""The `kind` of a row with the machine, time and versions of the runs after it."""

Key = tuple[str, int]
"""(cell, seed) of a run."""


LONGEST = 120
"""The most bytes of a folder's name that come from a cell or a study; file systems allow 255."""


def short_name(stem: str) -> str:
    """A name that fits: a long one is cut, and a checksum keeps it unique."""
    whole = stem.encode()
    if len(whole) <= LONGEST:
        return stem
    return f"{whole[:LONGEST].decode(errors='ignore')}-{zlib.crc32(whole):08x}"


class Store:
    """A study's folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.study = self.folder / "study.json"
        self.results = self.folder / "results.jsonl"
        self.report = self.folder / "report.html"

    def locked(self) -> AbstractContextManager[None]:
        """Lock the folder: two processes that run the same study would run each cell twice."""
        return folder_lock(self.folder, "study")

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is on disk when this returns."""
        with Journal(self.results, durable=True) as journal:
            journal.write(row)

    def rows(self) -> list[Row]:
        """All complete rows, in the order they were written."""
        return read_journal(self.results)

    def all_rows(self) -> list[Row]:
        """All rows: runs, each with a cell and a seed, and sessions; raises `RecordError` for anything else."""
        found = self.rows()
        for line, row in enumerate(found, 1):
            if isinstance(row, dict) and row.get("kind") == SESSION:
                continue
            if not (isinstance(row, dict) and isinstance(row.get("cell"), str) and isinstance(row.get("seed"), int)):
                what = f"must be an object with a cell (text) and a seed (number), got {row!r:.80}"
                raise RecordError(f"{self.results}, row {line}: {what}")
        return found

    def runs(self) -> list[Row]:
        """The rows of runs, in the order they were written."""
        return runs_of(self.all_rows())

    def read_study(self) -> Row:
        """The design, as `write_study` wrote it."""
        try:
            value = json.loads(self.study.read_text(encoding="utf-8"))
        except OSError as error:
            raise RecordError(f"{self.folder} holds no study: {self.study.name}: {error.strerror}") from error
        except ValueError as error:
            raise RecordError(f"{self.study}: not JSON: {error}") from error
        if not isinstance(value, dict):
            raise RecordError(f"{self.study}: must hold a JSON object, got {type(value).__name__}")
        return value

    def write_study(self, study: Mapping[str, Any]) -> None:
        """Write the design atomically."""
        write_atomically(self.study, json.dumps(json.loads(to_json(dict(study))), indent=2) + "\n")

    def fresh_run_dir(self, cell: str, seed: int) -> Path:
        """Make a new folder for a run; a retry does not overwrite the records of the first try."""
        stem = "".join(c if c.isalnum() else "-" for c in cell).strip("-") or "cell"
        stem = f"{short_name(stem)}-seed{seed}"
        path, tries = self.folder / "runs" / stem, 1
        while True:
            try:
                path.mkdir(parents=True)  # two cells may get the same folder name at the same time
                return path
            except FileExistsError:
                tries += 1
                path = self.folder / "runs" / f"{stem}-try{tries}"
            except OSError as error:
                raise RecordError(f"{path} cannot be made: {error}") from error


def runs_of(rows: Iterable[Row]) -> list[Row]:
    """The rows of runs, without sessions."""
    return [row for row in rows if row.get("kind") != SESSION]


def finished_keys(rows: Iterable[Mapping[str, Any]]) -> set[Key]:
    """The cells and seeds that need not be run again."""
    return {(row["cell"], int(row["seed"])) for row in rows if row.get("status") == "finished"}


def place_of(run_dir: str) -> str:
    """A run's folder relative to its study's, which may have moved."""
    return "/".join(Path(run_dir).parts[-2:])
