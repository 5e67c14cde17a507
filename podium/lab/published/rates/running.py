"""All runs of a study, several at a time, each in a process and on a core of its own."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.lab.published.rates.design import Cell, Rates
from podium.lab.published.rates.output import draw, require_drawing
from podium.lab.published.rates.rows import failure, is_final, key, open_store, told
from podium.lab.study.processes import RunProcess, least_used
from podium.lab.study.store import Store

_POLL_S = 0.2


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
    from podium.launch.ending import termination_unwinds

    waiting, running, ended, again = list(cells), list[RunProcess](), 0, 0
    with tempfile.TemporaryDirectory(prefix="podium-rates-") as scratch, termination_unwinds():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    cell = waiting.pop(0)
                    folder = Path(scratch) / f"{len(cells) - len(waiting)}"
                    core = least_used(os.sched_getaffinity(0), [one.core for one in running])
                    running.append(start(study.options(cell), folder, study.deadline_s, core))
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


def start(options: Mapping[str, Any], folder: Path, deadline_s: float, core: int) -> RunProcess:
    """Begin one run."""
    failed = partial(failure, options)
    return RunProcess("podium.lab.published.rates", options, folder, deadline_s=deadline_s, core=core, failed=failed)


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
