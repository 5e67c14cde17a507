"""All runs of the study. Virtual ones may go side by side; real ones never do."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import ConfigError
from podium.lab.published.accumulation.design import Cell, Study
from podium.lab.published.accumulation.one import run_one
from podium.lab.published.accumulation.profile import Profile, measure_profile
from podium.lab.published.accumulation.rows import (
    ALONE,
    BESIDE,
    failure,
    identity,
    key,
    open_store,
    profile_name,
    profiles,
    runs,
    study_row,
    told,
)
from podium.lab.study.processes import RunProcess, least_used
from podium.lab.study.store import Row, Store
from podium.records.manifest import hardware, versions

_POLL_S = 0.1

Say = Callable[[str], None]


class _Asked(NamedTuple):
    who: Row
    options: dict[str, Any]
    cluster: str


def run_virtual(study: Study, out: Path, *, jobs: int = 1, say: Say = print) -> int:
    """Run what has not been run, so many at a time; returns how many runs failed. Measures profiles where none are."""
    if jobs < 1:
        raise ConfigError(f"accumulation: jobs must be at least 1, got {jobs}")
    store = _open(study, out)
    known = _profiles(study, store, beside=0, say=say)
    waiting = _waiting(study, store, study.runs(), known, part="virtual", where=ALONE)
    return _run_all(waiting, store, study, jobs, say)


def run_real(study: Study, out: Path, *, say: Say = print) -> int:
    """The real cells on shaped links, one run after another, and what virtual time predicts for them. Needs root.

    The prediction is made of profiles that were measured with as many processes as the cells have nodes.
    """
    store = _open(study, out)
    most = max((cell.nodes for cell in study.real), default=1)
    known = {
        where: _profiles(study, store, beside=beside, say=say) for where, beside in ((ALONE, 0), (BESIDE, most - 1))
    }
    failed = 0
    for part in ("predicted", "real"):
        waiting = []
        for cell, seed in study.real_runs():
            where = BESIDE if cell.nodes > 1 else ALONE
            waiting += _waiting(study, store, [(cell, seed)], known[where], part=part, where=where)
        if part == "predicted":
            failed += _run_all(waiting, store, study, 1, say)
            continue
        for asked in waiting:
            row = run_one(*asked)
            store.append(row)
            failed += row["status"] != "finished"
            say(told(row))
    return failed


def _open(study: Study, out: Path) -> Store:
    """The file, with a row about this study in it; refuses one that holds another study."""
    store = open_store(out)
    facts = {
        "kind": "study",
        "name": "accumulation",
        "size": study.size,
        "factors": study.factors,
        "seeds": list(study.seeds),
        "passes": study.passes,
        "networks": {
            one.name: {"title": one.title, "task": one.task, "options": one.options} for one in study.networks
        },
    }
    before = study_row(store.rows())
    if not before:
        store.append({**facts, "versions": versions(), "hardware": hardware()})
    for name, value in facts.items():
        if before and before[name] != value:
            raise ConfigError(
                f"accumulation: {store.results} holds another study, with {name} {before[name]!r}; wanted {value!r}. "
                "Give another --out"
            )
    return store


def _profiles(study: Study, store: Store, *, beside: int, say: Say) -> dict[str, Profile]:
    """By model; measured and written down where they are missing."""
    where, found = BESIDE if beside else ALONE, {}
    for network in study.networks:
        name = profile_name(network.name, where)
        if name not in profiles(store.rows()):
            measured = measure_profile(
                network.task,
                network.options,
                batches=study.profile_batches,
                repeats=study.profile_repeats,
                beside=beside,
            )
            store.append({"kind": "profile", "name": name, "model": network.name, **measured.to_dict()})
            say(f"profile: {name}: {measured.per_sample_s.value * 1e3:.2f} ms a sample")
        found[network.name] = profiles(store.rows())[name]
    return found


def _waiting(
    study: Study,
    store: Store,
    wanted: Sequence[tuple[Cell, int]],
    known: dict[str, Profile],
    *,
    part: str,
    where: str,
) -> list[_Asked]:
    done, real = {key(row) for row in runs(store.rows(), part)}, part == "real"
    found = []
    for cell, seed in wanted:
        who = identity(study, cell, seed, part=part, profile=profile_name(cell.model, where))
        if key(who) not in done:
            cluster = study.cluster(cell, known[cell.model], real=real)
            found.append(_Asked(who, study.options(cell, seed, real=real), cluster))
    return found


def _run_all(asked: Sequence[_Asked], store: Store, study: Study, jobs: int, say: Say) -> int:
    """A few runs in a process and on a core of its own: loading Python takes longer than a short run."""
    from podium.launch.ending import termination_unwinds

    few = study.runs_per_process
    waiting = [asked[i : i + few] for i in range(0, len(asked), few)]
    running, number, ended, failed = list[RunProcess](), 0, 0, 0
    with tempfile.TemporaryDirectory(prefix="podium-accumulation-") as scratch, termination_unwinds():
        try:
            while waiting or running:
                while waiting and len(running) < jobs:
                    number += 1
                    running.append(_start(waiting.pop(0), Path(scratch) / f"{number}", study, running))
                for over in [process for process in running if process.is_over()]:
                    running.remove(over)
                    for row in over.row()["rows"]:
                        store.append(row)
                        ended, failed = ended + 1, failed + (row["status"] != "finished")
                        say(f"[{ended}/{len(asked)}] {told(row)}")
                time.sleep(_POLL_S)
        finally:
            for left in running:
                left.kill()
    return failed


def _start(some: Sequence[_Asked], folder: Path, study: Study, running: Sequence[RunProcess]) -> RunProcess:
    def all_failed(why: str) -> Row:
        return {"rows": [failure(one.who, why) for one in some]}

    return RunProcess(
        "podium.lab.published.accumulation",
        {"runs": [one._asdict() for one in some]},
        folder,
        deadline_s=study.deadline_s * len(some),
        core=least_used(os.sched_getaffinity(0), [other.core for other in running]),
        failed=all_failed,
    )
