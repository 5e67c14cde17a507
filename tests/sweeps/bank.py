"""A stand-in for training: learning curves that are known beforehand, through a real queue."""

from __future__ import annotations

from collections.abc import Callable

import torch

from podium.sweeps.executors.base import Queue
from podium.sweeps.trial import Evaluation, Outcome, Trial

Curve = Callable[[Trial, int], float]
STEPS_PER_EPOCH = 10


def evaluation(epoch: int, score: float, name: str = "accuracy") -> Evaluation:
    return Evaluation(STEPS_PER_EPOCH * epoch, float(epoch), 1.0 - score, {name: score})


def state_of(trial: Trial) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((2,), float(trial.number))}


class Bank:
    """Follows a queue as an executor would: so many trials side by side, one report per trial and epoch."""

    def __init__(self, curve: Curve, *, epochs: int, slots: int) -> None:
        self.curve, self.epochs, self.slots = curve, epochs, slots
        self.ran: dict[int, int] = {}
        """Epochs that each trial was trained."""
        self.became: list[tuple[int, int, int]] = []
        """(trial, source, epoch)."""

    def run(self, queue: Queue, *, at_most: int | None = None) -> None:
        """Train until the queue has no more; `at_most` rounds, as when the process is killed."""
        rows: list[Trial] = []
        rounds = 0
        while at_most is None or rounds < at_most:
            while len(rows) < self.slots and (trial := queue.take()) is not None:
                rows.append(trial)
                self.ran[trial.number] = 0
            if not rows:
                return
            rounds += 1
            rows = [trial for trial in rows if self._epoch(queue, trial)]

    def _epoch(self, queue: Queue, trial: Trial) -> bool:
        """One epoch of one trial; whether it goes on."""
        self.ran[trial.number] += 1
        epoch = self.ran[trial.number]
        verdict = queue.report(trial, evaluation(epoch, self.curve(trial, epoch)))
        if epoch == self.epochs:
            queue.hand_in(Outcome(trial=trial, status="finished", steps=STEPS_PER_EPOCH * epoch), state_of(trial))
            return False
        if verdict.action == "stop":
            stopped = Outcome(trial=trial, status="stopped", why=verdict.why, steps=STEPS_PER_EPOCH * epoch)
            queue.hand_in(stopped, state_of(trial))
            return False
        if verdict.action == "become":
            assert verdict.source is not None
            self.became.append((trial.number, verdict.source, epoch))
        return True
