"""What a study leaves on disk: its design, and one row per run, appended as runs end.

    study.json       what was asked for: factors, cells, seeds, order of runs, settings, versions, hardware
    results.jsonl    one row per run, in the order they ended, failures among them
    report.html      made from those two and nothing else
    runs/            each run's own folder

Rows are only ever added. A comparison that was killed is taken up again by reading which cells are through, so the file
may end in half a line: readers leave that out, and the next writer cuts it off.
"""

from __future__ import annotations

import fcntl
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.errors import ConfigError, RecordError, as_request
from podium.records.recorder import read_records, to_json

Row = dict[str, Any]
"""A RunResult as a dict, with `cell` and its `levels`; or cell, levels, seed, status and error of a failure.

Added: `nodes` (workers, and servers apart from them), `wall_s` (of the whole run by our clock), `ended_by` (the study's
rule that ended it). From the run's records: `parameters` (how many the model has), `setup_s` (from launch to the first
step), where updates were asynchronous `staleness_by` (`measure.staleness.Staleness` as a dict), and of each cell's
first seed `timeline`, `topology` and `trace` (its place below the study's folder).
"""

Key = tuple[str, int]
"""(cell, seed): what one run is for."""


LONGEST = 120
"""Bytes of a folder's name that come from a cell or a study; file systems end names at 255."""


def short_name(stem: str) -> str:
    """A name that fits: a long one is cut, and told from others by its checksum."""
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

    @contextmanager
    def held(self) -> Iterator[None]:
        """Keep others from running the same study meanwhile: two would run each cell twice."""
        with as_request():
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
                lock = (self.folder / ".lock").open("a")
            except OSError as error:
                raise RecordError(f"{self.folder} cannot be written to: {error}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # the system lets go of it, however we end
            except OSError as error:
                raise ConfigError(f"compare: another one is running in {self.folder}; wait for it to end") from error
            yield

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one row; it is on disk when this returns."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._cut_torn_line()
            with self.results.open("a", encoding="utf-8") as file:
                file.write(to_json(dict(row)) + "\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise RecordError(f"results cannot be written to {self.results}: {error}") from error

    def rows(self) -> list[Row]:
        """All whole rows, in the order they were written."""
        return list(read_records(self.results)) if self.results.is_file() else []

    def runs(self) -> list[Row]:
        """The rows of a study, each of a cell and a seed; a file that holds anything else is refused."""
        found = self.rows()
        for line, row in enumerate(found, 1):
            if not (isinstance(row, dict) and isinstance(row.get("cell"), str) and isinstance(row.get("seed"), int)):
                what = f"must be an object with a cell (text) and a seed (number), got {row!r:.80}"
                raise RecordError(f"{self.results}, row {line}: {what}")
        return found

    def read_study(self) -> Row:
        """The design that `write_study` wrote."""
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
        """Write the design, whole or not at all."""
        write_whole(self.study, json.dumps(json.loads(to_json(dict(study))), indent=2) + "\n")

    def fresh_run_dir(self, cell: str, seed: int) -> Path:
        """A new, empty folder for a run: a second try does not write over the first one's records."""
        stem = "".join(c if c.isalnum() else "-" for c in cell).strip("-") or "cell"
        stem = f"{short_name(stem)}-seed{seed}"
        path, tries = self.folder / "runs" / stem, 1
        while True:
            try:
                path.mkdir(parents=True)  # two cells may come to the same name, at the same time
                return path
            except FileExistsError:
                tries += 1
                path = self.folder / "runs" / f"{stem}-try{tries}"
            except OSError as error:
                raise RecordError(f"{path} cannot be made: {error}") from error

    def _cut_torn_line(self) -> None:
        """Bring the file back to whole lines after a writer was killed in the middle of one."""
        if not self.results.is_file():
            return
        with self.results.open("rb+") as file:
            text = file.read()
            if not text or text.endswith(b"\n"):
                return
            tail = text[text.rfind(b"\n") + 1 :]
            if _is_json(tail):  # only the newline is missing
                file.write(b"\n")
            else:
                file.truncate(len(text) - len(tail))


def finished_keys(rows: Iterable[Mapping[str, Any]]) -> set[Key]:
    """The cells and seeds that need not be run again."""
    return {(row["cell"], int(row["seed"])) for row in rows if row.get("status") == "finished"}


def place_of(run_dir: str) -> str:
    """A run's folder as seen from its study's, wherever that lies now."""
    return "/".join(Path(run_dir).parts[-2:])


def modern(study: Mapping[str, Any]) -> Row:
    """A study as this version writes it; earlier ones had strategies and no other factor."""
    if "cells" in study:
        return {**_BLANK, **study}
    names = [str(name) for name in study.get("strategies", ())]
    settings = {"task": study.get("task"), **study.get("settings", {})}
    settings |= {name: study[name] for name in ("workers", "launcher") if name in study}
    return {
        **_BLANK,
        "name": study.get("task", ""),
        "same_batch": True,
        **study,
        "cells": [{"cell": name, "levels": {"strategy": name}, "settings": {"strategy": name}} for name in names],
        "factors": {"strategy": names},
        "settings": settings,
    }


_BLANK: Mapping[str, Any] = {
    "name": "",
    "task": None,
    "question": "",
    "workers": None,
    "launcher": None,
    "kind": "full",
    "settings": {},
    "factors": {},
    "seeds": [],
    "order": [],
    "replications": {"half_width": None},
    "responses": [],
    "target": None,
    "maximize": None,
    "stop": {},
    "aliases": {},
    "resolution": None,
    "baseline": {},
    "notes": [],
    "reference": [],
    "changes": {},
    "clusters": {},
    "same_batch": False,
    "own_task": False,
    "file": "",
    "size": "",
    "versions": {"podium": "?"},
    "hardware": {},
    "commit": None,
}
"""What a study that somebody else wrote may lack."""


def write_whole(path: Path, text: str) -> None:
    """Write a file so that a reader sees the old one or the new one, never a part."""
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    except OSError as error:
        raise RecordError(f"{path} cannot be written: {error}") from error


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
