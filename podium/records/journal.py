"""A journal: a file of JSON lines that are only ever appended.

A writer may be killed in the middle of a line. Readers ignore such a torn line (`read_records`), and the next writer
removes it first, so that no line is appended to half a line.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.errors import RecordError
from podium.records.disk import mend_last_line
from podium.records.recorder import read_records, to_json


class Journal:
    """Appends rows to a file. After `write`, a row survives a crash of the process; if `durable`, of the machine."""

    def __init__(self, path: Path, *, durable: bool = False) -> None:
        self.path, self._durable = path, durable
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            mend_last_line(path)
            self._file = path.open("ab")
        except OSError as error:
            raise RecordError(f"{path} cannot be written: {error}") from error

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, row: Mapping[str, Any]) -> None:
        try:
            self._file.write(to_json(dict(row)).encode() + b"\n")
            self._file.flush()
            if self._durable:
                os.fsync(self._file.fileno())
        except OSError as error:
            raise RecordError(f"{self.path} cannot be written: {error}") from error

    def close(self) -> None:
        # `write` has flushed every line or has raised, so an error here is not news.
        with contextlib.suppress(OSError):
            self._file.close()


def read_journal(path: Path) -> list[dict[str, Any]]:
    """All complete rows, in the order they were written; empty where there is no file."""
    return list(read_records(path)) if path.is_file() else []
