"""The files of a session besides the queue's: events, the row and times of each trial, and a line at its end."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.records.journal import Journal, read_journal
from podium.records.window import Reading


class SessionLog:
    """Appends to `events.jsonl`, `slots.jsonl` and `sessions.jsonl`. Times continue from the last session's end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        slots, events, sessions = (read_journal(folder / f"{name}.jsonl") for name in ("slots", "events", "sessions"))
        # A session that was killed has no line in `sessions.jsonl`, but may have lines in the other files.
        self.number = 1 + max((row["session"] for row in [*slots, *events, *sessions]), default=-1)
        self._offset_s = max((row["ended_s"] for row in slots), default=0.0)
        self._running: dict[int, dict[str, Any]] = {}
        self.restart_clock()

    def restart_clock(self) -> None:
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Since the clock was restarted."""
        return time.perf_counter() - self._began

    def event(self, event: Mapping[str, Any]) -> None:
        self._append("events.jsonl", {"session": self.number, "t_s": round(self._now(), 6), **event})

    def trial_began(self, number: int, row: int | None = None) -> None:
        """A trial was given out, or got its row."""
        self._running[number] = {"began_s": self._now(), "row": row}

    def trial_ended(self, number: int, group: int, status: str) -> None:
        """Write the trial's slot; a trial that could not be built, or that a rule skipped, has none."""
        slot = self._running.pop(number, None)
        if slot is not None:
            place = {"trial": number, "session": self.number, "group": group, "row": slot["row"]}
            times = {"began_s": round(slot["began_s"], 6), "ended_s": round(self._now(), 6)}
            self._append("slots.jsonl", {**place, **times, "status": status})

    def session_ended(self, facts: Mapping[str, Any], reading: Reading | None) -> None:
        measured = {
            "seconds": self.seconds if reading is None else reading.seconds,
            "reading": None if reading is None else dataclasses.asdict(reading),
        }
        self._append("sessions.jsonl", {"session": self.number, **facts, **measured})

    def _now(self) -> float:
        return self._offset_s + self.seconds

    def _append(self, name: str, row: Mapping[str, Any]) -> None:
        with Journal(self._folder / name) as journal:
            journal.write(row)
