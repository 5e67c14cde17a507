"""The interface of launchers: a launcher starts the ranks of a job, and returns their results."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from podium.config import RunConfig
from podium.engine.build import Job
from podium.engine.report import Report
from podium.launch.event import Event
from podium.records.recorder import Record
from podium.strategies.base import Strategy


class RunPlan(Protocol):
    """What launchers of processes need of a run; `Job` and `ScriptPlan` have it."""

    @property
    def config(self) -> RunConfig: ...
    @property
    def strategy(self) -> Strategy[Any]: ...
    @property
    def run_dir(self) -> Path | None: ...


class ScriptPlan(NamedTuple):
    """A run whose task is the user's own script."""

    config: RunConfig
    strategy: Strategy[Any]
    run_dir: Path | None


class LaunchResult(NamedTuple):
    """The ranks' results."""

    reports: list[Report]
    records: list[Record]  # only where they were not written to files
    facts: dict[str, Any]  # for the manifest: what the launcher measured or set up


def hosts_of(strategy: Strategy[Any], workers: int) -> range:
    """The workers whose processes hold colocated servers: all, or those that only serve in some phase."""
    only_serve = strategy.server_spec.only_serve
    return range(workers - only_serve, workers) if 0 < only_serve < workers else range(workers)


Launcher = Callable[[Job, Callable[[Event], None] | None, threading.Event | None], LaunchResult]
"""(job, on_event, stop) to the ranks' results; raises a PodiumError when a rank failed."""
