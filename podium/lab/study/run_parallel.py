"""Runs of a study in parallel, each job in its own process on its own core. For virtual time only.

A process does one run after another, since starting a process (importing torch) may take longer than a small run. When
a process dies, its run counts as failed and the next run gets a new process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from threading import Event

import podium
from podium.lab.report.format import plain
from podium.lab.study.run_one import RunRequest, failed_row_of
from podium.lab.study.store import Key, Row
from podium.launch.signals import blocked
from podium.records.recorder import to_json

DEADLINE_S = 6 * 3600.0
"""A run that takes longer is killed and gets a failed row."""

_POLL_S = 0.05
_KILL_S = 10.0


def run_parallel(
    keys: Sequence[Key], asked: Callable[[Key], RunRequest], jobs: int, stop: Event, may_begin: Callable[[], bool]
) -> Iterator[tuple[Key, Row]]:
    """Yield each run's row when it ends; no run begins once `may_begin` is False.

    Setting `stop` kills running ones without rows: a later call repeats them.
    """
    from podium.launch.ending import termination_unwinds
    from podium.launch.rendezvous import rendezvous_folder

    waiting, pool = list(keys), list[_RunProcess]()
    with termination_unwinds(), rendezvous_folder() as scratch:  # after a kill, a later process removes it
        try:
            while (waiting or any(one.key for one in pool)) and not stop.is_set():
                if not may_begin():
                    waiting.clear()
                pool = [one for one in pool if one.key or one.lives()]
                while waiting and len(pool) < jobs:
                    core = least_used(os.sched_getaffinity(0), [one.core for one in pool])
                    pool.append(_RunProcess(scratch, core))
                for one in pool:
                    if one.key is None and waiting:
                        key = waiting.pop(0)
                        one.give(key, asked(key))
                    elif one.key is not None and (row := one.row()) is not None:
                        yield one.free(), row
                time.sleep(_POLL_S)
        finally:
            for one in pool:
                one.end()


class _RunProcess:
    """A process for runs, pinned to one core."""

    def __init__(self, scratch: Path, core: int) -> None:
        self.core, self._scratch = core, scratch
        self.key: Key | None = None
        self._said = Path(tempfile.mkdtemp(dir=scratch)) / "said"
        # The process must not receive signals to the study's process group, nor any while it is still importing.
        with self._said.open("wb") as said, blocked():
            self._process = subprocess.Popen(
                [sys.executable, "-m", "podium.lab.study", str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=environment(),
                start_new_session=True,
            )
        os.sched_setaffinity(self._process.pid, {core})

    def give(self, key: Key, asked: RunRequest) -> None:
        """Begin a run."""
        assert self._process.stdin is not None
        self.key, self._request, self._began = key, asked, time.monotonic()
        self._folder = Path(tempfile.mkdtemp(dir=self._scratch))
        (self._folder / "request.json").write_text(to_json(asked.to_dict()), encoding="utf-8")
        try:
            self._process.stdin.write(f"{self._folder}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            """The process has died; `row` reports how."""

    def row(self) -> Row | None:
        """The run's row; None while the run is under way."""
        if (found := read_row(self._folder)) is not None:
            return found
        if time.monotonic() - self._began > DEADLINE_S:
            self._process.kill()
            return failed_row_of(self._request, f"took longer than {plain(DEADLINE_S)} s")
        if self.lives():
            return None
        # The process may have written its row and ended between the two checks.
        return read_row(self._folder) or failed_row_of(self._request, self._how_it_ended())

    def free(self) -> Key:
        """Make the process ready for another run; returns the key of the last one."""
        assert self.key is not None
        key, self.key = self.key, None
        return key

    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """Kill the process."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait(timeout=_KILL_S)
        self._process.stdin.close()

    def _how_it_ended(self) -> str:
        said = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its process ended with {self._process.returncode}: {said[-1] if said else 'no output'}"


def least_used(cores: Collection[int], taken: Sequence[int]) -> int:
    """The core with the fewest runs; the lowest of several."""
    runs = Counter(taken)
    return min(sorted(cores), key=lambda core: runs[core])


def read_row(folder: Path) -> Row | None:
    """The row that a run wrote into its folder; None if there is none."""
    path = folder / "row.json"  # written atomically
    if not path.is_file():
        return None
    row: Row = json.loads(path.read_text(encoding="utf-8"))
    return row


def environment() -> dict[str, str]:
    """The environment of a process: one thread, and this Podium, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(podium.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
