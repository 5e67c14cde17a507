"""Interleaved rounds: every contender runs in each round, in an order that turns, so drift falls on all alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

_RESAMPLES = 2000


def interleave(contenders: Mapping[str, Callable[[], float]], rounds: int, warmup: int = 1) -> dict[str, list[float]]:
    """Times of each contender, one per round; the first `warmup` rounds are thrown away."""
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    for n in range(warmup + rounds):
        turn = n % len(names)
        for name in names[turn:] + names[:turn]:
            seconds = contenders[name]()
            if n >= warmup:
                times[name].append(seconds)
    return times


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Median of the rounds' ratios, with a bootstrap 95 % interval; below 1 means that ours is faster."""
    each = np.asarray(ours) / np.asarray(theirs)
    draw = np.random.Generator(np.random.Philox(key=1))
    medians = np.median(draw.choice(each, size=(_RESAMPLES, len(each))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return {"ratio": float(np.median(each)), "ratio_interval": [float(low), float(high)], "rounds": len(each)}


def spread_ms(times: Sequence[float]) -> dict[str, float]:
    """Median, fastest and slowest round, in milliseconds."""
    low, median, high = np.min(times), np.median(times), np.max(times)
    return {"median": float(median) * 1e3, "min": float(low) * 1e3, "max": float(high) * 1e3}
