"""All runs of a study as one pandas table, from which pages and figures are made.

One row per run that counts: the levels of its factors, its metrics and every other number or text of its record. A
nested number has a dotted name (`step_ms.p50`). `line` is the run's line in `results.jsonl`, so that a page can link to
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from podium.lab.stats.statistics import Mean, mean_interval
from podium.lab.study.results import deciding_rows
from podium.lab.study.store import SESSION, Row

_OUTSIDE = ("history", "timeline", "topology", "param_hash", "staleness_by")
"""Fields of a row that are too large for a column."""


def frame(rows: Sequence[Row], lines: Mapping[int, int]) -> pd.DataFrame:
    """One row per cell and seed: its finished run, else its last try. `lines`: the `id` of each row to its line."""
    return pd.DataFrame([{"line": lines[id(row)], **_flat(row)} for row in deciding_rows(rows)])


def sessions(rows: Sequence[Row]) -> pd.DataFrame:
    """The session rows, each with its line."""
    return pd.DataFrame(
        [{"line": line, **_dotted(row)} for line, row in enumerate(rows, 1) if row.get("kind") == SESSION]
    )


def where(some: pd.DataFrame, **levels: Any) -> pd.DataFrame:
    """The rows with these levels; a list means any of them."""
    for name, wanted in levels.items():
        some = some[some[name].isin(wanted if isinstance(wanted, list | tuple) else [wanted])]
    return some


def _flat(row: Row) -> dict[str, Any]:
    """A row as columns; if names collide, a level wins over a metric, and a metric over a field."""
    tables = ("levels", "metrics")
    plain = {name: value for name, value in row.items() if name not in (*_OUTSIDE, *tables)}
    return {**_dotted(plain), **(row.get("metrics") or {}), **(row.get("levels") or {})}


def _dotted(table: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, Mapping):
            found |= _dotted(value, f"{before}{name}.")
        else:
            found[before + name] = value
    return found


def means(runs: pd.DataFrame, by: Sequence[str], values: Sequence[str]) -> pd.DataFrame:
    """Group the runs by the factors `by`: the `Mean` of each of `values`, and all lines it comes from.

    Groups keep the order of the table.

    """
    found = []
    for levels, some in runs.groupby(list(by), sort=False, dropna=False):
        told = {name: _mean(some[name]) for name in values}
        found.append({**dict(zip(by, levels, strict=True)), **told, "n": len(some), "line": list(some["line"])})
    return pd.DataFrame(found)


def _mean(values: pd.Series) -> Mean | None:
    return mean_interval([float(value) for value in values if value is not None and not pd.isna(value)])
