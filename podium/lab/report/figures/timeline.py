"""Timelines: what each worker did in a few steps in the middle of a run, and the events of the whole run.

The data come from `podium.records.timeline`; the row of each cell's first run contains them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.study.results import cells, finished
from podium.lab.study.store import Row
from podium.records.timeline import KINDS


@dataclass(frozen=True)
class Stretch:
    """One activity of a worker, in ms since the window began."""

    kind: str
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class Lane:
    """One worker."""

    name: str
    stretches: tuple[Stretch, ...]


@dataclass(frozen=True)
class Event:
    """An event of the run, such as a loss or a switch, in seconds since its first worker began."""

    kind: str
    seconds: float
    text: str


@dataclass(frozen=True)
class Timeline:
    """A few steps of one run by worker, and the events of the whole run."""

    cell: str
    seed: int
    lanes: tuple[Lane, ...]
    kinds: tuple[str, ...]
    """The kinds that occur, in the order of `KINDS`."""
    window: tuple[float, float]
    """Begin and end of the drawn steps, in seconds since the run began."""
    steps: tuple[int, int]
    length_s: float
    events: tuple[Event, ...]
    shown: str
    virtual: bool

    @property
    def name(self) -> str:
        return f"timeline, {self.cell}, seed {self.seed}"

    @property
    def caption(self) -> str:
        """What the figure shows and what it does not know."""
        clock = "simulated" if self.virtual else "wall"
        return (
            f"Steps {self.steps[0]} to {self.steps[1]} of the fastest worker, from the middle of the run, "
            f"{self.shown}; {clock} clock. The durations of a step's parts were measured; the position of the waiting "
            "inside a step was not, so it is drawn last. Gaps lie between two steps. Servers record no spans of time."
        )


def timelines(rows: Sequence[Row]) -> dict[str, Timeline]:
    """By cell: the timeline of its first run that has one."""
    found: dict[str, Timeline] = {}
    done = finished(rows)
    for cell in cells(done):
        row = next((row for row in done if row["cell"] == cell and row.get("timeline")), None)
        if row is not None:
            found[cell] = _timeline(cell, row, row["timeline"])
    return found


def _timeline(cell: str, row: Row, facts: Mapping[str, Any]) -> Timeline:
    lanes = tuple(
        Lane(f"worker {lane['rank']}", tuple(Stretch(str(k), float(a), float(b)) for k, a, b in lane["spans"]))
        for lane in facts["ranks"]
    )
    seen = {stretch.kind for lane in lanes for stretch in lane.stretches}
    window, steps = facts["window"], facts["window"]["steps"]
    return Timeline(
        cell,
        int(row["seed"]),
        lanes,
        tuple(kind for kind in KINDS if kind in seen),
        (float(window["begin_s"]), float(window["end_s"])),
        (int(steps[0]), int(steps[1])),
        float(facts["length_s"]),
        tuple(Event(str(mark["kind"]), float(mark["seconds"]), str(mark["text"])) for mark in facts["marks"]),
        str(facts["shown"]),
        row.get("launcher") == "virtual",
    )
