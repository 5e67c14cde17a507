"""The progress of a sweep: its events as lines and bars."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, final

from podium.cli.display import Display, display
from podium.cli.progress import format_seconds

Event = Mapping[str, Any]


@final
class SweepProgress:
    """Shows a sweep's events: how many trials have ended, and a line for each choice or failure."""

    def __init__(self, shown: Display) -> None:
        self.display, self._began = shown, time.monotonic()
        self._first, self._done, self._evaluations = 0, 0, 0
        self._total: int | None = None

    def __enter__(self) -> SweepProgress:
        self.display.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self.display.__exit__(*error)

    def __call__(self, event: Event) -> None:
        kind, line = event.get("event"), line_of(event)
        if line is not None:
            self.display.say(line)
        if kind in ("sweep", "outcome"):
            self._done, self._total = event["done"], event["total"]
            self._first = self._done if kind == "sweep" else self._first
        self._evaluations += kind == "report"
        if kind in ("sweep", "outcome", "report"):
            self.display.draw("trials", self._done, self._total, f"{self._evaluations:,} evaluations")
        if line is None and kind in ("outcome", "report"):
            is_last = kind == "outcome" and self._done == self._total
            if self.display.is_due() or (is_last and not self.display.has_bars):
                self.display.say(self._paced())

    def _paced(self) -> str:
        done, total, trained = self._done, self._total, self._done - self._first
        took_s = time.monotonic() - self._began
        # Trials that train side by side end together: the first few say nothing about the rest.
        left = (total - done) * took_s / trained if total and trained and 10 * trained >= total else 0
        ends = f", about {format_seconds(left)} left" if left else ""
        return f"{_count(done, total)}, {self._evaluations:,} evaluations{ends}"


def sweep_progress(*, quiet: bool) -> SweepProgress:
    return SweepProgress(display(quiet=quiet))


def line_of(event: Mapping[str, Any]) -> str | None:
    """The line for an event that always gets one; None for other events."""
    kind = event.get("event")
    if kind == "sweep":
        again = f", {event['done']} of them done before" if event["done"] else ""
        return f"sweep {event['folder']}: {event['total'] or 'some'} trials{again}"
    if kind == "chose":
        return f"chose {chosen(event)}"
    if kind == "probe" and not event["fuses"]:
        return f"cannot be fused: {event['why']}"
    if kind == "fell back":
        return f"trials begin again, one by one: {event['why']}"
    if kind == "process lost":
        return f"process {event['process']} lost: {event['why']}"
    if kind == "outcome" and event["status"] == "failed":
        return f"trial {event['trial']['number']} failed: {event['why']}"
    return None


def _count(done: int, total: int | None) -> str:
    return f"{done} trials over" if total is None else f"{done:>{len(str(total))}}/{total} trials over"


def chosen(choice: Mapping[str, Any]) -> str:
    """What was chosen, and why."""
    why = str(choice["why"]).removeprefix(f"{choice['executor']}: ")
    return f"{choice['executor']}: {why}"
