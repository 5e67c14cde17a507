"""A run's folder belongs to one run: from before its manifest is written until its result is.

The launcher that has the folder's lock and finds no manifest is the first.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.errors import ConfigError
from podium.records.folder_lock import folder_lock


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Make the folder this run's own; raises ConfigError where another run is in it, or was."""
    with folder_lock(run_dir, "run"):
        refuse_taken(run_dir)
        yield


def refuse_taken(run_dir: Path) -> None:
    """Two runs' records in one folder would be summed up as one run."""
    if (run_dir / "manifest.json").exists():
        raise ConfigError(
            f"run_dir must be a folder without a run, got {run_dir}, which has a manifest.json: name a fresh one; "
            f"to resume the run in {run_dir}, add --resume {run_dir}"
        )
