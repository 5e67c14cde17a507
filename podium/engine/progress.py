"""One worker's progress: its steps, its position in the global order of samples, its segment and its round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from podium.engine.batch import Batch


@dataclass
class Round:
    """What this worker has trained since the last exchange, where workers step by themselves.

    A round is to such strategies what a step is to synchronous ones: the unit of retry. When a worker is lost in a
    round, the survivors roll back to where the round began, and divide its samples among themselves.
    """

    steps: int = 0
    samples: int = 0
    loss: float = 0.0
    """Summed over the samples."""
    busy_ns: int = 0
    """Time spent computing, on the world's clock."""

    def add(self, batch: Batch, loss: float, busy_ns: int) -> None:
        self.steps += 1
        self.samples += batch.samples
        self.loss += loss * batch.samples
        self.busy_ns += busy_ns


class Progress:
    """Written by the worker and by the loop that trains it; strategies read it."""

    def __init__(self) -> None:
        self.steps_done = 0
        """Optimizer steps of this worker; each asynchronous worker counts its own."""
        self.position = 0
        """Samples of the global order that the parameters have seen."""
        self.samples = 0
        """Samples in the training data."""
        self.batch_size = 0
        """Samples per global step."""
        self.horizon = 0
        """The position at which the present segment ends."""
        self.segment = (-1, 0)
        """Identifies the present segment to servers: the generation of workers, and the segment's number in it."""
        self.round = Round()
        self.round_steps: Sequence[int] = ()
        """Steps of each worker in the present round, by index, where the workers do different numbers of steps."""

    @property
    def epoch(self) -> float:
        return self.position / max(1, self.samples)

    @property
    def global_step(self) -> int:
        """Whole global steps in the samples used so far: the same on all workers."""
        if not self.samples or not self.batch_size:
            return self.steps_done
        epochs, offset = divmod(self.position, self.samples)
        return epochs * -(-self.samples // self.batch_size) + offset // self.batch_size

    def train_on(self, samples: int, batch_size: int) -> None:
        """`samples`: in the training data; `batch_size`: per global step."""
        self.samples, self.batch_size = samples, batch_size

    def run_until(self, horizon: int) -> None:
        """A segment begins that ends at this position."""
        self.horizon = horizon

    def name_segment(self, generation: int) -> None:
        """A segment with servers begins. All members begin a generation and each of its segments together."""
        before, number = self.segment
        self.segment = (generation, number + 1 if before == generation else 0)

    def step_done(self, end: int) -> None:
        """This worker has done a step of the global step that ends at `end`."""
        self.steps_done += 1
        self.position = max(self.position, end)

    def move_to(self, position: int) -> None:
        self.position = position

    def count_from(self, steps_done: int) -> None:
        self.steps_done = steps_done

    def plan_round(self, steps: Sequence[int]) -> None:
        """The round that begins now has this many steps of each worker, by index."""
        self.round_steps = steps

    def close_round(self) -> Round:
        """Begin the next round; returns the one that ended."""
        done, self.round = self.round, Round()
        return done
