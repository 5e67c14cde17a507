"""The work of every contender of `bench ps`, and the proof that it was done.

A round trip: a worker pushes a gradient as large as the model, the server updates the parameters by plain SGD, and the
worker copies the parameters into its own buffers. Parameters start from a pattern in which neighbouring elements
differ, and every element of a worker's gradient is the worker's number, so the result is known. Pattern, rate and
gradients are multiples of 1/256, and small enough that float32 represents every sum exactly.
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
"""Element i starts at (i modulo this) / 256; a prime, so that no cut of the parameters aligns with the pattern."""
WORKERS = 2
DEADLINE_S = 120.0
"""How long any contender may take to answer."""

_TOLERANCE = 1e-3


class Pulled(NamedTuple):
    """A worker's parameters after its last round trip, in units: (start - value) / LR, the sum of applied pushes."""

    own: float  # the sum of this worker's own pushes, which must be included
    low: float
    high: float


class Tally(NamedTuple):
    """The sum of all pushes, and the units in the server's parameters (lowest, highest element) and the workers'."""

    pushed: float
    server: tuple[float, float]
    pulled: tuple[Pulled, ...]


class Contender(ABC):
    """One system in one or more variants; its processes sleep between measurements."""

    variants: tuple[str, ...]
    unavailable: Mapping[str, str] = {}
    """Variants that cannot run here, and why."""

    @abstractmethod
    def measure(self, variant: str, seconds: float) -> float:
        """Round trips per second of all workers together, measured for about `seconds`."""

    @abstractmethod
    def tally(self, variant: str) -> Tally:
        """The result of all rounds so far. No round may follow."""

    @abstractmethod
    def end(self) -> None:
        """Leave no process behind."""


def verify(name: str, tally: Tally) -> None:
    """Raise unless every push was applied once to every element, and every worker's copy includes its own pushes."""
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
    """The initial parameters."""
    return torch.arange(size).remainder_(PERIOD).to(torch.float32).mul_(LR)


def units(value: Tensor, first: int = 0) -> tuple[float, float]:
    """The least and most units applied to a flat tensor that began as the pattern from element `first` on."""
    start = pattern(first + value.numel())[first:]
    applied = (start - value) / LR
    return float(applied.min()), float(applied.max())


def run_for(seconds: float, round_trip: Callable[[], object]) -> tuple[int, float]:
    """The number of round trips until the time is over, and their exact time: the last one is completed."""
    began, count = time.perf_counter(), 0
    while True:
        round_trip()
        count += 1
        took = time.perf_counter() - began
        if took >= seconds:
            return count, took
