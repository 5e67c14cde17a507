"""Run a study: every cell with every seed, and make the report.

    comparison = podium.compare("digits-mlp", strategies=["solo", "all-reduce"], seeds=5, workers=2)
    print(comparison.answer)
    podium.run_study("studies/strategies.toml", size="small")

Real runs never overlap: two at once would take each other's cores and the clock would tell of that, not of the
strategies. Runs in virtual time may (`jobs`). A run that fails is a row that says so. A study that was killed is taken
up again by asking for the same one with the same `out`: finished runs are read, failed and unfinished ones are tried
again.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import ConfigError
from podium.lab.report.answer import find, tell
from podium.lab.report.report import write_report
from podium.lab.stats.statistics import Summary, mean_interval, require_statistics
from podium.lab.study.design import TOLD, Design, check_same, strategies_design, surroundings
from podium.lab.study.file import read_study
from podium.lab.study.responses import response_of
from podium.lab.study.rows import arranged, finished
from podium.lab.study.run_one import Asked, Launch, OnEvent, run_one
from podium.lab.study.run_parallel import run_several
from podium.lab.study.store import Key, Row, Store, finished_keys, modern, short_name
from podium.lab.study.study import Study
from podium.launch.rendezvous import rendezvous_folder
from podium.records.recorder import to_json

if TYPE_CHECKING:
    from podium.task import Task


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison came to. `podium compare --json` prints it."""

    out: str
    status: Literal["finished", "stopped"]
    """`stopped` when the user ended it early; asking for the same one again goes on."""
    name: str
    """The study's; of a comparison of strategies the task's."""
    task: str | None
    """None where cells have tasks of their own."""
    metric: str
    target: float | None
    """What "time to target" means here, in terms of the metric."""
    answer: str
    """The answer, then on a second line what may not be concluded."""
    table: tuple[Summary, ...]
    rows: tuple[Row, ...]
    """All rows, cell by cell, failures and repeated tries among them."""
    report: str

    @property
    def failed(self) -> int:
        """How many cells and seeds ended in a failure."""
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
    """Train `task` with each strategy and each seed, and say what differs.

    `seeds` is how many (0, 1, 2 …) or which. `target` is the value of the task's metric that "time to target" waits
    for; without one it lies 5 % short of the best strategy's mean. `maximize` is whether that metric is better when
    higher; without it, losses and errors are better when lower and all else when higher. Other options are fields of
    RunConfig. `on_event` gets the launcher's events with `cell` and `seed` added, and around each run
    `{"event": "cell"}` (with `number`, `total`) and `{"event": "cell-end"}` (with `status`). Setting `stop` ends the
    comparison after the run in progress has been saved. `jobs` runs go on at once where time is virtual.
    """
    name = task if isinstance(task, str) else task.name
    own_task = None if isinstance(task, str) else task
    settings = {**run_options, "workers": workers, "launcher": launcher}
    fields = {"target": target, "maximize": maximize, "own_task": own_task is not None, "retries": 0}
    design = strategies_design(name, strategies, seeds, settings, **fields)
    return run_design(
        design, out or new_folder(name), task=own_task, launch=launch, on_event=on_event, stop=stop, jobs=jobs
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
    **settings: Any,
) -> Comparison:
    """Run a study, or the one in a file, and make its report; other options are settings of all its runs.

    Results go to `out`, or to a folder under `runs` named after the study, where the same call goes on from what is
    there.
    """
    chosen = study if isinstance(study, Study) else read_study(study, size)
    design = (chosen.changed(settings) if settings else chosen).design()
    folder = out or study_folder(design)
    return run_design(design, folder, launch=launch, on_event=on_event, stop=stop, jobs=jobs)


