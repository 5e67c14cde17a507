"""A trial: one model of a sweep, its options, and its outcome.

A trial is plain data, so that it can be written into a record, sent to another process and rebuilt there. Alone or in a
row of a fused array, the model is the same: its seed alone fixes the initial parameters, the order of the samples and
the dropout masks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from podium.errors import ConfigError

Status = Literal["finished", "stopped", "diverged", "failed"]
"""`stopped`: by a stopping rule, early. `diverged`: its loss was inf or nan. `failed`: it raised."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """The options, seed and fold of one model of a sweep."""

    number: int
    """Counted from 0 in the order in which the source gave the trials."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The task's own, the optimizer's (`lr`, `betas`), `dropout`, `label_smoothing`, `batch_size`, `epochs`,
    `clip_norm`, `init_seed`, `order_seed`."""
    seed: int = 0
    fold: int | None = None
    """Which of the sweep's folds is held out; None validates on the task's test data."""
    point: int = 0
    """Which point of the search this is: the same for all its folds and seeds."""

    def __post_init__(self) -> None:
        if self.number < 0 or self.point < 0 or (self.fold is not None and self.fold < 0):
            raise ConfigError(f"trial: number, point and fold must be 0 or more, got {self}")
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"trial {self.number}: seed must be between 0 and 2**63 - 1, got {self.seed}")

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


class Evaluation(NamedTuple):
    """A trial's loss and metrics on its validation data after some step."""

    step: int
    epoch: float
    loss: float
    metrics: Mapping[str, float]

    def value_of(self, name: str) -> float:
        """The metric of this name, or the loss."""
        return self.loss if name == "loss" else self.metrics[name]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a trial."""

    trial: Trial
    status: Status
    why: str = ""
    """The reason, of a trial that did not finish."""
    steps: int = 0
    samples: int = 0
    evaluation: Evaluation | None = None
    """The last one."""
    history: Sequence[Evaluation] = ()
    executor: str = ""
    seconds: float = 0.0
    """From its first step to its last, including time spent on other trials beside it."""
    model: str = ""
    """Path of its parameters and buffers (safetensors), relative to the sweep's folder; empty when not saved."""

    def to_dict(self) -> dict[str, Any]:
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        values["trial"] = self.trial.to_dict()
        values["evaluation"] = None if self.evaluation is None else self.evaluation._asdict()
        values["history"] = [evaluation._asdict() for evaluation in self.history]
        return values


Action = Literal["go", "stop", "become"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The stopping rule's decision on a trial after a report."""

    action: Action = "go"
    why: str = ""
    source: int | None = None
    """With `become`: the number of the trial whose state this one takes over."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """With `become`: new values of this trial's options."""


GO = Verdict()


def failed(trial: Trial, error: Exception, executor: str) -> Outcome:
    """The outcome of a trial that could not begin, or raised."""
    return Outcome(trial=trial, status="failed", why=f"{type(error).__name__}: {error}", executor=executor)
