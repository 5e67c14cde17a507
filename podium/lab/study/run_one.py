"""One run of a study: from a configuration to its row. Also the main function of a process for runs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

from podium.config import RunConfig, RunResult, build
from podium.errors import Interrupted, RecordError
from podium.lab.study.parts import Stop
from podium.lab.study.results import metric_name
from podium.lab.study.run_sweep import run_sweep
from podium.lab.study.store import Key, Row, place_of
from podium.records.disk import write_atomically
from podium.records.energy import open_meter
from podium.records.metrics import lower_is_better
from podium.records.recorder import read_records, to_json
from podium.records.staleness import tables
from podium.strategies import make_strategy

if TYPE_CHECKING:
    from podium.lab.study.study import Study
    from podium.task import Task

OnEvent = Callable[[dict[str, Any]], None]
Launch = Callable[..., RunResult]
"""`podium.launch.run.launch`, or anything that takes a RunConfig, `task`, `on_event` and `stop` as it does."""


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """Everything that determines one run and its row."""

    cell: str
    levels: Mapping[str, Any]
    seed: int
    nodes: int
    config: RunConfig
    stop: Stop
    target: float | None
    maximize: bool | None = None
    """Whether a higher metric is better; None decides by its name."""
    pictured: bool
    """Whether its row contains the data of its timeline and topology."""

    @property
    def identity(self) -> Row:
        """The fields of every row, however its run ended."""
        return {"cell": self.cell, "levels": dict(self.levels), "seed": self.seed, "nodes": self.nodes}

    def to_dict(self) -> dict[str, Any]:
        return {**vars(self), "config": self.config.to_dict(), "stop": vars(self.stop)}

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RunRequest:
        config = build(RunConfig, values["config"], who="run")
        return cls(**{**values, "config": config, "stop": build(Stop, values["stop"], who="stop")})


def run_one(asked: RunRequest, *, launch: Launch, task: Task | None, on_event: OnEvent, stop: Event) -> Row:
    """Launch the run and return its row; the row of a failed run has the error."""
    began, ending = time.monotonic(), _Ending(asked, stop)
    energy = _Energy(asked.config)
    heard = _both(ending.hear, energy.hear, on_event)
    try:
        result = launch(asked.config, task=task, on_event=heard, stop=ending)
    except Interrupted:
        raise
    except Exception as error:  # also from the user's task: one bad cell must not end the study
        return failed_row_of(asked, f"{type(error).__name__}: {error}")
    finally:
        energy.close()
    row = {**result.to_dict(), **asked.identity, "wall_s": round(time.monotonic() - began, 3)}
    if ending.reason and not stop.is_set():
        row.update(status="finished", ended_by=ending.reason)
    row["history"] = energy.added_to(result.history)
    return {**row, **_from_records(result, asked)}


def run_other(study: Study, key: Key, folder: Path, stop: Event) -> Row:
    """A run that is not a training: a sweep, or a call of the study's own function."""
    cell, began = study.at(key[0]), time.monotonic()
    told: Row = {"cell": cell.cell, "levels": dict(cell.levels), "seed": key[1], "run_dir": str(folder)}
    settings = {**study.settings, **cell.settings}
    try:
        if callable(study.runs):
            row = {"status": "finished", **study.runs(settings, key[1])}
        else:
            row = run_sweep(settings, key[1], folder, stop)
    except Interrupted:
        raise
    except Exception as error:  # also from the user's function: one bad cell must not end the study
        row = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    return {**told, **row, "wall_s": round(time.monotonic() - began, 3)}


class _Ending(Event):
    """An event set by the caller, or when a validation meets the study's rule for ending a run."""

    def __init__(self, asked: RunRequest, outer: Event) -> None:
        super().__init__()
        self._request, self._outer, self.reason = asked, outer, ""

    def is_set(self) -> bool:
        return super().is_set() or self._outer.is_set()

    def hear(self, event: dict[str, Any]) -> None:
        if event.get("event") != "eval" or self.reason:
            return
        limit, target = self._request.stop.seconds, self._request.target if self._request.stop.target else None
        if limit is not None and event["seconds"] >= limit:
            self.reason = "seconds"
        elif target is not None and _met(event, target, self._request.maximize):
            self.reason = "target"
        if self.reason:
            self.set()


def _met(event: Mapping[str, Any], target: float, maximize: bool | None) -> bool:
    metric = metric_name([{"cell": "", "seed": 0, "status": "finished", "metrics": event["metrics"]}])
    value = event["metrics"].get(metric, event["loss"])
    return bool(value <= target if lower_is_better(metric, maximize) else value >= target)


