"""A run of a study in a process and on a core of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import podium
from podium.lab.report.format import plain
from podium.lab.study.store import Row
from podium.records.recorder import to_json

_KILL_S = 10.0


def least_used(cores: Collection[int], taken: Sequence[int]) -> int:
    """The core that fewest runs are on; the lowest of several."""
    runs = Counter(taken)
    return min(sorted(cores), key=lambda core: runs[core])


class RunProcess:
    """One run's process, the core that it keeps to, and the folder that it works in."""

    def __init__(
        self,
        module: str,
        asked: Mapping[str, Any],
        folder: Path,
        *,
        deadline_s: float,
        core: int,
        failed: Callable[[str], Row],
    ) -> None:
        """Starts `python -m MODULE FOLDER`, which finds `asked.json` there and is to leave `row.json`.

        `failed` makes the row of a run that left none, from how it ended.
        """
        self.folder, self.deadline_s, self.core, self._failed = folder, deadline_s, core, failed
        folder.mkdir()
        (folder / "asked.json").write_text(to_json(dict(asked)), encoding="utf-8")
        self.began = time.monotonic()
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment(),
            )
        # A virtual world keeps to one of the cores that it may use: left alone, several runs would share one.
        os.sched_setaffinity(self.process.pid, {core})

    def is_over(self) -> bool:
        """Whether its process has ended; it is ended when it takes too long."""
        if self.process.poll() is None and time.monotonic() - self.began > self.deadline_s:
            self.kill()
        return self.process.returncode is not None

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=_KILL_S)

    def row(self) -> Row:
        """What it left; where it left nothing, a failure that says how it ended."""
        if (found := left_behind(self.folder)) is not None:
            return found
        if time.monotonic() - self.began > self.deadline_s:
            return self._failed(f"took longer than {plain(self.deadline_s)} s")
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = said[-1] if said else "it said nothing"
        return self._failed(f"its process ended with {self.process.returncode}: {last}")


def left_behind(folder: Path) -> Row | None:
    """The row that a run left in its folder; None where there is none."""
    path = folder / "row.json"  # written whole or not at all
    if not path.is_file():
        return None
    row: Row = json.loads(path.read_text(encoding="utf-8"))
    return row


def environment() -> dict[str, str]:
    """One thread per process, and this Podium, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(podium.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
