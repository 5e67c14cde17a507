"""All runs of a study, several at a time, each in a process and on a core of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import podium
from podium.errors import ConfigError
from podium.measure.records import to_json
from podium.study.format import plain
from podium.study.rates.running import least_used
from podium.study.store import Row, Store
from podium.study.switching.design import Cell, Study
from podium.study.switching.rows import accuracies, failure, identity, is_final, key, open_store, told

_POLL_S = 0.2
_KILL_S = 10.0


def run(study: Study, out: Path, *, jobs: int, say: Callable[[str], None] = print) -> int:
    """Run what has not been run, so many at a time; returns how many runs want another try."""
    from podium.cluster.ending import termination_unwinds

    if jobs < 1:
        raise ConfigError(f"switching: jobs must be at least 1, got {jobs}")
    store = open_store(out)
    _check_same(study, store)
    _check_data(study)
    running, tried, again = list[Running](), set[Any](), 0
    with tempfile.TemporaryDirectory(prefix="podium-switching-") as scratch, termination_unwinds():
        try:
            while True:
                for cell in _waiting(study, store, tried)[: jobs - len(running)]:
                    core = least_used(os.sched_getaffinity(0), [one.core for one in running])
                    folder = Path(scratch) / f"{len(tried)}"
                    tried.add(cell.key)
                    running.append(Running(cell, study.options(cell), folder, study.deadline_s, core))
                if not running:
                    return again
                for one in [one for one in running if one.is_over()]:
                    running.remove(one)
                    row = one.row()
                    store.append(row)
                    again += not is_final(row)
                    say(told(row))
                time.sleep(_POLL_S)
        finally:
            for one in running:
                one.kill()


def _waiting(study: Study, store: Store, tried: Collection[Any]) -> list[Cell]:
    """What can be run now: a best arm goes on only once it is known to be the best."""
    known = accuracies(store.rows())
    return [cell for cell in study.cells(known) if cell.key not in known and cell.key not in tried]


class Running:
    """One run's process, the core that it keeps to, and the folder that it works in."""

    def __init__(self, cell: Cell, options: Mapping[str, Any], folder: Path, deadline_s: float, core: int) -> None:
        self.folder, self.deadline_s, self.core = folder, deadline_s, core
        self.who = identity(cell, options)
        folder.mkdir()
        (folder / "asked.json").write_text(to_json({"who": self.who, "options": dict(options)}), encoding="utf-8")
        self.began = time.monotonic()
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "podium.study.switching", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=_environment(),
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
        path = self.folder / "row.json"
        if path.is_file():
            row: Row = json.loads(path.read_text(encoding="utf-8"))
            return row
        if time.monotonic() - self.began > self.deadline_s:
            return failure(self.who, f"took longer than {plain(self.deadline_s)} s")
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = said[-1] if said else "it said nothing"
        return failure(self.who, f"its process ended with {self.process.returncode}: {last}")


def _environment() -> dict[str, str]:
    """One thread per process, and this Podium, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(podium.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _check_same(study: Study, store: Store) -> None:
    """Refuse to mix runs of two designs in one file; settings that are not asked for stay as they are."""
    known = accuracies(store.rows())
    wanted = {cell.key: identity(cell, study.options(cell))["config"] for cell in study.cells(known)}
    for row in store.rows():
        found, ours = row["config"], wanted.get(key(row), {})
        for name in (name for name in ours if name != "device" and found.get(name) != ours[name]):
            raise ConfigError(
                f"switching: {store.results} holds another run of {key(row)}, with {name} {found.get(name)!r}; wanted "
                f"{ours[name]!r}. Give another --out"
            )


def _check_data(study: Study) -> None:
    """Find out about data that are not there before the first run."""
    from podium.task import load_task

    for cell in {cell.setting.task: cell for cell in study.cells({})}.values():
        options = study.options(cell)
        load_task(options["task"], options["task_options"], options["data_dir"]).data()
