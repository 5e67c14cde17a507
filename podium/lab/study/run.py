"""Run a study: every cell with every seed, then the report.

    comparison = podium.compare("digits-mlp", strategies=["solo", "all-reduce"], seeds=5, workers=2)
    print(comparison.answer)
    podium.run_study("studies/strategies.toml", size="small")

Real runs never overlap: two at once would compete for cores, which would change their seconds. Runs in virtual time may
overlap (`jobs`). A run that fails gets a row with its error. The same call with the same `out` resumes a study that was
killed: finished runs are read, failed and unfinished ones are retried.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import ConfigError
from podium.lab.report.report import write_report
from podium.lab.report.study_results import StudyResults
from podium.lab.stats.statistics import Summary, require_statistics
from podium.lab.study.file import read_study
from podium.lab.study.parts import this_machine
from podium.lab.study.run_all import Part, Runs
from podium.lab.study.run_one import Launch, OnEvent
from podium.lab.study.same import TOLD, check_same
from podium.lab.study.store import Row, Store, short_name
from podium.lab.study.study import Study, strategies_study
from podium.records.folder_name import new_folder
from podium.records.recorder import to_json

if TYPE_CHECKING:
    from podium.task import Task


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of a comparison. `podium compare --json` prints it."""

    out: str
    status: Literal["finished", "stopped"]
    """`stopped` when the user ended it early; the same call resumes it."""
    name: str
    """The study's name; for a comparison of strategies, the task's."""
    task: str | None
    """None if cells differ in it."""
    metric: str
    target: float | None
    """The value of the metric for "time to target"."""
    answer: str
    """The answer, then on a second line what may not be concluded."""
    table: tuple[Summary, ...]
    rows: tuple[Row, ...]
    """All rows by cell, including failures and retries."""
    report: str

    @property
    def failed(self) -> int:
        """How many runs (cell and seed) ended in a failure."""
        return sum(line.failed for line in self.table)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def compare(
    task: str | Task = "digits-mlp",
    *,
    strategies: Sequence[str],
    seeds: int | Sequence[int] = 3,
    workers: int = 2,
    launcher: str = "local",
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
    target: float | None = None,
    maximize: bool | None = None,
    launch: Launch | None = None,
    stop: Event | None = None,
    jobs: int = 1,
    **run_options: Any,
) -> Comparison:
    """Train `task` with each strategy and each seed, and report what differs.

    `seeds` is a number of seeds (0, 1, 2 …) or a list of them. `target` is the value of the task's metric for "time to
    target"; the default is 5 % worse than the best strategy's mean. `maximize`: whether a higher metric is better; by
    default, lower is better for losses and errors, and higher for all else. Other options are fields of RunConfig.
    `on_event` receives the launcher's events with `cell` and `seed` added, and around each run `{"event": "cell"}`
    (with `number`, `total`) and `{"event": "cell-end"}` (with `status`). Setting `stop` ends the comparison after the
    current run has been saved. `jobs` is the number of parallel runs, in virtual time only; of these, `on_event`
    receives `cell-end` alone.
    """
    name = task if isinstance(task, str) else task.name
    own_task = None if isinstance(task, str) else task
    settings = {**run_options, "workers": workers, "launcher": launcher}
    fields = {"target": target, "maximize": maximize, "own_task": own_task is not None, "retries": 0}
    study = strategies_study(name, strategies, seeds, settings, **fields)
    return run_resolved(
        study,
        out or new_folder("runs", f"compare-{name}"),
        task=own_task,
        launch=launch,
        on_event=on_event,
        stop=stop,
        jobs=jobs,
    )


def run_study(
    study: Study | str | Path,
    *,
    size: str | None = None,
    out: str | Path | None = None,
    on_event: OnEvent | None = None,
    launch: Launch | None = None,
    stop: Event | None = None,
    jobs: int = 1,
    only: Mapping[str, Sequence[Any]] | None = None,
    budget_s: float | None = None,
    **settings: Any,
) -> Comparison:
    """Run a study or a study file, and make its report; other options are settings of all its runs.

    Results go to `out`, by default to a folder under `runs` named after the study; the same call resumes there. `only`
    runs just the cells with these levels, and `budget_s` starts no run after that many seconds; a later call does the
    rest.
    """
    chosen = study if isinstance(study, Study) else read_study(study, size)
    resolved = (chosen.changed(settings) if settings else chosen).resolved()
    folder = out or study_folder(resolved)
    return run_resolved(
        resolved, folder, launch=launch, on_event=on_event, stop=stop, jobs=jobs, only=only, budget_s=budget_s
    )


