"""The table, the figures and the report of a sweep, and `podium.sweep`, which trains and then writes them all."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

from podium.lab.sweeps.report import write_report
from podium.lab.sweeps.table import write_csv
from podium.sweeps.api import sweep as train_sweep
from podium.sweeps.result import Sweep, read_sweep

__all__ = ["sweep", "write_all"]


@functools.wraps(train_sweep)
def sweep(*task: Any, **asked: Any) -> Sweep:
    """Train all trials (`podium.sweeps.api.sweep`), then write the table and the report beside the results."""
    return write_all(train_sweep(*task, **asked))


def write_all(found: Sweep | str | Path) -> Sweep:
    """Write `points.csv`, `figures/` and `report.html` of a sweep or its folder; returns the sweep with their paths."""
    result = found if isinstance(found, Sweep) else read_sweep(found)
    table = write_csv(result)
    return dataclasses.replace(result, table=str(table), report=str(write_report(result)))
