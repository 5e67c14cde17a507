"""All runs of a study, block by block: which are missing, in which order, with how many retries."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from podium.errors import ConfigError, UnknownName
from podium.lab.stats.statistics import mean_interval
from podium.lab.study.responses import response_of
from podium.lab.study.results import finished
from podium.lab.study.run_one import Launch, OnEvent, RunRequest, run_one, run_other
from podium.lab.study.run_parallel import run_parallel
from podium.lab.study.store import Key, Row, Store, finished_keys
from podium.lab.study.study import Study
from podium.launch.rendezvous import rendezvous_folder
from podium.records.recorder import read_records

if TYPE_CHECKING:
    from podium.task import Task


@dataclass(frozen=True)
class Part:
    """Which runs this call makes: those of `cells` that start before `until`."""

    cells: frozenset[str]
    until: float

    @classmethod
    def of(cls, study: Study, only: Mapping[str, Sequence[Any]], budget_s: float | None) -> Part:
        if budget_s is not None and not budget_s >= 0:  # nor nan
            raise ConfigError(f"compare: budget_s must be at least 0, got {budget_s:g}")
        for name, wanted in only.items():
            if name not in study.factors:
                raise UnknownName("factor", name, study.factors)
            for level in wanted:
                if str(level) not in map(str, study.levels[name]):
                    raise UnknownName(f"level of {name}", str(level), map(str, study.levels[name]))
        texts = {name: {str(level) for level in wanted} for name, wanted in only.items()}
        kept = (c.cell for c in study.cells if all(str(c.levels[name]) in some for name, some in texts.items()))
        return cls(frozenset(kept), math.inf if budget_s is None else time.monotonic() + budget_s)

    def is_over(self) -> bool:
        return time.monotonic() > self.until


@dataclass(frozen=True)
class Runs:
    """The runs of one study."""

    study: Study
    store: Store
    launch: Launch
    task: Task | None
    on_event: OnEvent
    stop: Event
    jobs: int
    part: Part
    done: set[Key] = field(default_factory=set)
    """Runs that need no retry: finished, or failed with no retry left."""

    def go(self) -> Literal["finished", "stopped"]:
        """Make the missing runs, block by block; each row is on disk before the next run starts."""
        if "setup_s" in self.study.responses and self.study.runs == "trainings":
            self._warm_up()
        self.done.update(finished_keys(self.store.runs()))
        for number, block in enumerate(self.study.blocks()):
            if number >= self.study.repeated.least and self._is_precise():
                break
            waiting = [key for key in block if key not in self.done and key[0] in self.part.cells]
            several = self.jobs > 1 and len(waiting) > 1
            status = self._at_once(waiting) if several else self._one_by_one(waiting)
            if status == "stopped":
                return "stopped"
        return "finished"

    def _warm_up(self) -> None:
        """One step without a row: otherwise the first run's `setup_s` would include one-time loading."""
        with rendezvous_folder() as folder:
            asked = self._request(self.study.order()[0], f"{folder}/run")
            asked = replace(asked, config=replace(asked.config, steps=1, eval_every=0), pictured=False)
            # Ignores errors: the run itself will report them.
            run_one(asked, launch=self.launch, task=self.task, on_event=_ignore, stop=self.stop)

    def _one_by_one(self, keys: Sequence[Key]) -> Literal["finished", "stopped"]:
        for key in keys:
            for left in reversed(range(self.study.retries + 1)):
                if self.stop.is_set() or self.part.is_over():
                    return "stopped"
                self._tell(key, event="cell")
                row = self._run(key)
                self._append(key, row, left)
                if row["status"] == "stopped":
                    return "stopped"
                if row["status"] == "finished":
                    break
        return "finished"

    def _run(self, key: Key) -> Row:
        if self.study.runs != "trainings":
            return run_other(self.study, key, self.store.fresh_run_dir(*key), self.stop)
        forward = self._forward(key)
        return run_one(self._request(key), launch=self.launch, task=self.task, on_event=forward, stop=self.stop)

    def _at_once(self, keys: Sequence[Key]) -> Literal["finished", "stopped"]:
        left = dict.fromkeys(keys, self.study.retries + 1)
        while waiting := [key for key, tries in left.items() if tries]:
            in_time = lambda: not self.part.is_over()  # noqa: E731
            for key, row in run_parallel(waiting, self._request, self.jobs, self.stop, in_time):
                left[key] = 0 if row["status"] == "finished" else left[key] - 1
                self._append(key, row, left[key])
            if self.stop.is_set() or (any(left.values()) and self.part.is_over()):
                return "stopped"
        return "finished"

    def _request(self, key: Key, run_dir: str | None = None) -> RunRequest:
        """The request of one run; its records go to `run_dir`, by default a new folder of the study."""
        cell = self.study.at(key[0])
        config = self.study.config(*key)
        return RunRequest(
            cell=cell.cell,
            levels=cell.levels,
            seed=key[1],
            nodes=self.study.nodes(config),
            config=replace(config, run_dir=run_dir or str(self.store.fresh_run_dir(*key))),
            stop=self.study.stop,
            target=self.study.target,
            maximize=self.study.maximize,
            pictured=key[1] == self.study.seeds[0],
        )

    def _append(self, key: Key, row: Row, left: int) -> None:
        """Append a row; `left` is how many retries remain."""
        if self.study.measure is not None and row["status"] == "finished":
            row = {**row, **self.study.measure(row, list(read_records(Path(row["run_dir"]))))}
        self.store.append(row)
        if row["status"] == "finished" or (row["status"] == "failed" and not left):
            self.done.add(key)
        retried = ", tried again" if row["status"] == "failed" and left else ""
        self._tell(key, event="cell-end", status=row["status"] + retried)

    def _is_precise(self) -> bool:
        """Whether every cell's mean has the study's precision; False if the study sets none."""
        asked = self.study.repeated
        if asked.half_width is None:
            return False
        rows = finished(self.store.runs())
        for name in self.study.names:
            runs = [row for row in rows if row["cell"] == name]
            target, maximize = self.study.target, self.study.maximize
            values = [response_of(row, asked.response, target, maximize=maximize) for row in runs]
            mean = mean_interval([value for value in values if value is not None])
            if mean is None or mean.low is None or mean.high is None:
                if runs:
                    return False
                continue  # the cell has failed with every seed, so more seeds would not help
            if (mean.high - mean.low) / 2 > asked.half_width * abs(mean.mean):
                return False
        return True

    def _forward(self, key: Key) -> OnEvent:
        return lambda event: self._tell(key, **event)

    def _tell(self, key: Key, **event: Any) -> None:
        if event.get("event") in ("cell", "cell-end"):
            event |= {"number": len(self.done - {key}) + 1, "total": len(self.study.order())}
        self.on_event({**event, "cell": key[0], "seed": key[1]})


def _ignore(event: dict[str, Any]) -> None:
    """Does nothing with an event."""
