"""How long a worker takes for a pass over some samples: t(b) = fixed + per_sample * b, learnt while it trains.

Two things are learnt separately. The *level* is the time of a pass at the present number of samples; it is known after
a few passes. The *shape* is the fixed part of that time; it shows only when the number of samples changes, so it begins
as "nothing is fixed", and every change of a worker's part is an experiment about it.

Passes are noisy. A single stall, however long, is ignored; three slow passes in a row are not: a cumulative sum of the
passes' times beyond the expected ones (CUSUM) finds changes of level within a few passes, and the level is learnt again
from there. The speed is a mean, not a median: a worker whose CPU quota lets three passes run and halts the fourth is as
fast as their mean.

Page, 1954, Continuous inspection schemes (CUSUM), https://doi.org/10.1093/biomet/41.1-2.100.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

WARM_UP = 2
"""First passes that are not counted: they allocate, compile and fill caches."""
WINDOW = 200
"""Most passes from which the level is estimated."""
KEPT_NOISE = 64
"""Most passes from which the noise is estimated."""
FLOOR = 0.02
"""Lower bound of the estimated noise."""
UNKNOWN_NOISE = 0.2
"""The noise assumed until there are enough passes to estimate it."""
ENOUGH = 8
"""Passes, compared with those before, that are needed to estimate the noise."""
CLIP, SLACK, BAR, SUSPICION = 3.0, 0.75, 6.0, 2.5
"""CUSUM, in units of the noise: the largest deviation that one pass counts for, the slack subtracted from each, the sum
at which a change is found, and the sum above which the level is not updated. One pass adds at most CLIP - SLACK, so a
change takes three passes."""
FAR = math.log(8)
"""Deviations are clipped to this when the beginning of a change is searched."""
SHAPE_DOUBT = 0.3
"""Prior standard deviation of the fixed part of a pass around 0."""
MOST_FIXED = 0.95
"""Upper bound of the fixed part of a pass."""
LATE = 4
"""A change of level within this many passes after a change of samples is attributed to it."""
TRIES = 8
"""Experiments from before the last change of level that are stored."""


class Speed(NamedTuple):
    """Time of a forward and backward pass on one worker."""

    fixed_s: float
    per_sample_s: float
    noise: float = 0.0
    """Coefficient of variation of a pass."""
    error: float = 0.0
    """Relative standard error of `seconds(samples)`."""
    passes: int = 0
    """Number of passes this is learnt from; 0: unknown."""
    samples: int = 0
    """Samples in these passes; 0: unknown."""

    def seconds(self, samples: float) -> float:
        """Time of a pass over this many samples."""
        return self.fixed_s + self.per_sample_s * samples


class SpeedModel:
    """One worker's speed, from its own passes."""

    def __init__(self) -> None:
        self._cold = WARM_UP
        self._sizes: set[int] = set()  # numbers of samples seen
        self._passes: deque[_Pass] = deque(maxlen=WINDOW)  # since the last change of level
        self._tries: deque[_Try] = deque(maxlen=TRIES)  # from before it
        self._residuals: deque[float] = deque(maxlen=KEPT_NOISE)  # log(pass / expected)
        self._compared = 0  # passes that went into residuals, ever
        self._up, self._down = _Sum(), _Sum()
        self._found: _Found | None = None
        self._unread = 0  # passes since

    def observe(self, samples: int, seconds: float) -> None:
        """A pass over this many samples took this long. A pass without samples or time is ignored."""
        if samples < 1 or not 0 < seconds < math.inf:
            return
        is_new = samples not in self._sizes
        self._sizes.add(samples)
        if self._cold > 0:
            self._cold -= 1
            return
        if is_new and self._passes and self._cold == 0:
            self._cold = -1  # skip the first pass of a new size, which allocates and compiles; but never two in a row
            return
        self._cold = 0
        self._count(_Pass(samples, seconds))

    @property
    def speed(self) -> Speed:
        """The present estimate; unknown before two passes were counted."""
        if self._found is None or len(self._passes) < 2:
            return Speed(0.0, 0.0)
        at = self._present()
        seconds, error = self._found.mean(at)
        fixed = seconds * self._found.shape.fixed_part(at)
        noise = max(FLOOR, self._found.noise)
        return Speed(fixed, (seconds - fixed) / at, noise, error, len(self._passes), at)

    @property
    def knows_noise(self) -> bool:
        """Whether enough passes were seen to tell slowness from a stall or two."""
        return self._compared >= ENOUGH

    # Inside.

    def _count(self, one: _Pass) -> None:
        if self._found is not None:
            self._compare(one, self._found)
        self._passes.append(one)
        if max(self._up.total, self._down.total) > BAR:
            self._begin_anew()
        self._unread += 1
        if max(self._up.total, self._down.total) <= SUSPICION and (self._is_young() or self._unread >= 8):
            self._found, self._unread = self._find(list(self._passes)), 0

    def _is_young(self) -> bool:
        """Whether every pass matters: there are few yet, or few of the present number of samples."""
        last = list(islice(reversed(self._passes), 8))
        return len(self._passes) <= 16 or any(one.samples != last[0].samples for one in last)

    def _compare(self, one: _Pass, found: _Found) -> None:
        """Compare a pass with the expected time."""
        centre, doubt = found.centre(one.samples)
        residual = math.log(one.seconds) - centre
        z = residual / math.hypot(found.spread, doubt)
        self._up.add(z)
        self._down.add(-z)
        self._residuals.append(residual)
        self._compared += 1

    def _begin_anew(self) -> None:
        """The level has changed: earlier passes count for shape and noise only."""
        since = self._changed_since()
        passes = list(self._passes)
        before = passes[:-since]
        if before:
            spread = self._spread()
            self._tries.extend(_tries(_group(before, spread), spread))
            self._tries.extend(_surprise(before, passes[-since:], spread))
        for _ in range(min(since, len(self._residuals))):
            self._residuals.pop()
        self._passes = deque(passes[-since:], WINDOW)
        self._up, self._down = _Sum(), _Sum()

    def _changed_since(self) -> int:
        """How many of the last passes are at the new level: those that differ most clearly from the old one."""
        longest = max((self._up, self._down), key=lambda side: side.total).passes
        best, since, total = 0.0, 2, 0.0
        for passes, residual in enumerate(islice(reversed(self._residuals), longest), start=1):
            total += max(-FAR, min(FAR, residual))
            if passes > 1 and total**2 / passes > best:  # likelihood ratio
                best, since = total**2 / passes, passes
        return since

    def _find(self, passes: Sequence[_Pass]) -> _Found:
        noise, spread = max(FLOOR, self._noise()), self._spread()
        groups = _group(passes, spread)
        shape = _shape([*self._tries, *_tries(groups, max(noise, spread))])
        return _Found(groups, shape, noise, spread)

    def _spread(self) -> float:
        """Deviation of most passes from the expected time, as a standard deviation of logarithms."""
        if len(self._residuals) < ENOUGH:
            return UNKNOWN_NOISE
        ordered = sorted(self._residuals)
        cut = max(1, len(ordered) // 10)  # a single stall does not count
        return max(FLOOR, (ordered[-1 - cut] - ordered[cut]) / 2.56)

    def _noise(self) -> float:
        """Coefficient of variation of passes."""
        if len(self._residuals) < ENOUGH:
            return UNKNOWN_NOISE
        ratios = _winsorised([math.exp(residual) for residual in self._residuals])
        mean = sum(ratios) / len(ratios)
        return math.sqrt(sum((ratio - mean) ** 2 for ratio in ratios) / (len(ratios) - 1)) / mean

    def _present(self) -> int:
        """The present number of samples per pass; ignores a short last step of an epoch."""
        last = [one.samples for one in islice(reversed(self._passes), 3)]
        return Counter(last).most_common(1)[0][0]


class _Pass(NamedTuple):
    samples: int
    seconds: float


class _Group(NamedTuple):
    """Passes over the same number of samples."""

    samples: int
    passes: int
    mean_s: float
    """Their mean without the farthest."""
    centre: float
    """Robust centre of the logarithms."""


class _Try(NamedTuple):
    """An estimate of the shape from two numbers of samples."""

    overhead: float
    """The fixed part of a pass takes as long as this many samples."""
    weight: float
    """One over the variance of the estimated fixed part."""


class _Shape(NamedTuple):
    overhead: float
    doubt: float
    """Standard error of the fixed part."""

    def fixed_part(self, samples: int) -> float:
        """The fixed part of a pass over this many samples."""
        return min(MOST_FIXED, self.overhead / (self.overhead + samples))


class _Sum:
    """One side of a CUSUM."""

    def __init__(self) -> None:
        self.total = 0.0
        self.passes = 0  # since it was last 0, where a change would have begun

    def add(self, z: float) -> None:
        self.total = max(0.0, self.total + max(-CLIP, min(CLIP, z)) - SLACK)
        self.passes = self.passes + 1 if self.total > 0 else 0


class _Found(NamedTuple):
    """The estimate from all passes since the last change."""

    groups: list[_Group]
    shape: _Shape
    noise: float
    spread: float

    def mean(self, samples: int) -> tuple[float, float]:
        """Seconds of a pass over this many samples, and their relative standard error."""
        weights = self._weights(samples, self.noise)
        scaled = (group.mean_s * self._ratio(samples, group.samples) for group in self.groups)
        return _weighted(scaled, weights), 1 / math.sqrt(sum(weights))

    def centre(self, samples: int) -> tuple[float, float]:
        """The expected logarithm of a pass over this many samples, and its standard error."""
        weights = self._weights(samples, self.spread)
        scaled = (group.centre + math.log(self._ratio(samples, group.samples)) for group in self.groups)
        return _weighted(scaled, weights), 1 / math.sqrt(sum(weights))

    def _ratio(self, samples: int, other: int) -> float:
        return (self.shape.overhead + samples) / (self.shape.overhead + other)

    def _weights(self, samples: int, noise: float) -> list[float]:
        """Weights of the groups: passes over other numbers of samples count less, the farther off they are."""
        return [
            1 / (noise**2 / group.passes + (self.shape.doubt * math.log(samples / group.samples)) ** 2)
            for group in self.groups
        ]


def _group(passes: Iterable[_Pass], spread: float) -> list[_Group]:
    by_size: dict[int, list[float]] = {}
    for one in passes:
        by_size.setdefault(one.samples, []).append(one.seconds)
    return [_group_of(samples, times, spread) for samples, times in by_size.items()]


def _group_of(samples: int, times: Sequence[float], spread: float) -> _Group:
    ordered = _winsorised(times)
    logs = [math.log(time) for time in ordered]
    centre = logs[len(logs) // 2]
    for _ in range(3):  # towards the point where clipped distances sum to 0, as in the CUSUM
        centre += sum(max(-CLIP * spread, min(CLIP * spread, log - centre)) for log in logs) / len(logs)
    return _Group(samples, len(times), sum(ordered) / len(ordered), centre)


def _winsorised(values: Iterable[float]) -> list[float]:
    """Sorted, with the farthest values set to the next farthest: one, or three of two hundred, on either side.

    So a single stall does not count, but repeated stalls do.
    """
    ordered = sorted(values)
    if len(ordered) < 3:
        return ordered
    cut = max(1, round(0.015 * len(ordered)))
    low, high = ordered[cut], ordered[-1 - cut]
    return [min(high, max(low, value)) for value in ordered]


def _tries(groups: Sequence[_Group], noise: float) -> list[_Try]:
    """Estimates of the shape: each number of samples against the one with the most passes."""
    if len(groups) < 2:
        return []
    base = max(groups, key=lambda group: group.passes)
    return [_try(base, group, noise) for group in groups if group is not base]


def _surprise(before: Sequence[_Pass], after: Sequence[_Pass], noise: float) -> list[_Try]:
    """Where the level changed together with the number of samples, the shape may have been wrong: one more estimate."""
    size, cut = after[-1].samples, len(before)
    while cut and before[cut - 1].samples == size:
        cut -= 1
    if cut == 0 or len(before) - cut > LATE:
        return []
    old = [one for one in before[:cut] if one.samples == before[cut - 1].samples]
    new = [one for one in (*before[cut:], *after) if one.samples == size]
    return [_try(_group(old, noise)[0], _group(new, noise)[0], noise)]


def _try(one: _Group, other: _Group, noise: float) -> _Try:
    """From t2 / t1 = (overhead + b2) / (overhead + b1)."""
    few, many = sorted((one, other))
    ratio = many.mean_s / few.mean_s
    if ratio <= 1:
        overhead = math.inf
    else:
        overhead = max(0.0, (many.samples - ratio * few.samples) / (ratio - 1))
    # More than 32 passes add nothing: times are not exactly linear, and the level drifts.
    variance = noise**2 * (1 / min(32, one.passes) + 1 / min(32, other.passes))
    most = MOST_FIXED / (1 - MOST_FIXED) * many.samples
    return _Try(min(overhead, most), math.log(many.samples / few.samples) ** 2 / variance)


def _shape(tries: Sequence[_Try]) -> _Shape:
    """The weighted median of the experiments, so that one that coincided with a change of level does not decide.

    Shrunk towards "nothing is fixed" while their weight is small.
    """
    prior = SHAPE_DOUBT**-2
    total = sum(one.weight for one in tries)
    doubt = max(FLOOR, 1 / math.sqrt(prior + total))
    middle, so_far = 0.0, 0.0
    for one in sorted(tries):
        so_far += one.weight
        if so_far >= total / 2:
            middle = one.overhead
            break
    return _Shape(middle * total / (prior + total), doubt)


def _weighted(values: Iterable[float], weights: Sequence[float]) -> float:
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)
