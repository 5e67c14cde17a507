"""Run a comparison: every strategy with every seed, one after another, and make the report.

    comparison = podium.compare("digits-mlp", strategies=["solo", "all-reduce"], seeds=5, workers=2)
    print(comparison.answer)

Runs never overlap: two at once would take each other's cores and the clock would tell of that, not of the strategies.
A run that fails is a row that says so. A comparison that was killed is taken up again by asking for the same one with
the same `out`: finished runs are read, failed and unfinished ones are tried again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from podium.config import RunConfig, RunResult
from podium.errors import Interrupted, PodiumError, RecordError
from podium.measure.records import read_records, to_json
from podium.measure.staleness import tables
from podium.strategies import make_strategy
from podium.study.answer import find, tell
from podium.study.design import Design, check_same, make_design, surroundings
from podium.study.report import write_report
from podium.study.rows import arranged
from podium.study.statistics import Summary, require_statistics
from podium.study.store import Key, Row, Store, finished_keys

if TYPE_CHECKING:
    from podium.task import Task

OnEvent = Callable[[dict[str, Any]], None]
Launch = Callable[..., RunResult]
"""`podium.cluster.launch.launch`, or anything that takes a RunConfig, `task`, `on_event` and `stop` as it does."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What a comparison came to. `podium compare --json` prints it."""

    out: str
    status: Literal["finished", "stopped"]
    """`stopped` when the user ended it early; asking for the same one again goes on."""
    task: str
    metric: str
    target: float | None
    """What "time to target" means here, in terms of the metric."""
    answer: str
    """The answer, then on a second line what may not be concluded."""
    table: tuple[Summary, ...]
    rows: tuple[Row, ...]
    """All rows, strategy by strategy, failures and repeated tries among them."""
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
    launch: Launch | None = None,
    stop: Event | None = None,
    **run_options: Any,
) -> Comparison:
    """Train `task` with each strategy and each seed, and say what differs.

    `seeds` is how many (0, 1, 2 …) or which. `target` is the value of the task's metric that "time to target" waits
    for; without one it lies 5 % short of the best strategy's mean. Other options are fields of RunConfig. `on_event`
    gets the launcher's events with `cell` and `seed` added, and around each run `{"event": "cell"}` (with `number`,
    `total`) and `{"event": "cell-end"}` (with `status`). Setting `stop` ends the comparison after the run in progress
    has been saved.
    """
    require_statistics()
    name = task if isinstance(task, str) else task.name
    own_task = None if isinstance(task, str) else task
    fields = {"workers": workers, "launcher": launcher, "target": target, "own_task": own_task is not None}
    design = make_design(name, strategies, seeds, run_options, **fields)
    store = Store(out if out is not None else _new_folder(name))
    study = _open_study(store, design)
    runs = _Runs(design, store, launch or _default_launch(), own_task, on_event or _ignore, stop or Event())
    status = runs.go()
    return _conclude(store, study, status)


def _conclude(store: Store, study: Mapping[str, Any], status: Literal["finished", "stopped"]) -> Comparison:
    rows = arranged(store.rows(), study["strategies"])
    findings = find(rows, study["target"])
    return Comparison(
        out=str(store.folder),
        status=status,
        task=study["task"],
        metric=findings.metric,
        target=findings.target,
        answer=tell(findings, rows, study["hardware"]),
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

    def go(self) -> Literal["finished", "stopped"]:
        """Run what has not been run; each row is on disk before the next run starts."""
        order = self.design.order()
        done = finished_keys(self.store.rows())
        for number, key in enumerate(order, 1):
            if key in done:
                continue
            if self.stop.is_set():
                return "stopped"
            self._tell(key, event="cell", number=number, total=len(order))
            row = self._run(key)
            self.store.append(row)
            self._tell(key, event="cell-end", status=row["status"], number=number, total=len(order))
            if row["status"] == "stopped":
                return "stopped"
        return "finished"

    def _run(self, key: Key) -> Row:
        cell, seed = key
        config = self.design.config(cell, seed)
        config = replace(config, run_dir=str(self.store.fresh_run_dir(cell, seed)))
        try:
            result = self.launch(config, task=self.task, on_event=self._forward(key), stop=self.stop)
        except Interrupted:
            raise
        except PodiumError as error:
            return _failure(key, config, error)
        row = {**result.to_dict(), "cell": cell, "seed": seed, "parameters": _parameters(result.run_dir)}
        stale = _staleness(result, config)
        return row if stale is None else {**row, "staleness_by": stale}

    def _forward(self, key: Key) -> OnEvent:
        return lambda event: self._tell(key, **event)

    def _tell(self, key: Key, **event: Any) -> None:
        self.on_event({**event, "cell": key[0], "seed": key[1]})


def _failure(key: Key, config: RunConfig, error: PodiumError) -> Row:
    return {
        "cell": key[0],
        "seed": key[1],
        "status": "failed",
        "error": f"{type(error).__name__}: {error}",
        "workers": config.workers,
        "launcher": config.launcher,
        "run_dir": config.run_dir,
    }


def _open_study(store: Store, design: Design) -> Row:
    """The study in this folder, if it is this one; a new one otherwise."""
    wanted = design.to_dict()
    if not store.study.is_file():
        store.write_study({**wanted, **surroundings()})
        return store.read_study()
    found = store.read_study()
    # Compared as JSON has them: a tuple written is a list read.
    check_same(found, _as_json(wanted), str(store.folder))
    return found


def _as_json(value: Any) -> Any:
    return json.loads(to_json(value))


def _new_folder(task: str) -> Path:
    stem = "".join(c if c.isalnum() else "-" for c in task).strip("-")
    base = Path("runs") / f"compare-{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    path, tries = base, 1
    while path.exists():
        tries += 1
        path = base.with_name(f"{base.name}-{tries}")
    return path


def _parameters(run_dir: str) -> int | None:
    """How many parameters the model has, from the run's own records; None where they do not say."""
    path = Path(run_dir) / "records" / "rank-0.jsonl"
    try:
        first = next(read_records(path), {})
    except RecordError:
        return None
    count = first.get("parameters")
    return count if isinstance(count, int) else None


def _staleness(result: RunResult, config: RunConfig) -> dict[str, Any] | None:
    """Staleness by worker and range, from the run's own records; None where nothing was applied by itself."""
    if not result.updates:
        return None
    try:
        found = tables(read_records(Path(result.run_dir)))
    except RecordError:
        return None
    # Only the strategy knows the bound, and only where leads were recorded was there one.
    return (found if found.lead is None else replace(found, bound=_bound(config))).to_dict()


def _bound(config: RunConfig) -> int | None:
    """How far a strategy lets a worker get ahead of the slowest; None of one that does not say so in our words."""
    strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
    fields = {"ssp": "staleness", "dssp": "staleness_high"}
    bound = getattr(strategy, fields.get(getattr(strategy, "mode", ""), ""), None)
    return bound if isinstance(bound, int) else None


def _default_launch() -> Launch:
    from podium.cluster.launch import launch

    return launch


def _ignore(event: dict[str, Any]) -> None:
    """Nobody listens."""
