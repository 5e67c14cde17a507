"""`podium bench claims`: how often a study claims a difference that does not exist, and how often it finds a real one.

Studies are simulated, a thousand of each kind, and evaluated as in reports: rows as in `results.jsonl`, paired
contrasts with Holm's correction, analysis of variance over the factors. Where nothing differs, at most one study of
twenty may claim a difference; a difference that by the formulas is found in four of five studies must be found that
often. Runs of one seed share the seed's effect, so a test without pairs would fail here.

Noise comes in four shapes. With `normal` (lognormal for times) the assumptions hold. With `skewed`, `heavy-tailed`
(Student's t with 3 degrees of freedom) and `unequal` (a cell's noise up to three times another's) they do not, and the
rates show the effect of that. All shapes have the same variance, averaged over cells.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from podium.errors import ConfigError
from podium.lab.bench.harness import check_names
from podium.lab.stats.anova import anova
from podium.lab.stats.power import GOAL, chance, smallest_effect
from podium.lab.stats.statistics import ALPHA, contrasts
from podium.lab.study.store import Row
from podium.records.intervals import load

SHAPES = ("normal", "skewed", "heavy-tailed", "unequal")

_SURE = 0.999
"""Level of the intervals by which dozens of rates are judged at once; with 95 % some would fail by chance alone."""

_METRIC = "final accuracy"
_TIME = "seconds"
_SEED_SPREAD = 2.0  # a seed's common effect on all runs, in standard deviations of a run's noise
_ACCURACY, _SECONDS = 0.9, 20.0
_ACCURACY_NOISE, _LOG_TIME_NOISE = 0.002, 0.05
_FACTORS: dict[str, list[Any]] = {"strategy": ["all-reduce", "local-sgd"], "workers": [2, 4, 8]}

Values = NDArray[np.float64]

GOAL_CORRECTED = 0.7
"""The power that remains of four in five for a term with several degrees of freedom, with five seeds, after the
correction for uneven spread over its contrasts, which is estimated from those seeds."""


class Case(NamedTuple):
    """A kind of study with something to count in it."""

    case: str
    measure: str
    counts: str
    """The event that is counted."""
    wanted: str
    """`at most` or `at least` the nominal rate."""
    nominal: float


def bench_claims(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    repetitions: int = 1000,
    seeds: int = 5,
    shapes: str = ",".join(SHAPES),
    seed: int = 0,
) -> dict[str, Any]:
    """Rows with `case`, `shape`, `measure`, `counts`, `found` of `repetitions`, `rate`, its Wilson interval, `nominal`.

    `holds`: whether the 99.9 % interval allows the nominal rate. `rounds` is another name for `repetitions`.
    """
    check_names("peer of bench claims", peers, ())
    repetitions = rounds or repetitions
    if repetitions < 1 or seeds < 2:
        raise ConfigError(
            f"bench claims: repetitions must be at least 1 and seeds at least 2, got {repetitions} and {seeds}"
        )
    chosen = shapes.split(",")
    check_names("shape of noise", chosen, SHAPES)
    rows = []
    for shape in chosen:
        for place, study in enumerate(_STUDIES):
            key = len(_STUDIES) * SHAPES.index(shape) + place
            draw = np.random.Generator(np.random.Philox(key=[seed, key]))
            rows += _rates(study, shape, repetitions, seeds, draw)
    held = [row for row in rows if row["shape"] == "normal"]
    return {
        "bench": "claims",
        "repetitions": repetitions,
        "seeds": seeds,
        "alpha": ALPHA,
        "assumptions_hold": all(row["holds"] for row in held) if held else None,
        "rows": rows,
    }


Study = Callable[[str, int, np.random.Generator], Mapping[Case, bool]]


def _rates(study: Study, shape: str, repetitions: int, seeds: int, draw: np.random.Generator) -> list[dict[str, Any]]:
    counts: dict[Case, int] = {}
    for _ in range(repetitions):
        for case, found in study(shape, seeds, draw).items():
            counts[case] = counts.get(case, 0) + found
    return [_row(case, shape, found, repetitions) for case, found in counts.items()]


def _row(case: Case, shape: str, found: int, repetitions: int) -> dict[str, Any]:
    outcome = load("scipy.stats").binomtest(found, repetitions)
    interval, wide = (outcome.proportion_ci(level, method="wilson") for level in (0.95, _SURE))
    return {
        "case": case.case,
        "shape": shape,
        "measure": case.measure,
        "counts": case.counts,
        "repetitions": repetitions,
        "found": found,
        "rate": found / repetitions,
        "low": float(interval.low),
        "high": float(interval.high),
        "wanted": case.wanted,
        "nominal": case.nominal,
        "holds": bool(wide.low <= case.nominal if case.wanted == "at most" else wide.high >= case.nominal),
    }


def _alike(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """Three strategies that do not differ."""
    found = contrasts(strategy_rows(shape, [0.0] * 3, seeds, draw), "accuracy", None)
    return {
        Case("three strategies, no effect", measure, "any pair called different", "at most", ALPHA): any(
            c.distinct for c in found if c.measure == measure
        )
        for measure in (_METRIC, _TIME)
    }


def _one_of_two(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """Two strategies, one better by a difference that these seeds should find in four of five studies."""
    return _planted(shape, 2, seeds, draw)


def _one_of_three(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """The same with a third strategy equal to the first: three tests, so the difference is larger."""
    return _planted(shape, 3, seeds, draw)


def _planted(shape: str, strategies: int, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    alpha = ALPHA / math.comb(strategies, 2)
    effect = smallest_effect(seeds, alpha)
    spread = _scales(shape, strategies)
    shift = effect * math.hypot(spread[0], spread[-1])  # the deviation of a difference between the two
    rows = strategy_rows(shape, [0.0] * (strategies - 1) + [shift], seeds, draw)
    title = f"{'two' if strategies == 2 else 'three'} strategies, one differs by {effect:.2f} deviations"
    cases = {}
    tested = contrasts(rows, "accuracy", None)
    power = round(chance(effect, seeds, alpha), 4)
    for measure in (_METRIC, _TIME):
        pairs = {(c.first, c.second): c for c in tested if c.measure == measure}
        hit = pairs["s0", f"s{strategies - 1}"]
        right = hit.value < (1 if hit.ratio else 0)
        cases[Case(title, measure, "the difference found", "at least", power)] = hit.distinct and right
        if strategies > 2:
            cases[Case(title, measure, "the equal pair called different", "at most", ALPHA)] = pairs[
                "s0", "s1"
            ].distinct
    return cases


def _no_factor(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """Two factors with two and three levels, both without an effect."""
    found = _terms(shape, np.zeros((2, 3)), seeds, draw)
    case = "2 × 3 factors, no effect"
    return {
        Case(case, measure, "any term called an effect", "at most", ALPHA): bool(terms)
        for measure, terms in found.items()
    }


def _copies(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """Two factors; for each seed, a strategy has the same value at all levels of the other factor."""
    rows = factor_rows(shape, np.zeros((2, 3)), seeds, draw)
    first = {(row["levels"]["strategy"], row["seed"]): row for row in reversed(rows)}
    for row in rows:
        same = first[row["levels"]["strategy"], row["seed"]]
        row["metrics"], row["seconds"] = same["metrics"], same["seconds"]
    return {
        Case("2 × 3 factors, copies, no effect", measure, "any term called an effect", "at most", ALPHA): bool(terms)
        for measure, terms in _found(rows).items()
    }


def _one_factor(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """The first factor has an effect, the same at all levels of the second."""
    return _in_factors(shape, "strategy", np.array([[-1.0] * 3, [1.0] * 3]), 1, seeds, draw)


def _interaction(shape: str, seeds: int, draw: np.random.Generator) -> dict[Case, bool]:
    """The first factor's effect depends on the second, and neither has an effect on average."""
    return _in_factors(shape, "strategy × workers", np.array([[-1.0, 0.0, 1.0], [1.0, 0.0, -1.0]]), 2, seeds, draw)


