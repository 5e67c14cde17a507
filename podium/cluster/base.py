"""What a launcher is: it starts the ranks of a job, and returns what they came to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from podium.measure.records import Record
from podium.training import Job, Report

Event = dict[str, Any]
"""What is told while a run goes on; `event` says which kind."""


class Launched(NamedTuple):
    """What the ranks came to."""

    reports: list[Report]
    records: list[Record]  # only where they were not written to files
    facts: dict[str, Any]  # for the manifest: what the launcher found or set up


Launcher = Callable[[Job, Callable[[Event], None] | None, threading.Event | None], Launched]
"""(job, on_event, stop) to what the ranks came to; raises a PodiumError when a rank failed."""
