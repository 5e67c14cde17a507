"""The work that every contender does, and the proof that it was done.

A round trip: a worker hands over a gradient as large as the model, the server moves the parameters by plain SGD, and
the parameters come to lie in the worker's own buffers. Parameters start from a pattern that tells every element from
its neighbours, and a worker's gradient is its number everywhere, so what must come out is known. Pattern, rate and
gradients are multiples of 1/256 and few enough that float32 holds every sum exactly.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from podium.errors import RankFailed

LR = 1 / 256
PERIOD = 251
"""Element i starts at (i modulo this) / 256; a prime, so that no cut of the parameters falls together with it."""
WORKERS = 2
DEADLINE_S = 120.0
"""How long any contender may take to answer."""

_TOLERANCE = 1e-3


class Pulled(NamedTuple):
    """What a worker holds after its last round trip, in units: (start - value) / LR, the sum of what was applied."""

    own: float  # what this worker itself had pushed by then, which must be in it
    low: float
    high: float


class Tally(NamedTuple):
    """What was pushed in all, and what the server's parameters (lowest and highest element) and the workers' show."""

    pushed: float
    server: tuple[float, float]
    pulled: tuple[Pulled, ...]


class Contender(ABC):
    """One system, in one or more variants, with processes of its own that sleep unless it is asked."""

    variants: tuple[str, ...]
    unavailable: Mapping[str, str] = {}
    """Variants that cannot run here, and why."""

    @abstractmethod
    def measure(self, variant: str, seconds: float) -> float:
        """Round trips per second, all workers together, over about this long."""

    @abstractmethod
    def tally(self, variant: str) -> Tally:
        """What all rounds so far have done. No round may follow."""

    @abstractmethod
    def end(self) -> None:
        """Leave no process behind."""


def verify(name: str, tally: Tally) -> None:
    """Raise unless every push was applied once to every element, and every worker has what it was to get."""
    low, high = tally.server
    if max(abs(low - tally.pushed), abs(high - tally.pushed)) > _TOLERANCE:
        raise RankFailed(
            f"bench ps: {name} did other work: the server's parameters must show {tally.pushed:g} units pushed, "
            f"got {low:g} to {high:g}"
        )
    for worker, (own, low, high) in enumerate(tally.pulled):
        if low < own - _TOLERANCE or high > tally.pushed + _TOLERANCE:
            raise RankFailed(
                f"bench ps: {name} did other work: worker {worker}'s parameters must show from {own:g} units, its own, "
                f"to {tally.pushed:g}, got {low:g} to {high:g}"
            )


def pattern(size: int) -> Tensor:
    """The parameters' start."""
    return torch.arange(size).remainder_(PERIOD).to(torch.float32).mul_(LR)


def units(value: Tensor, first: int = 0) -> tuple[float, float]:
    """What was applied to a flat tensor that began as the pattern from element `first` on: least and most."""
    start = pattern(first + value.numel())[first:]
    applied = (start - value) / LR
    return float(applied.min()), float(applied.max())


def run_for(seconds: float, round_trip: Callable[[], object]) -> tuple[int, float]:
    """Round trips until the time is over, and the time they took: the last one is not cut short."""
    began, count = time.perf_counter(), 0
    while True:
        round_trip()
        count += 1
        took = time.perf_counter() - began
        if took >= seconds:
            return count, took