def _in_factors(
    shape: str, term: str, pattern: Values, df: int, seeds: int, draw: np.random.Generator
) -> dict[Case, bool]:
    noncentral = _noncentrality(df, df * (seeds - 1), ALPHA / 3)  # tested against its variation over seeds
    size = math.sqrt(noncentral / (seeds * float((pattern**2).sum())))
    found = _terms(shape, size * pattern, seeds, draw)
    case = f"2 × 3 factors, {term} planted"
    cases = {}
    for measure, terms in found.items():
        cases[Case(case, measure, "the effect found", "at least", GOAL if df == 1 else GOAL_CORRECTED)] = term in terms
        cases[Case(case, measure, "another term called an effect", "at most", ALPHA)] = bool(terms - {term})
    return cases


@lru_cache
def _noncentrality(df: int, residual_df: int, alpha: float) -> float:
    """The noncentrality with which an F-test finds an effect in four of five studies."""
    stats = load("scipy.stats")
    bound = stats.f.isf(alpha, df, residual_df)
    return float(load("scipy.optimize").brentq(lambda x: stats.ncf.sf(bound, df, residual_df, x) - GOAL, 0.01, 1e4))


def _terms(shape: str, effects: Values, seeds: int, draw: np.random.Generator) -> dict[str, set[str]]:
    """The terms that the analysis calls effects, by measure."""
    return _found(factor_rows(shape, effects, seeds, draw))


