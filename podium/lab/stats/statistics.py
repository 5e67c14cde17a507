"""Means with intervals, and which differences between strategies are more than chance.

Runs of different strategies with the same seed start from the same parameters and see the same samples, so they are
compared in pairs, seed by seed: a paired t-test, all pairs of strategies, Holm's correction within each measure.
Times are compared by their ratio (the test runs on logarithms), everything else by its difference.

scipy and statsmodels do the arithmetic. Not checked: whether the differences are normal, which a handful of seeds
cannot show. With three seeds only large effects can be told from chance; reports state that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING, Any

from podium.lab.study.results import (
    by_setting,
    cells,
    crossed,
    deciding_rows,
    final_value,
    finished,
    number,
    time_to_target,
)
from podium.records.intervals import ROUNDING, deviation, load, paired_p, varies
from podium.records.intervals import Mean as Mean
from podium.records.intervals import mean_interval as mean_interval

if TYPE_CHECKING:
    from podium.lab.study.store import Row

TO_TARGET = "seconds to target"

ALPHA = 0.05
"""A difference is reported as one when its Holm-corrected p is below this."""


@dataclass(frozen=True, kw_only=True)
class Summary:
    """One strategy's row of the table; None where nothing was measured."""

    cell: str
    runs: int
    """Finished runs."""
    failed: int
    workers: int | None
    metric: Mean | None
    seconds: Mean | None
    to_target: Mean | None
    """Seconds to the target, over the runs that reached it."""
    reached: int
    samples_per_s: Mean | None
    moved_mb: Mean | None
    """Sent by all ranks together, in 10⁶ bytes."""
    wait_share: Mean | None
    staleness: Mean | None
    """Each run's mean staleness, averaged over runs."""
    staleness_max: int | None
    step_ms: Mean | None
    """Each run's median step of a worker, averaged over runs."""
    step_p90_ms: Mean | None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Contrast:
    """How two strategies differ in one measure, seed by seed.

    `value` is the mean of first minus second, or for a ratio the geometric mean of first over second; `low` and `high`
    are its 95 % interval (of this pair alone: Holm corrects `p_holm`, not the interval).
    """

    measure: str
    first: str
    second: str
    n: int
    ratio: bool
    value: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    p_holm: float | None = None
    setting: str = ""
    """In a study of several factors: the levels of the other factors, which both cells share."""
    effect: float | None = None
    """Mean over standard deviation of the pairs' differences, corrected for few pairs (Hedges)."""

    @property
    def exact(self) -> bool:
        """Whether the difference is the same in every seed, as with simulated time: there is nothing to test."""
        return self.n > 1 and self.low is not None and self.low == self.high

    @property
    def distinct(self) -> bool:
        """Whether a difference was detected."""
        return self.p_holm is not None and self.p_holm < ALPHA

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def require_statistics() -> None:
    """Raise before the first run, not after an hour of runs, if scipy or statsmodels is missing."""
    for module in ("scipy.stats", "statsmodels.stats.multitest"):
        load(module, "comparing strategies")


def summarise(rows: Sequence[Row], metric: str, target: float | None, maximize: bool | None = None) -> list[Summary]:
    """One summary per strategy, in the order of the rows."""
    by_cell = {cell: [row for row in rows if row["cell"] == cell] for cell in cells(rows)}
    return [_summary(cell, some, metric, target, maximize) for cell, some in by_cell.items()]


def _summary(cell: str, rows: Sequence[Row], metric: str, target: float | None, maximize: bool | None) -> Summary:
    done = finished(rows)
    times = [] if target is None else _known(time_to_target(row, metric, target, maximize) for row in done)
    workers = [int(row["workers"]) for row in done if "workers" in row]
    return Summary(
        cell=cell,
        runs=len(done),
        failed=sum(row.get("status") == "failed" for row in deciding_rows(rows)),
        workers=workers[0] if workers else None,
        metric=mean_interval(_known(final_value(row, metric) for row in done)),
        seconds=_mean_of(done, "seconds"),
        to_target=mean_interval(times),
        reached=len(times),
        samples_per_s=_mean_of(done, "samples_per_s"),
        moved_mb=mean_interval([value / 1e6 for value in _known(row.get("sent_bytes") for row in done)]),
        wait_share=_mean_of(done, "wait_share"),
        staleness=mean_interval(_within(done, "staleness", "mean")),
        staleness_max=max(map(int, _within(done, "staleness", "max")), default=None),
        step_ms=mean_interval(_within(done, "step_ms", "p50")),
        step_p90_ms=mean_interval(_within(done, "step_ms", "p90")),
    )


def contrasts(rows: Sequence[Row], metric: str, target: float | None, maximize: bool | None = None) -> list[Contrast]:
    """All pairs of strategies, in each measure that at least two of them have.

    In a study of several factors: all pairs that differ in the first factor alone, so that two strategies are compared
    with the same workers on the same link; a baseline that is in one setting only is left out. Holm's correction runs
    over all of them.
    """
    done = crossed(rows)
    found = [_in_setting(setting, some, metric, target, maximize) for setting, some in by_setting(done).items()]
    measures = dict.fromkeys(contrast.measure for part in found for contrast in part)
    return [
        contrast
        for name in measures
        for contrast in corrected([c for part in found for c in part if c.measure == name])
    ]


