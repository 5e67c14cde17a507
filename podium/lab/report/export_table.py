"""A table for other programs: columns of one type each, as CSV (standard library) or Parquet (duckdb).

In a CSV file an empty field means no value; `nan`, `inf` and `-inf` are numbers; and a text that begins with = + - @ '
or white space gets a ' in front, so that a spreadsheet does not compute it as a formula. To get the text back, drop the
first ' of a field that begins with one. Parquet has types and nulls, and needs none of this.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from podium.errors import MissingExtra, RecordError
from podium.records.disk import replacing
from podium.records.writers.series import NOT_FINITE

FIRST = (
    "cell", "trial", "point", "seed", "fold", "level.", "status", "counted", "task", "strategy", "workers", "nodes",
    "launcher", "executor", "metric.", "loss", "seconds", "setup_s", "samples_per_s", "steps", "epochs", "samples",
    "updates", "dropped", "sent_bytes", "wait_share", "step_ms.", "staleness.", "parameters", "lost",
)  # fmt: skip
"""Columns of `runs`, in this order; others follow. A name that ends in a dot is a prefix."""
LAST = ("run_dir", "model", "error")
TEXT = ("cell", "status", "task", "strategy", "launcher", "executor", "run_dir", "model", "error")
"""Columns that are always text; in others `nan`, `inf` and `-inf` become numbers."""
GUARDED = ("=", "+", "-", "@", "'", "\t", "\r", "\n", " ")
"""First characters of texts that a spreadsheet might compute, and the guard ' itself."""

Value = bool | int | float | str | None


@dataclass(frozen=True)
class Table:
    """Rows with the same columns. Each column has one type, and None where a row has no value."""

    name: str
    columns: Mapping[str, list[Value]]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), []))


def make_table(name: str, lines: Sequence[Mapping[str, Any]]) -> Table:
    """A table of these rows: columns in order of first appearance, each of one type, without empty columns."""
    names = list(dict.fromkeys(key for line in lines for key in line))
    if name == "runs":
        names.sort(key=_place)  # stable: columns with the same prefix stay in their order
    columns = {column: _one_type(column, [line.get(column) for line in lines]) for column in names}
    return Table(name, {column: values for column, values in columns.items() if any(v is not None for v in values)})


def _place(column: str) -> int:
    if column in LAST:
        return len(FIRST) + 1 + LAST.index(column)
    places = [i for i, name in enumerate(FIRST) if column == name or (name.endswith(".") and column.startswith(name))]
    return places[0] if places else len(FIRST)


def _one_type(column: str, values: list[Any]) -> list[Value]:
    """A column as bool, int, float or text, the first that represents every value exactly."""
    if column not in TEXT and not column.startswith("level."):
        values = [float(value) if value in NOT_FINITE else value for value in values]
    known = [value for value in values if value is not None]
    if all(isinstance(value, bool) for value in known):
        return values
    if all(isinstance(value, int | float) and not isinstance(value, bool) for value in known):
        if all(isinstance(value, int) and -(2**63) <= value < 2**63 for value in known):
            return values
        if all(isinstance(value, float) or _is_exact(value) for value in known):
            return [None if value is None else float(value) for value in values]
    return [value if value is None or isinstance(value, str) else as_text(value) for value in values]


def _is_exact(value: int) -> bool:
    try:
        return int(float(value)) == value
    except OverflowError:
        return False


def as_text(value: Value) -> str:
    """A value as in CSV; a float with the fewest digits that give the same float again."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else repr(value)


def to_csv(table: Table) -> str:
    """A table as CSV with a header (RFC 4180, but lines end in a newline alone)."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow([guarded(name) for name in table.columns])
    for values in zip(*table.columns.values(), strict=True):
        writer.writerow([guarded(value) if isinstance(value, str) else as_text(value) for value in values])
    return out.getvalue()


def guarded(text: str) -> str:
    """The text, with a ' in front if a spreadsheet might take it for a formula."""
    return f"'{text}" if text.startswith(GUARDED) else text


def unguarded(text: str) -> str:
    """The inverse of `guarded`."""
    return text[1:] if text.startswith("'") else text


def write_parquet(table: Table, path: Path) -> None:
    """Write a table as Parquet, atomically. Needs duckdb (`podium[study]`)."""
    try:
        import duckdb
    except ImportError:
        raise MissingExtra("duckdb", "study", "writing Parquet") from None
    parts = [f"unnest(?::{_sql_type(values)}[]) AS {_quoted(name)}" for name, values in table.columns.items()]
    try:
        with replacing(path) as partial, duckdb.connect(config={"threads": 1}) as memory:
            memory.execute(f"CREATE TABLE made AS SELECT {', '.join(parts)}", list(table.columns.values()))
            memory.execute(f"COPY made TO '{str(partial).replace(chr(39), chr(39) * 2)}' (FORMAT parquet)")
    except duckdb.Error as error:
        raise RecordError(f"{path} cannot be written: {error}") from error


def _sql_type(values: Sequence[Value]) -> str:
    first = next(value for value in values if value is not None)
    return {bool: "BOOLEAN", int: "BIGINT", float: "DOUBLE", str: "VARCHAR"}[type(first)]


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
