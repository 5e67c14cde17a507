"""What a launcher is: it starts the ranks of a job, and returns what they came to."""

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
    """What launchers of processes need to know of a run; a Job is one, and so is a script's Plan."""

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
    """What the ranks came to."""

    reports: list[Report]
    records: list[Record]  # only where they were not written to files
    facts: dict[str, Any]  # for the manifest: what the launcher found or set up


def hosts_of(strategy: Strategy[Any], workers: int) -> range:
    """The workers that colocated servers live with: all, or those that only serve in some phase."""
    only_serve = strategy.server_spec.only_serve
    return range(workers - only_serve, workers) if 0 < only_serve < workers else range(workers)


Launcher = Callable[[Job, Callable[[Event], None] | None, threading.Event | None], LaunchResult]
"""(job, on_event, stop) to what the ranks came to; raises a PodiumError when a rank failed."""
