"""A mean with its t-interval, and the t-test of paired differences: the same for comparisons and for sweeps."""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from podium.errors import MissingExtra

ROUNDING = 1e-12
"""Values with a smaller relative difference are equal."""


@dataclass(frozen=True)
class Mean:
    """A mean over seeds and its 95 % t-interval, which is None for one value."""

    n: int
    mean: float
    low: float | None = None
    high: float | None = None


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Mean | None:
    """The mean and its t-interval; None if there are no values."""
    if not values:
        return None
    n, mean = len(values), math.fsum(values) / len(values)
    if n == 1:
        return Mean(1, mean)
    if not varies(values, mean):
        return Mean(n, mean, mean, mean)
    t = load("scipy.stats").t
    low, high = t.interval(confidence, n - 1, loc=mean, scale=deviation(values, mean) / math.sqrt(n))
    return Mean(n, mean, float(low), float(high))


def paired_p(gaps: Sequence[float], overlap: float = 0.0) -> float:
    """Two-sided p of a t-test that the mean of paired differences is 0. The differences must vary.

    `overlap` is validation / training samples where pairs are folds, which share training data: a plain test treats
    them as independent and finds differences that are not there (Nadeau and Bengio, 2003).
    """
    n, mean = len(gaps), math.fsum(gaps) / len(gaps)
    error = deviation(gaps, mean) * math.sqrt(1 / n + overlap)
    return float(2 * load("scipy.stats").t.sf(abs(mean) / error, n - 1))


def deviation(values: Sequence[float], mean: float) -> float:
    """The standard deviation of a sample."""
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def varies(values: Sequence[float], mean: float) -> bool:
    """Whether values differ by more than rounding; if not, t is undefined."""
    return max(abs(value - mean) for value in values) > ROUNDING * max(abs(value) for value in values)


def load(module: str, purpose: str = "statistics") -> Any:
    """A module of the extra `study`."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(module.partition(".")[0], "study", purpose) from None
