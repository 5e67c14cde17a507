"""Power: which differences a study's seeds can detect, and which they rule out.

A test that finds nothing means little unless its power is known. For each pair of strategies: the smallest difference
that these seeds detect four times in five, the chance of detecting a difference *worth* knowing, and the number of
seeds needed for that. All three use the observed spread of the pairs' differences, and the level of the strictest step
of Holm's correction, so they err on the side of caution. The observed difference is not used: "power" computed from it
adds nothing to p.

The other direction is equivalence, by two one-sided tests (Schuirmann, 1987): where both ends of the interval lie
inside a margin, a difference larger than it is ruled out.

With few seeds the spread itself is uncertain: with five, the true one may be three times as large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any

from podium.errors import ConfigError
from podium.lab.report.answer import Findings
from podium.lab.report.format import percent, plain
from podium.lab.stats.statistics import ALPHA, Contrast
from podium.records.intervals import load

GOAL = 0.8
"""Power that counts as enough."""

POINT = 0.01
"""The smallest difference worth knowing in a metric between 0 and 1, such as accuracy."""

SHARE = 0.05
"""The smallest relative difference worth knowing in times and in all other metrics."""

MOST_SEEDS = 1000
"""If more seeds than this are needed, no number is reported."""


@dataclass(frozen=True, kw_only=True)
class Power:
    """What one paired contrast can detect. Differences are given above 0, ratios above 1."""

    measure: str
    first: str
    second: str
    n: int
    ratio: bool
    alpha: float
    """Level of each test: 0.05 over the number of pairs in this measure, the strictest that Holm's correction asks."""
    deviation: float
    """Standard deviation of the pairs' differences (of their logarithms, for ratios)."""
    smallest_effect: float
    """Detected with 80 % power, in standard deviations of the pairs' differences."""
    smallest: float
    """The same as a difference or a ratio."""
    worth: float
    """The difference or ratio worth knowing."""
    power: float
    """The chance of detecting a true difference of `worth`."""
    seeds_needed: int | None
    """For 80 % power at `worth`; None where 1,000 are not enough."""
    within: float
    """A difference larger than this, or a ratio beyond it on either side, is ruled out."""
    p_equivalent: float
    """Of the two one-sided tests at `worth`, the larger p, times the number of pairs."""

    @property
    def enough(self) -> bool:
        """Whether a difference worth knowing would have been detected."""
        return self.power >= GOAL

    @property
    def equivalent(self) -> bool:
        """Whether a difference worth knowing is ruled out."""
        return self.p_equivalent < ALPHA

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def power(findings: Findings, worth: Mapping[str, float] | None = None) -> list[Power]:
    """The power of each contrast with an interval. `worth`: by measure, the difference or ratio worth knowing.

    The default is one point of a metric between 0 and 1, such as accuracy, and 5 % of times and of other metrics.
    """
    asked = {measure: worth_of(findings, measure) for measure in dict.fromkeys(c.measure for c in findings.contrasts)}
    for measure, value in (worth or {}).items():
        ratios = {c.ratio for c in findings.contrasts if c.measure == measure}
        if value <= (1 if True in ratios else 0):
            least = "a ratio above 1" if True in ratios else "a difference above 0"
            raise ConfigError(f"power: what is worth knowing of {measure} must be {least}, got {value:g}")
        asked[measure] = value
    tests = {m: sum(c.p is not None for c in findings.contrasts if c.measure == m) for m in asked}
    return [
        found
        for contrast in findings.contrasts
        if (found := of_contrast(contrast, tests[contrast.measure], asked[contrast.measure])) is not None
    ]


def worth_of(findings: Findings, measure: str) -> float:
    """The default difference or ratio worth knowing in a measure."""
    if any(c.ratio for c in findings.contrasts if c.measure == measure):
        return 1 + SHARE
    means = [abs(line.metric.mean) for line in findings.table if line.metric is not None]
    if not findings.lower and all(mean <= 1 for mean in means):
        return POINT
    return SHARE * (min if findings.lower else max)(means, default=1.0) or POINT


def of_contrast(contrast: Contrast, tests: int, worth: float) -> Power | None:
    """The power of one contrast in a family of `tests`; None where a single pair of runs shows no spread."""
    if contrast.p is None or contrast.low is None or contrast.high is None:
        return None
    n, alpha = contrast.n, ALPHA / tests
    value, low, high, asked = contrast.value, contrast.low, contrast.high, worth
    if contrast.ratio:
        value, low, high, asked = (math.log(x) for x in (value, low, high, asked))
    t = load("scipy.stats").t
    error = (high - low) / 2 / float(t.ppf(0.975, n - 1))  # standard error of the mean, from the interval
    deviation = error * math.sqrt(n)
    effect = smallest_effect(n, alpha)
    within = abs(value) + error * float(t.ppf(1 - alpha, n - 1))
    one_sided = 0.0 if error == 0 else float(t.sf((asked - abs(value)) / error, n - 1))
    if error == 0 and abs(value) >= asked:
        one_sided = 1.0
    return Power(
        measure=contrast.measure,
        first=contrast.first,
        second=contrast.second,
        n=n,
        ratio=contrast.ratio,
        alpha=alpha,
        deviation=deviation,
        smallest_effect=effect,
        smallest=math.exp(effect * deviation) if contrast.ratio else effect * deviation,
        worth=worth,
        power=1.0 if deviation == 0 else chance(asked / deviation, n, alpha),
        seeds_needed=2 if deviation == 0 else seeds_for(asked / deviation, alpha),
        within=math.exp(within) if contrast.ratio else within,
        p_equivalent=min(1.0, tests * one_sided),
    )


def tell(found: Power) -> str:
    """One contrast's power in a sentence."""
    pair = f"{found.first} and {found.second}, {found.measure}"
    if found.within == (1 if found.ratio else 0):
        return f"{pair}: the same in every seed."
    if found.equivalent:
        return f"{pair}: no difference larger than {_amount(found, found.within)}."
    text = f"{pair}: {found.n} seeds find {_amount(found, found.smallest)} in four of five studies, and "
    text += f"{_amount(found, found.worth)} in {percent(found.power)} of them"
    if found.enough:
        return f"{text}."
    needed = f"{plain(found.seeds_needed)} seeds" if found.seeds_needed else f"more than {plain(MOST_SEEDS)} seeds"
    return f"{text}; for that it takes {needed}."


def chance(effect: float, n: int, alpha: float) -> float:
    """The chance that a paired t-test detects `effect` (in standard deviations) in the right direction."""
    if n < 2:
        return 0.0
    # One-sided at half the level: the other tail would count detecting the opposite, and scipy returns nan there.
    solver = load("statsmodels.stats.power").TTestPower()
    return float(solver.power(effect, n, alpha / 2, alternative="larger"))


@lru_cache(maxsize=1024)
def smallest_effect(n: int, alpha: float, goal: float = GOAL) -> float:
    """The smallest effect, in standard deviations, that n pairs detect with power `goal`."""
    low, high = 0.0, 1.0
    while chance(high, n, alpha) < goal:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if chance(middle, n, alpha) >= goal else (middle, high)
    return high


def seeds_for(effect: float, alpha: float, goal: float = GOAL) -> int | None:
    """How many pairs detect `effect` with power `goal`; None where `MOST_SEEDS` are not enough."""

    low, high = 1, 2
    while chance(effect, high, alpha) < goal:
        if high >= MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if chance(effect, middle, alpha) >= goal else (middle, high)
    return high


def _amount(found: Power, value: float) -> str:
    return f"{plain(100 * (value - 1), 2)} %" if found.ratio else plain(value, 2)