def _in_setting(
    setting: str, done: Sequence[Row], metric: str, target: float | None, maximize: bool | None
) -> list[Contrast]:
    found = compare_pairs(f"final {metric}", _by_seed(done, lambda row: final_value(row, metric)), ratio=False)
    if target is not None:
        times = _by_seed(done, lambda row: time_to_target(row, metric, target, maximize))
        # A mean without the seeds that missed the target would be too low: compare only cells that always reached it.
        whole = {cell: values for cell, values in times.items() if len(values) == _count(done, cell)}
        found += compare_pairs(TO_TARGET, whole, ratio=True)
    found += compare_pairs("seconds", _by_seed(done, lambda row: number(row.get("seconds"))), ratio=True)
    return [replace(contrast, setting=setting) for contrast in found]


def compare_pairs(measure: str, values: Mapping[str, Mapping[int, float]], *, ratio: bool) -> list[Contrast]:
    """Contrasts of all pairs in one measure, given each strategy's value by seed, with Holm's correction."""
    found = []
    for first, second in combinations(values, 2):
        seeds = sorted(set(values[first]) & set(values[second]))
        pairs = [(values[first][seed], values[second][seed]) for seed in seeds]
        if ratio:
            pairs = [(math.log(a), math.log(b)) for a, b in pairs if a > 0 and b > 0]
        if pairs:
            blank = Contrast(measure=measure, first=first, second=second, n=0, ratio=ratio, value=0)
            found.append(_contrast(blank, pairs))
    return corrected(found)


def corrected(contrasts: Sequence[Contrast]) -> list[Contrast]:
    """Contrasts of one family, with Holm's correction over all that were tested."""
    found = list(contrasts)
    tested = [i for i, contrast in enumerate(found) if contrast.p is not None]
    for i, p_holm in zip(tested, holm([_p(found[i]) for i in tested]), strict=True):
        found[i] = replace(found[i], p_holm=p_holm)
    return found


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's step-down correction.

    Bitwise the same numbers as statsmodels' `multipletests`, which takes hundredths of a second.
    """
    corrected, largest = [0.0] * len(p_values), 0.0
    for tested, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, float(p_values[i]) * (len(p_values) - tested))
        corrected[i] = min(1.0, largest)
    return corrected


def _contrast(blank: Contrast, pairs: Sequence[tuple[float, float]]) -> Contrast:
    gaps = [a - b for a, b in pairs]
    n, mean = len(gaps), math.fsum(gaps) / len(gaps)
    interval = mean_interval(gaps)
    assert interval is not None
    low, high = interval.low, interval.high
    if blank.ratio:
        low, high = (None if x is None else math.exp(x) for x in (low, high))
    contrast = replace(blank, n=n, value=math.exp(mean) if blank.ratio else mean, low=low, high=high)
    if n < 2:
        return contrast
    # Sums of the same numbers in another order differ in their last digits: that is no difference.
    size = 1.0 if blank.ratio else max(abs(x) for pair in pairs for x in pair)
    if max(map(abs, gaps)) <= ROUNDING * size:
        none = 1.0 if blank.ratio else 0.0
        return replace(contrast, value=none, low=none, high=none, p=1.0, effect=0.0)
    if not varies(gaps, mean):
        # The same gap in every seed: no t exists. With simulated time the gap is certain. Accuracies come in steps of
        # one test sample and times to a target in steps of one validation: they agree by chance, so only the sign
        # counts.
        if blank.ratio and blank.measure != TO_TARGET:
            return replace(contrast, p=0.0, effect=math.copysign(math.inf, mean))
        return replace(contrast, p=min(1.0, 2.0 ** (1 - n)), low=None, high=None)
    effect = (1 - 3 / (4 * (n - 1) - 1)) * mean / deviation(gaps, mean)
    return replace(contrast, p=paired_p(gaps), effect=effect)


def _by_seed(rows: Sequence[Row], value: Any) -> dict[str, dict[int, float]]:
    found: dict[str, dict[int, float]] = {cell: {} for cell in cells(rows)}
    for row in rows:
        x = value(row)
        if x is not None:
            found[row["cell"]][int(row["seed"])] = x
    return {cell: values for cell, values in found.items() if values}


def _mean_of(rows: Sequence[Row], field: str) -> Mean | None:
    return mean_interval(_known(row.get(field) for row in rows))


def _within(rows: Sequence[Row], field: str, name: str) -> list[float]:
    return _known((row.get(field) or {}).get(name) for row in rows)


def _known(values: Any) -> list[float]:
    return [x for x in map(number, values) if x is not None]


def _count(rows: Sequence[Row], cell: str) -> int:
    return sum(row["cell"] == cell for row in rows)


def _p(contrast: Contrast) -> float:
    assert contrast.p is not None
    return contrast.p