def _found(rows: Sequence[Row]) -> dict[str, set[str]]:
    found = {}
    for measure, ratio in ((_METRIC, False), (_TIME, True)):
        one = anova(rows, measure, ratio=ratio, factors=_FACTORS)
        assert one is not None
        found[measure] = {term.name for term in one.terms if term.found}
    return found


_STUDIES: tuple[Study, ...] = (_alike, _one_of_two, _one_of_three, _no_factor, _copies, _one_factor, _interaction)


def strategy_rows(shape: str, shifts: Sequence[float], seeds: int, draw: np.random.Generator) -> list[Row]:
    """Runs of strategies `s0`, `s1`, … that differ by these shifts, in standard deviations of a run's noise."""
    return _make_rows([f"s{i}" for i in range(len(shifts))], [{}] * len(shifts), shape, shifts, seeds, draw)


def factor_rows(shape: str, effects: Values, seeds: int, draw: np.random.Generator) -> list[Row]:
    """Runs of all combinations of two strategies and three numbers of workers, with these effects."""
    levels = [{"strategy": a, "workers": b} for a in _FACTORS["strategy"] for b in _FACTORS["workers"]]
    names = [f"strategy={at['strategy']}, workers={at['workers']}" for at in levels]
    return _make_rows(names, levels, shape, list(effects.ravel()), seeds, draw)


def _make_rows(
    cells: Sequence[str],
    levels: Sequence[Mapping[str, Any]],
    shape: str,
    shifts: Sequence[float],
    seeds: int,
    draw: np.random.Generator,
) -> list[Row]:
    moved = np.asarray(shifts)[:, None] + _SEED_SPREAD * draw.standard_normal(seeds)
    metric, time = (moved + _noise(shape, len(cells), seeds, draw) for _ in range(2))
    return [
        {
            "cell": cell,
            "seed": seed,
            "status": "finished",
            "levels": dict(at),
            "metrics": {"accuracy": _ACCURACY + _ACCURACY_NOISE * float(metric[i, seed])},
            "seconds": _SECONDS * math.exp(_LOG_TIME_NOISE * float(time[i, seed])),
            "history": [],
        }
        for i, (cell, at) in enumerate(zip(cells, levels, strict=True))
        for seed in range(seeds)
    ]


def _noise(shape: str, cells: int, seeds: int, draw: np.random.Generator) -> Values:
    """Independent noise of each run, with mean 0 and, averaged over cells, variance 1."""
    size = (cells, seeds)
    if shape == "skewed":
        return np.asarray((np.exp(draw.standard_normal(size)) - math.exp(0.5)) / math.sqrt(math.e * (math.e - 1)))
    if shape == "heavy-tailed":
        return np.asarray(draw.standard_t(3, size) / math.sqrt(3))
    return np.asarray(draw.standard_normal(size) * np.array(_scales(shape, cells))[:, None])


def _scales(shape: str, cells: int) -> list[float]:
    """The deviation of each cell's noise."""
    if shape != "unequal":
        return [1.0] * cells
    raw = np.linspace(1.0, 3.0, cells)
    return [float(x) for x in raw / math.sqrt(float((raw**2).mean()))]