def run_resolved(
    study: Study,
    out: str | Path,
    *,
    task: Task | None = None,
    on_event: OnEvent | None = None,
    launch: Launch | None = None,
    stop: Event | None = None,
    jobs: int = 1,
    only: Mapping[str, Sequence[Any]] | None = None,
    budget_s: float | None = None,
) -> Comparison:
    """Make the missing runs of a resolved study, and evaluate all of them."""
    require_statistics()
    _check_jobs(study, jobs, task, launch)
    Part.of(study, only or {}, budget_s)  # a wrong request is refused before a folder is made
    store = Store(out)
    with store.locked():
        study = replace(_open_study(store, study), measure=study.measure)  # `study.json` contains no code
        part = Part.of(study, only or {}, budget_s)
        hear = on_event or _Notices()
        runs = Runs(study, store, launch or _default_launch(), task, hear, stop or Event(), jobs, part)
        status = runs.go()
        return _conclude(store, status)


def study_folder(study: Study) -> Path:
    """The default folder of a study's results, the same each time."""
    return Path("runs") / _stem(f"{study.name}-{study.size}" if study.size else study.name)


def _check_jobs(study: Study, jobs: int, task: Task | None, launch: Launch | None) -> None:
    if jobs < 1:
        raise ConfigError(f"compare: jobs must be at least 1, got {jobs}")
    if jobs == 1:
        return
    trainings = study.runs == "trainings"
    real = [name for name in study.names if not trainings or study.config(name, 0).launcher != "virtual"]
    if real:
        raise ConfigError(
            f"compare: jobs={jobs}: only runs in virtual time may run in parallel, since real ones would compete for "
            f"cores; {real[0]} is real"
        )
    if task is not None or launch is not None:
        raise ConfigError(f"compare: jobs={jobs} needs a task given by name, since each run gets its own process")


def _conclude(store: Store, status: Literal["finished", "stopped"]) -> Comparison:
    results = StudyResults.read(store.folder)
    findings = results.findings
    return Comparison(
        out=str(store.folder),
        status=status,
        name=results.study.name,
        task=results.study.plan.task,
        metric=findings.metric,
        target=findings.target,
        answer="\n".join(results.said),
        table=tuple(findings.table),
        rows=tuple(results.rows),
        report=str(write_report(results)),
    )


def _open_study(store: Store, study: Study) -> Study:
    """The study in this folder, which must be the same; written there if the folder is new."""
    if not store.study.is_file():
        if (store.folder / "manifest.json").is_file():  # the folder of a run or a sweep
            raise ConfigError(f"compare: {store.folder} must be a new folder or a study's, got one with other results")
        begun = replace(study, machine=this_machine())
        store.write_study(begun.to_dict())
        return begun
    found = Study.read(store)
    # Compared as JSON: a tuple that was written is read as a list.
    check_same(_as_json(found.to_dict()), _as_json(study.to_dict()), str(store.folder))
    now = replace(found, **{name: getattr(study, name) for name in TOLD})
    if _as_json(now.to_dict()) != _as_json(found.to_dict()):
        store.write_study(now.to_dict())
    return now


def _as_json(value: Any) -> Any:
    return json.loads(to_json(value))


def _stem(name: str) -> str:
    return short_name("".join(c if c.isalnum() else "-" for c in name).strip("-") or "study")


def _default_launch() -> Launch:
    from podium.launch.run import launch

    return launch


class _Notices:
    """The default listener: logs the notices before a run, each text once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("event") == "notice" and event["text"] not in self._said:
            self._said.add(event["text"])
            logging.getLogger("podium").warning(event["text"])
