"""A run's folder belongs to one run: the launcher holds its lock until the result is written.

A launcher may use the folder if it gets the lock and finds no manifest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.errors import ConfigError
from podium.records.folder_lock import folder_lock


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Claim the folder for this run; raises ConfigError where another run uses it, or has used it."""
    with folder_lock(run_dir, "run"):
        refuse_taken(run_dir)
        yield


def refuse_taken(run_dir: Path) -> None:
    """Raise where the folder has a run: the records of two runs would be summed up as one."""
    if (run_dir / "manifest.json").exists():
        raise ConfigError(
            f"run_dir must be a folder without a run, got {run_dir}, which has a manifest.json: name a fresh one; "
            f"to resume the run in {run_dir}, add --resume {run_dir}"
        )