def run_design(
    design: Design,
    out: str | Path,
    *,
    task: Task | None = None,
    on_event: OnEvent | None = None,
    launch: Launch | None = None,
    stop: Event | None = None,
    jobs: int = 1,
) -> Comparison:
    """Run what has not been run of a design, and conclude."""
    require_statistics()
    _check_jobs(design, jobs, task, launch)
    store = Store(out)
    with store.held():
        study = _open_study(store, design)
        runs = _Runs(design, store, launch or _default_launch(), task, on_event or _Notices(), stop or Event(), jobs)
        status = runs.go()
        return _conclude(store, study, status)


def study_folder(design: Design) -> Path:
    """Where a study's results go when nobody says: the same place each time."""
    return Path("runs") / _stem(f"{design.name}-{design.size}" if design.size else design.name)


def _check_jobs(design: Design, jobs: int, task: Task | None, launch: Launch | None) -> None:
    if jobs < 1:
        raise ConfigError(f"compare: jobs must be at least 1, got {jobs}")
    if jobs == 1:
        return
    real = [name for name in design.names if design.config(name, 0).launcher != "virtual"]
    if real:
        raise ConfigError(
            f"compare: jobs={jobs}: only runs in virtual time may go on at once, since real ones would take each "
            f"other's cores; {real[0]} is real"
        )
    if task is not None or launch is not None:
        raise ConfigError(f"compare: jobs={jobs} needs a task that can be named, since each run gets its own process")


def _conclude(store: Store, study: Mapping[str, Any], status: Literal["finished", "stopped"]) -> Comparison:
    rows = arranged(store.runs(), [cell["cell"] for cell in study["cells"]])
    findings = find(rows, study["target"], study.get("maximize"))
    return Comparison(
        out=str(store.folder),
        status=status,
        name=study["name"],
        task=study["task"],
        metric=findings.metric,
        target=findings.target,
        answer=tell(findings, rows, study),
        table=tuple(findings.table),
        rows=tuple(rows),
        report=str(write_report(store.folder)),
    )


