"""Several runs of a study at once, each job in a process and on a core of its own. For virtual time only.

A process does one run after another, since starting one (importing torch) may take longer than a small run. When it
dies, the run that it was at is a failure and the next run gets a new process.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from threading import Event

from podium.lab.report.format import plain
from podium.lab.study.processes import environment, least_used, left_behind
from podium.lab.study.run_one import Asked, unfinished
from podium.lab.study.store import Key, Row
from podium.launch.signals import blocked
from podium.records.recorder import to_json

DEADLINE_S = 6 * 3600.0
"""A run that takes longer than this is ended, and its row says so."""

_POLL_S = 0.05
_KILL_S = 10.0


def run_several(
    keys: Sequence[Key], asked: Callable[[Key], Asked], jobs: int, stop: Event
) -> Iterator[tuple[Key, Row]]:
    """Each run's row as it ends. Setting `stop` ends those under way, without rows: they are run again later."""
    from podium.launch.ending import termination_unwinds
    from podium.launch.rendezvous import rendezvous_folder

    waiting, pool = list(keys), list[_RunProcess]()
    with termination_unwinds(), rendezvous_folder() as scratch:  # were this process killed, the next would remove it
        try:
            while (waiting or any(one.key for one in pool)) and not stop.is_set():
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
    """A process that does the runs that it is given, and the core that it keeps to."""

    def __init__(self, scratch: Path, core: int) -> None:
        self.core, self._scratch = core, scratch
        self.key: Key | None = None
        self._said = Path(tempfile.mkdtemp(dir=scratch)) / "said"
        # A signal to the study's process group is not meant for it, nor one that comes while it is still importing.
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

    def give(self, key: Key, asked: Asked) -> None:
        """Begin a run."""
        assert self._process.stdin is not None
        self.key, self._asked, self._began = key, asked, time.monotonic()
        self._folder = Path(tempfile.mkdtemp(dir=self._scratch))
        (self._folder / "asked.json").write_text(to_json(asked.to_dict()), encoding="utf-8")
        try:
            self._process.stdin.write(f"{self._folder}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            """It has died; `row` says how."""

    def row(self) -> Row | None:
        """What the run left; None while it goes on."""
        if (found := left_behind(self._folder)) is not None:
            return found
        if time.monotonic() - self._began > DEADLINE_S:
            self._process.kill()
            return unfinished(self._asked, f"took longer than {plain(DEADLINE_S)} s")
        if self.lives():
            return None
        # Between the two looks it may have left a row and ended.
        return left_behind(self._folder) or unfinished(self._asked, self._how_it_ended())

    def free(self) -> Key:
        """Ready for another run; whose it was until now."""
        assert self.key is not None
        key, self.key = self.key, None
        return key

    def lives(self) -> bool:
        return self._process.poll() is None

    def end(self) -> None:
        """End the process, whatever it is at."""
        assert self._process.stdin is not None
        self._process.kill()
        self._process.wait(timeout=_KILL_S)
        self._process.stdin.close()

    def _how_it_ended(self) -> str:
        said = self._said.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"its process ended with {self._process.returncode}: {said[-1] if said else 'it said nothing'}"
