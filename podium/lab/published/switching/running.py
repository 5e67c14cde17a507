"""All runs of a study, several at a time, each in a process and on a core of its own."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.lab.published.switching.design import Cell, Study
from podium.lab.published.switching.rows import accuracies, failure, identity, is_final, key, open_store, told
from podium.lab.study.processes import RunProcess, least_used
from podium.lab.study.store import Store

_POLL_S = 0.2


def run(study: Study, out: Path, *, jobs: int, say: Callable[[str], None] = print) -> int:
    """Run what has not been run, so many at a time; returns how many runs want another try."""
    from podium.launch.ending import termination_unwinds

    if jobs < 1:
        raise ConfigError(f"switching: jobs must be at least 1, got {jobs}")
    store = open_store(out)
    _check_same(study, store)
    _check_data(study)
    running, tried, again = list[RunProcess](), set[Any](), 0
    with tempfile.TemporaryDirectory(prefix="podium-switching-") as scratch, termination_unwinds():
        try:
            while True:
                for cell in _waiting(study, store, tried)[: jobs - len(running)]:
                    core = least_used(os.sched_getaffinity(0), [one.core for one in running])
                    folder = Path(scratch) / f"{len(tried)}"
                    tried.add(cell.key)
                    running.append(start(cell, study.options(cell), folder, study.deadline_s, core))
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


def start(cell: Cell, options: Mapping[str, Any], folder: Path, deadline_s: float, core: int) -> RunProcess:
    """Begin one run."""
    who = identity(cell, options)
    asked, failed = {"who": who, "options": dict(options)}, partial(failure, who)
    return RunProcess("podium.lab.published.switching", asked, folder, deadline_s=deadline_s, core=core, failed=failed)


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