@dataclass(frozen=True)
class _Runs:
    """The runs of one study, and all that each of them needs."""

    design: Design
    store: Store
    launch: Launch
    task: Task | None
    on_event: OnEvent
    stop: Event
    jobs: int
    through: set[Key] = field(default_factory=set)
    """Runs that need no further try: finished, or failed as often as they may."""

    def go(self) -> Literal["finished", "stopped"]:
        """Run what has not been run, block by block; each row is on disk before its successor starts."""
        if "setup_s" in self.design.responses:
            self._warm_up()
        self.through.update(finished_keys(self.store.runs()))
        for number, block in enumerate(self.design.blocks()):
            if number >= self.design.replications.least and self._is_precise():
                break
            waiting = [key for key in block if key not in self.through]
            several = self.jobs > 1 and len(waiting) > 1
            status = self._at_once(waiting) if several else self._one_by_one(waiting)
            if status == "stopped":
                return "stopped"
        return "finished"

    def _warm_up(self) -> None:
        """One step that no row tells of: else whoever comes first would pay for what is loaded once."""
        with rendezvous_folder() as folder:
            asked = self._asked(self.design.order()[0], f"{folder}/run")
            asked = replace(asked, config=replace(asked.config, steps=1, eval_every=0), pictured=False)
            # What is wrong with it is told when its turn comes.
            run_one(asked, launch=self.launch, task=self.task, on_event=_ignore, stop=self.stop)

    def _one_by_one(self, keys: Sequence[Key]) -> Literal["finished", "stopped"]:
        for key in keys:
            for left in reversed(range(self.design.retries + 1)):
                if self.stop.is_set():
                    return "stopped"
                self._tell(key, event="cell")
                row = run_one(
                    self._asked(key),
                    launch=self.launch,
                    task=self.task,
                    on_event=self._forward(key),
                    stop=self.stop,
                )
                self._append(key, row, left)
                if row["status"] == "stopped":
                    return "stopped"
                if row["status"] == "finished":
                    break
        return "finished"

    def _at_once(self, keys: Sequence[Key]) -> Literal["finished", "stopped"]:
        left = dict.fromkeys(keys, self.design.retries + 1)
        while waiting := [key for key, tries in left.items() if tries]:
            for key, row in run_several(waiting, self._asked, self.jobs, self.stop):
                left[key] = 0 if row["status"] == "finished" else left[key] - 1
                self._append(key, row, left[key])
            if self.stop.is_set():
                return "stopped"
        return "finished"

    def _asked(self, key: Key, run_dir: str | None = None) -> Asked:
        """One run; its records go to a new folder of the study, unless another is given."""
        cell = self.design.at(key[0])
        config = self.design.config(*key)
        return Asked(
            cell=cell.cell,
            levels=cell.levels,
            seed=key[1],
            nodes=self.design.nodes(config),
            config=replace(config, run_dir=run_dir or str(self.store.fresh_run_dir(*key))),
            stop=self.design.stop,
            target=self.design.target,
            maximize=self.design.maximize,
            pictured=key[1] == self.design.replications.seeds[0],
        )

    def _append(self, key: Key, row: Row, left: int) -> None:
        """Keep a row; `left` is how many tries there still are."""
        self.store.append(row)
        if row["status"] == "finished" or (row["status"] == "failed" and not left):
            self.through.add(key)
        again = ", tried again" if row["status"] == "failed" and left else ""
        self._tell(key, event="cell-end", status=row["status"] + again)

    def _is_precise(self) -> bool:
        """Whether every cell's mean is known as well as was asked for. Without such a wish, seeds alone decide."""
        asked = self.design.replications
        if asked.half_width is None:
            return False
        rows = finished(self.store.runs())
        for name in self.design.names:
            runs = [row for row in rows if row["cell"] == name]
            target, maximize = self.design.target, self.design.maximize
            values = [response_of(row, asked.response, target, maximize=maximize) for row in runs]
            mean = mean_interval([value for value in values if value is not None])
            if mean is None or mean.low is None or mean.high is None:
                if runs:
                    return False
                continue  # it fails with every seed, so more of them would not help
            if (mean.high - mean.low) / 2 > asked.half_width * abs(mean.mean):
                return False
        return True

    def _forward(self, key: Key) -> OnEvent:
        return lambda event: self._tell(key, **event)

    def _tell(self, key: Key, **event: Any) -> None:
        if event.get("event") in ("cell", "cell-end"):
            event |= {"number": len(self.through - {key}) + 1, "total": len(self.design.order())}
        self.on_event({**event, "cell": key[0], "seed": key[1]})


def _open_study(store: Store, design: Design) -> Row:
    """The study in this folder, if it is this one; a new one otherwise."""
    wanted = design.to_dict()
    if not store.study.is_file():
        if (store.folder / "manifest.json").is_file():  # of a run or a sweep
            raise ConfigError(f"compare: {store.folder} must be a new folder or a study's, and holds other results")
        store.write_study({**wanted, **surroundings()})
        return store.read_study()
    found = modern(store.read_study())
    # Compared as JSON has them: a tuple written is a list read.
    asked = _as_json(wanted)
    check_same(found, asked, str(store.folder))
    now = {**found, **{name: asked[name] for name in TOLD}}
    if now != found:
        store.write_study(now)
    return now


def _as_json(value: Any) -> Any:
    return json.loads(to_json(value))


def new_folder(task: str) -> Path:
    """A folder for a comparison that was given none: nobody has used it."""
    base = Path("runs") / f"compare-{_stem(task)}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, tries = base, 1
    while path.exists():
        tries += 1
        path = base.with_name(f"{base.name}-{tries}")
    return path


def _stem(name: str) -> str:
    return short_name("".join(c if c.isalnum() else "-" for c in name).strip("-") or "study")


def _default_launch() -> Launch:
    from podium.launch.run import launch

    return launch


class _Notices:
    """Listens where nobody else does: what is said before a run is logged, each text once."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def __call__(self, event: dict[str, Any]) -> None:
        if event.get("event") == "notice" and event["text"] not in self._said:
            self._said.add(event["text"])
            logging.getLogger("podium").warning(event["text"])


def _ignore(event: dict[str, Any]) -> None:
    """Nobody listens."""
