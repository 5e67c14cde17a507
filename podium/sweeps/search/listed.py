"""Points that the user lists: in Python, or in a file.

points.json    [{"lr": 0.1}, {"lr": 0.01, "dropout": 0.2}]
points.csv     a line of names, then one line per point; an empty cell leaves that option to the task
points.toml    one `[[point]]` table per point
"""

from __future__ import annotations

import csv
import io
import json
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from podium.errors import ConfigError, UnknownName
from podium.sweeps.search.base import Source
from podium.sweeps.search.space import Choices, read_space, read_value
from podium.sweeps.trial import Trial

Row = Mapping[str, Any]


@final
@dataclass(kw_only=True, eq=False)
class PointList(Source):
    """Points from a list, or from a file (JSON, CSV, TOML), in the order written there."""

    rows: Sequence[Row] = ()
    """Each point's options."""
    file: str = ""
    """The file with the points, when `rows` is not given."""

    def __post_init__(self) -> None:
        if bool(self.rows) == bool(self.file):
            came = "both" if self.rows else "neither"
            raise ConfigError(f"search list: rows or a file must be given, and not both, got {came}")
        rows = read_points(Path(self.file)) if self.file else self.rows
        self._rows = [_checked(row, f"search list: point {i}") for i, row in enumerate(rows)]
        self._asked = 0

    @property
    def total(self) -> int:
        return len(self._rows)

    @property
    def exhausted(self) -> bool:
        return self._asked == len(self._rows)

    def ask(self) -> Trial | None:
        if self.exhausted:
            return None
        number, self._asked = self._asked, self._asked + 1
        return Trial(number=number, point=number, options=self._rows[number])


def read_points(path: Path) -> list[Row]:
    """The points of a file; its suffix decides the format."""
    if path.suffix not in _READERS:
        raise UnknownName(f"ending of a list of points, {path.name}:", path.suffix, _READERS)
    try:
        rows = _READERS[path.suffix](path.read_text(encoding="utf-8-sig"))  # some programs write a byte order mark
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:  # invalid JSON, TOML or UTF-8 is a ValueError
        raise ConfigError(f"{path}: cannot be read as {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(rows, list) or not rows or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: must hold a list of points, each a table of options")
    return rows


def _read_toml(text: str) -> Any:
    table = tomllib.loads(text)
    if set(table) != {"point"}:
        raise ValueError(f"must hold [[point]] tables and nothing else, got {', '.join(table) or 'nothing'}")
    return table["point"]


def _read_csv(text: str) -> Any:
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    names = [name.strip() for name in reader.fieldnames or ()]
    _refuse_twice(names)
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(f"line {reader.line_num} must have as many cells as there are names")
        rows.append({name.strip(): read_value(cell.strip()) for name, cell in row.items() if cell and cell.strip()})
    return rows


def _read_json(text: str) -> Any:
    def table(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        _refuse_twice([name for name, _ in pairs])
        return dict(pairs)

    return json.loads(text, object_pairs_hook=table)


def _refuse_twice(names: Sequence[str]) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"each name must be given once, got {name!r} twice")


_READERS: dict[str, Callable[[str], Any]] = {".json": _read_json, ".toml": _read_toml, ".csv": _read_csv}


def _checked(row: Row, who: str) -> Row:
    """The options under the names that trials use, all values plain."""
    if not isinstance(row, Mapping):
        raise ConfigError(f"{who} must be a table of options, got {row!r}")
    try:
        space = read_space({str(name): Choices((value,)) for name, value in row.items()})
    except ConfigError as error:
        raise ConfigError(f"{who}: {error}") from None
    return {name: d.values[0] for name, d in space.items() if isinstance(d, Choices)}
