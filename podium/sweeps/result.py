"""The result of a sweep: points, the best one, time and energy, and the answer in words.

All of it is computed from the sweep's folder, so a sweep can be read at any time, also while it runs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from podium.engine.files import load_tensors
from podium.errors import ConfigError, RecordError
from podium.records.journal import read_journal
from podium.records.manifest import read_manifest
from podium.sweeps.answer import answer_of
from podium.sweeps.queue import read_outcomes
from podium.sweeps.ranking import Point, Rival, best_score, find_points, find_rivals
from podium.sweeps.trial import Outcome, Trial

Row = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The result of a sweep. `podium sweep --json` prints it."""

    folder: str
    status: Literal["finished", "stopped"]
    """`stopped`: the sweep ended before all its trials were over; the same call with the same folder resumes it."""
    task: str
    metric: str
    maximize: bool
    answer: str
    """The answer, then on a second line what may not be concluded."""
    points: tuple[Point, ...]
    """The best first."""
    rivals: tuple[Rival, ...]
    """The best point against every other that has trials to compare, in the order of `points`."""
    outcomes: tuple[Outcome, ...]
    """Every trial that is over, in the order they ended."""
    seconds: float
    """From the first trial's preparation to the last one's end: probing, choosing and compiling included."""
    trials_per_s: float | None
    samples_per_s: float | None
    """Training samples of all trials together; None where no whole session was measured."""
    reading: Mapping[str, Any] | None
    """Measurements (`podium.records.window.Reading`) of the last session that trained anything."""
    choices: tuple[Row, ...] = ()
    """What `auto` chose for each group of trials, and why."""
    probes: tuple[Row, ...] = ()
    """Whether trials could be fused, and why not."""
    turns: tuple[Row, ...] = ()
    """Events of arrays: `narrowed` (from `before` to `rows`), `not narrowed`, `fell back` (`why`)."""
    sessions: tuple[Row, ...] = ()
    """One for each time the sweep ended or was asked to stop: `trained`, `samples`, `seconds`, `executor` …"""
    copies: bool = False
    """Whether trials were copied onto each other (population based training); `points` have their initial options."""
    report: str = ""
    table: str = ""
    """Path of the points as CSV."""

    @property
    def best(self) -> Point | None:
        """The point with the best mean; None where no point has a mean."""
        return self.points[0] if self.points and self.points[0].mean is not None else None

    @property
    def best_trial(self) -> Outcome | None:
        """The best point's best trial."""
        if self.best is None:
            return None
        wanted = best_score(self.best, maximize=self.maximize).value
        equal = {score.trial for score in self.best.scores if score.value == wanted}
        found = [outcome for outcome in self.outcomes if outcome.trial.number in equal]
        return next((outcome for outcome in found if outcome.model), found[0])  # of equal ones, the one that was saved

    def best_state(self) -> dict[str, Tensor]:
        """The parameters and buffers of the best point's best trial: an ordinary `state_dict`, on the CPU."""
        found = self.best_trial
        if found is None:
            raise RecordError(f"{self.folder}: no trial has finished, so there is no best model")
        if not found.model:
            raise RecordError(
                f"{self.folder}: the model of trial {found.trial.number} must be there, but models were not kept "
                "(keep='none'), or another point was the best until trials that had failed were trained again"
            )
        return load_tensors(Path(self.folder) / found.model)

    @property
    def failed(self) -> int:
        return sum(outcome.status == "failed" for outcome in self.outcomes)

    @property
    def widths(self) -> list[list[int]]:
        """The numbers of rows of each array that was made narrower, in order of time."""
        found: list[list[int]] = []
        for turn in self.turns:
            if turn["event"] == "narrowed":
                if not found or found[-1][-1] != turn["before"]:
                    found.append([turn["before"]])
                found[-1].append(turn["rows"])
        return found

    def to_dict(self) -> dict[str, Any]:
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        best, trial = self.best, self.best_trial
        return {
            **plain,
            "points": [point.to_dict() for point in self.points],
            "rivals": [dataclasses.asdict(rival) for rival in self.rivals],
            "best": None if best is None else best.to_dict(),
            "best_trial": None if trial is None else trial.to_dict(),
            "outcomes": [outcome.to_dict() for outcome in self.outcomes],
        }


def read_sweep(folder: str | Path) -> Sweep:
    """The sweep in this folder, as far as it has come."""
    folder = Path(folder)
    config = read_manifest(folder)["config"]
    if "maximize" not in config:
        raise ConfigError(f"{folder}: must hold a sweep, got the folder of something else")
    asked = [Trial(**row) for row in read_journal(folder / "trials.jsonl")]
    outcomes = read_outcomes(folder)
    sessions, events = read_journal(folder / "sessions.jsonl"), read_journal(folder / "events.jsonl")
    points = find_points(asked, outcomes, config["metric"], maximize=config["maximize"])
    rivals = find_rivals(points, config)
    seconds = sum(session["seconds"] for session in sessions)
    trained, samples = (sum(session[name] for session in sessions) for name in ("trained", "samples"))
    measured = [session["reading"] for session in sessions if session["trained"]]
    return Sweep(
        folder=str(folder),
        status=sessions[-1]["status"] if sessions else "stopped",
        task=config["task"],
        metric=config["metric"],
        maximize=config["maximize"],
        answer=answer_of(points, rivals, outcomes, config),
        points=tuple(points),
        rivals=tuple(rivals),
        outcomes=tuple(outcomes),
        seconds=seconds,
        trials_per_s=trained / seconds if trained and seconds else None,
        samples_per_s=samples / seconds if samples and seconds else None,
        reading=measured[-1] if measured else None,
        choices=tuple(event for event in events if event["event"] == "chose"),
        probes=tuple(event for event in events if event["event"] == "probe"),
        turns=tuple(event for event in events if event["event"] in ("narrowed", "not narrowed", "fell back")),
        sessions=tuple(sessions),
        copies=config.get("copies", False),
    )