class _Energy:
    """Reads the machine's energy counter at each validation; not in virtual time."""

    def __init__(self, config: RunConfig) -> None:
        self._meter = None if config.launcher == "virtual" else open_meter(config.device)
        self._first = None if self._meter is None else self._meter.joules()
        self._at: dict[int, float] = {}

    def hear(self, event: dict[str, Any]) -> None:
        if self._meter is None or self._first is None or event.get("event") != "eval":
            return
        now = self._meter.joules()
        if now is not None:
            self._at[event["position"]] = now - self._first

    def added_to(self, history: Any) -> list[dict[str, Any]]:
        """The history with joules since the launch, where they were measured."""
        extra = {"joules_of": self._meter.what} if self._meter is not None else {}
        return [
            {**point, "joules": self._at[at], **extra} if (at := point.get("samples")) in self._at else dict(point)
            for point in history
        ]

    def close(self) -> None:
        if self._meter is not None:
            self._meter.close()


def _both(*listeners: OnEvent) -> OnEvent:
    def tell(event: dict[str, Any]) -> None:
        for listener in listeners:
            listener(event)

    return tell


def _failure(config: RunConfig, why: str) -> Row:
    return {
        "status": "failed",
        "error": why,
        "workers": config.workers,
        "launcher": config.launcher,
        "run_dir": config.run_dir,
    }


def _from_records(result: RunResult, asked: RunRequest) -> dict[str, Any]:
    """The fields of a row that come from the run's records; None where they lack the value."""
    try:
        records = list(read_records(Path(result.run_dir)))
    except RecordError:
        return {"parameters": None, "setup_s": None}
    begins = [row for row in records if row["kind"] == "begin"]
    starts = [row["t_ns"] - row["step_ns"] for row in records if row["kind"] == "step"]
    count = next((row.get("parameters") for row in begins if row["role"] == "worker"), None)  # a server has a shard
    found: dict[str, Any] = {
        "parameters": count if isinstance(count, int) else None,
        "setup_s": min(starts) / 1e9 if starts else None,
    }
    if result.updates:
        found["staleness_by"] = _staleness(records, asked.config)
    if asked.pictured and records:
        with suppress(RecordError, OSError, KeyError):  # a row without figures is better than none
            found |= _pictures(records, Path(result.run_dir))
    return found


def _pictures(records: list[Row], run_dir: Path) -> dict[str, Any]:
    from podium.lab.report.topology import topology
    from podium.records.manifest import read_manifest
    from podium.records.timeline import timeline
    from podium.records.trace import write_trace

    trace = write_trace(run_dir)
    return {
        "trace": f"{place_of(str(run_dir))}/{trace.name}",
        "timeline": timeline(records),
        "topology": topology(records, read_manifest(run_dir)),
    }


def _staleness(records: list[Row], config: RunConfig) -> dict[str, Any]:
    """Staleness by worker and range."""
    found = tables(records)
    # Only the strategy knows the bound; there is one only if leads were recorded.
    return (found if found.lead is None else replace(found, bound=_bound(config))).to_dict()


def _bound(config: RunConfig) -> int | None:
    """How many steps a worker may be ahead of the slowest; None if the strategy sets no bound."""
    strategy = make_strategy(config.strategy, config.strategy_options, config.workers)
    fields = {"ssp": "staleness", "dssp": "staleness_high"}
    bound = getattr(strategy, fields.get(getattr(strategy, "mode", ""), ""), None)
    return bound if isinstance(bound, int) else None


def failed_row_of(asked: RunRequest, why: str) -> Row:
    """The row of a failed run."""
    return {**asked.identity, **_failure(asked.config, why)}


def main(parent: int, folders: Iterable[str]) -> None:
    """The loop of a process for runs: reads names of folders, and in each turns `request.json` into `row.json`.

    The process dies with `parent`. A parent that ended during the start has left its first folder in the pipe.
    """
    from podium.launch.signals import die_with_parent, leave_to_launcher

    die_with_parent(parent)
    from podium.launch.run import launch  # the import takes seconds

    leave_to_launcher()
    for folder in (Path(line.strip()) for line in folders):
        asked = RunRequest.of(json.loads((folder / "request.json").read_text(encoding="utf-8")))
        row = run_one(asked, launch=launch, task=None, on_event=lambda event: None, stop=Event())
        write_atomically(folder / "row.json", to_json(row))
