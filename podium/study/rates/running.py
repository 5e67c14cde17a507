"""All runs of a study, several at a time, each in a process and on a core of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import podium
from podium.errors import ConfigError
from podium.measure.records import to_json
from podium.study.format import plain
from podium.study.rates.design import Cell, Rates
from podium.study.rates.output import draw, require_drawing
from podium.study.rates.rows import failure, is_final, key, open_store, told
from podium.study.store import Row, Store

_POLL_S = 0.2
_KILL_S = 10.0


def run(study: Rates, out: Path, *, jobs: int, say: Callable[[str], None] = print) -> int:
    """Run what has not been run, so many at a time, then draw; returns how many runs want another try."""
    if jobs < 1:
        raise ConfigError(f"rates: jobs must be at least 1, got {jobs}")
    require_drawing()
    store = open_store(out)
    _check_same(study, store)
    done = {key(row) for row in store.rows() if is_final(row)}
    cells = study.cells()
    waiting = [cell for cell in cells if cell.key not in done]
    _check_data(study, waiting)
    if len(waiting) < len(cells):
        say(f"{len(cells) - len(waiting)} of {len(cells)} runs are in {store.results} already")
    again = _run_all(study, waiting, store, jobs, say)
    draw(out)
    return again


def _run_all(study: Rates, cells: Sequence[Cell], store: Store, jobs: int, say: Callable[[str], None]) -> int:
    from podium.cluster.ending import termination_unwinds

    waiting, running, ended, again = list(cells), list[Running](), 0, 0
    with tempfile.TemporaryDirectory(prefix="podium-rates-") as scratch, termination_unwinds():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop(0)
                    folder = Path(scratch) / f"{len(cells) - len(waiting)}"
                    core = least_used(os.sched_getaffinity(0), [one.core for one in running])
                    running.append(Running(cell, study.options(cell), folder, study.deadline_s, core))
                for one in [one for one in running if one.is_over()]:
                    running.remove(one)
                    row = one.row()
                    store.append(row)
                    ended, again = ended + 1, again + (not is_final(row))
                    say(f"[{ended}/{len(cells)}] {told(row)}")
                time.sleep(_POLL_S)
        finally:
            for one in running:
                one.kill()
    return again


def least_used(cores: Collection[int], taken: Sequence[int]) -> int:
    """The core that fewest runs are on; the lowest of several."""
    runs = Counter(taken)
    return min(sorted(cores), key=lambda core: runs[core])


class Running:
    """One run's process, the core that it keeps to, and the folder that it works in."""

    def __init__(self, cell: Cell, options: Mapping[str, Any], folder: Path, deadline_s: float, core: int) -> None:
        self.cell, self.folder, self.deadline_s, self.core = cell, folder, deadline_s, core
        self.options = dict(options)
        folder.mkdir()
        (folder / "options.json").write_text(to_json(self.options))
        self.began = time.monotonic()
        with (folder / "said").open("wb") as said:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "podium.study.rates", str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                env=_environment(),
            )
        # A virtual world keeps to the first core that it may use: left alone, all runs would share that one.
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
        took = time.monotonic() - self.began
        if took > self.deadline_s:
            return failure(self.options, f"took longer than {plain(self.deadline_s)} s")
        said = (self.folder / "said").read_text(encoding="utf-8", errors="replace").strip().splitlines()
        last = said[-1] if said else "it said nothing"
        return failure(self.options, f"its process ended with {self.process.returncode}: {last}")


def _environment() -> dict[str, str]:
    """One thread per process, and this Podium, installed or not."""
    path = os.pathsep.join(filter(None, [str(Path(podium.__file__).parents[1]), os.environ.get("PYTHONPATH")]))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _check_same(study: Rates, store: Store) -> None:
    """Refuse to mix runs of two designs of one task in one file; tasks that are not asked for stay as they are."""
    wanted = {load.task: (load.epochs, study.workers, study.device, dict(load.options)) for load in study.workloads}
    for row in store.rows():
        found = (row["epochs"], row["workers"], row["device"], row["task_options"])
        if found != wanted.get(row["task"], found):
            raise ConfigError(
                f"rates: {store.results} holds other runs of {row['task']}, with (epochs, workers, device, options) "
                f"{found}; wanted {wanted[row['task']]}. Give another --out"
            )


def _check_data(study: Rates, cells: Sequence[Cell]) -> None:
    """Find out about data that are not there before the first run."""
    from podium.task import load_task

    for load in {cell.load.task: cell for cell in cells}.values():
        options = study.options(load)
        load_task(options["task"], options["task_options"], options["data_dir"]).data()
