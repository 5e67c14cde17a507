"""Models of how long training takes, and how well each predicts a configuration that it has not seen.

    linear       a number for each factor
    quadratic    squares and products besides
    power        the quadratic model of logarithms: products of powers
    physical     what has a reason to take time: samples, passes, updates, bytes on the link, messages; none below zero
    overlapped   the same, where an exchange hides behind the backward pass and only what sticks out takes time

Runs of one configuration share everything but the seed, so they say nothing about the next configuration. A model is
judged by leaving out whole configurations (all runs of a cell), predicting them from the rest, and comparing with the
mean that was measured. R² on runs that a model was fitted to is shown beside it for contrast, not as a verdict.

The first three are fitted by ordinary least squares, as studies usually do. The physical ones are fitted to relative
residuals: seconds range over orders of magnitude, and an error of a second means little in the long runs and all in
the short ones. Their intervals are bootstrapped over configurations, from a fixed seed.

The ring's part (bytes, messages) follows Thakur, Rabenseifner and Gropp, 2005, "Optimization of Collective
Communication Operations in MPICH". Not known here: what else ran on the machines.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np

from podium.errors import ConfigError, MissingExtra

Numbers = Mapping[str, float]
"""What is known about a run before it starts, by name."""

Array = np.ndarray[Any, np.dtype[np.float64]]
Columns = Mapping[str, Array]
Curve = Callable[[Array, Columns], Array]
"""(coefficients, numbers of all runs) to seconds."""

RESAMPLES = 100


class Point(NamedTuple):
    """One run: its configuration, the numbers that describe it, and what was measured."""

    cell: str
    x: Numbers
    y: float


class Term(NamedTuple):
    """One column of a model."""

    name: str
    value: Callable[[Numbers], float]


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is fitted. Without `curve`, seconds are the sum of terms times coefficients."""

    name: str
    terms: tuple[Term, ...]
    log: bool = False
    """Whether it is the logarithm of seconds that the terms add up to."""
    positive: bool = False
    """Whether coefficients may not be below zero; fitted to relative residuals."""
    curve: Curve | None = None
    more: tuple[tuple[str, float], ...] = ()
    """Further coefficients of the curve, behind those of the terms, with where to begin."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*(term.name for term in self.terms), *(name for name, _ in self.more))


class Coefficient(NamedTuple):
    """A fitted number and its 95 % interval; none where it could not be had."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LackOfFit:
    """Whether configurations' means lie further from the model than runs of one configuration lie apart."""

    f: float
    p: float
    model_df: int
    error_df: int


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model with its coefficients."""

    model: Model
    coefficients: tuple[Coefficient, ...]
    aliased: tuple[str, ...]
    """Terms that these configurations cannot tell from others, and coefficients that change nothing; left out."""
    runs: int
    cells: int
    r2: float
    """Of seconds, on the runs that it was fitted to."""
    aic: float | None
    """Of seconds, so that models of logarithms can be held against others; only where least squares are ordinary."""
    leverage: float | None
    """The largest of any configuration: how much its own runs decide what is predicted for it, from 0 to 1."""
    leverage_cell: str | None
    lack: LackOfFit | None
    values: tuple[float, ...] = field(repr=False)

    def predict(self, points: Sequence[Point]) -> list[float]:
        """Seconds for each."""
        return [float(y) for y in _predict(self.model, np.array(self.values), points)]


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """How well a model predicts configurations that it was not fitted to."""

    model: str
    parameters: int
    fit: Fit
    median_error: float
    """Relative, over configurations that were left out one at a time."""
    worst_error: float
    worst_cell: str
    press_r2: float
    """One less the part of the variance that predictions of left-out configurations miss."""
    negative: int
    """How many left-out configurations were predicted to take no time or less."""
    errors: Mapping[str, float]
    """Predicted over measured less one, by configuration."""


@dataclass(frozen=True, kw_only=True)
class Extrapolation:
    """How well a model that was fitted to some configurations predicts those beyond them."""

    model: str
    fitted: int
    predicted: int
    median_error: float
    worst_error: float
    worst_cell: str
    bias: float
    """Median of predicted over measured, less one: its sign says which way it errs."""
    aliased: tuple[str, ...]
    leverage: float | None
    """The largest of any configuration predicted; above 1 it lies outside of what was fitted."""


def points_of(
    rows: Sequence[Mapping[str, Any]], numbers: Callable[[Mapping[str, Any]], Numbers], response: str = "seconds"
) -> list[Point]:
    """Result rows as points: `numbers` says what was known before each began."""
    return [Point(str(row["cell"]), numbers(row), float(row[response])) for row in rows]


# The models.


def linear(factors: Sequence[str]) -> Model:
    """A constant and a slope for each factor."""
    return Model(name="linear", terms=(_one(), *(_power({name: 1}) for name in factors)))


def quadratic(factors: Sequence[str]) -> Model:
    """Squares and products besides; a square of a factor with two levels is aliased and left out when fitted."""
    pairs = [_power({a: 1, b: 1}) for a, b in itertools.combinations(factors, 2)]
    squares = [_power({name: 2}) for name in factors]
    return Model(name="quadratic", terms=(*linear(factors).terms, *squares, *pairs))


def power(factors: Sequence[str]) -> Model:
    """The quadratic model of logarithms, for the logarithm of seconds."""
    logs = [_logarithm({name: 1}) for name in factors]
    squares = [_logarithm({name: 2}) for name in factors]
    pairs = [_logarithm({a: 1, b: 1}) for a, b in itertools.combinations(factors, 2)]
    return Model(name="power", terms=(_one(), *logs, *squares, *pairs), log=True)


def physical(kinds: Sequence[str]) -> Model:
    """Terms with a reason, for models of these kinds, which compute at their own speeds.

    Uses the numbers `is KIND` (1 or 0), `samples`, `passes` and `exchanges` (each of one node), `nodes`, `bytes` (of
    gradients), `bytes_per_s` and `latency_s`. An exchange takes 2 (N - 1) / N * bytes / rate, so that its coefficient
    is 1 where the link is used in full and nothing hides behind the backward pass.
    """
    own = [
        Term(f"{what} of {kind}", lambda x, what=what, kind=kind: x[what] * x[f"is {kind}"])  # type: ignore[misc]
        for what in ("samples", "passes", "exchanges")
        for kind in kinds
    ]
    return Model(
        name="physical",
        terms=(
            *(term._replace(name=term.name.replace("exchanges", "updates")) for term in own),
            Term("exchange", lambda x: x["exchanges"] * wire_s(x)),
            Term("latency", lambda x: x["exchanges"] * (x["nodes"] - 1) * x["latency_s"]),
        ),
        positive=True,
    )


def overlapped(kinds: Sequence[str]) -> Model:
    """The physical model where an exchange of C seconds costs max(last * C, C - hidden * P) of them.

    P is one pass; buckets travel while the backward pass still runs, all but the last one. `hidden` is how much of a
    pass an exchange can hide behind, `last` the part of the exchange that cannot begin before the pass ends; both
    depend on a model's buckets.
    """
    terms = tuple(term for term in physical(kinds).terms if term.name != "latency")
    place = {term.name: i for i, term in enumerate(terms)}
    more = tuple((f"{what} of {kind}", start) for what, start in (("hidden", 0.6), ("last", 0.1)) for kind in kinds)
    place |= {name: len(terms) + i for i, (name, _) in enumerate(more)}

    def curve(values: Array, columns: Columns) -> Array:
        def of(what: str) -> Array:
            parts = [values[place[f"{what} of {kind}"]] * columns[f"is {kind}"] for kind in kinds]
            return cast(Array, sum(parts[1:], start=parts[0]))

        wire = values[place["exchange"]] * columns["wire_s"]
        one_pass = of("passes") + of("samples") * columns["samples"] / columns["passes"]
        exposed = np.maximum(of("last") * wire, wire - of("hidden") * one_pass)
        return cast(Array, columns["passes"] * one_pass + columns["exchanges"] * (of("updates") + exposed))

    return Model(name="overlapped", terms=terms, positive=True, curve=curve, more=more)


def wire_s(x: Numbers) -> float:
    """Seconds that a ring needs for the gradients once, at the link's full rate."""
    return 2 * (x["nodes"] - 1) / x["nodes"] * x["bytes"] / x["bytes_per_s"]


def _one() -> Term:
    return Term("constant", lambda x: 1.0)


def _power(powers: Mapping[str, int]) -> Term:
    name = " × ".join(f"{factor}²" if n == 2 else factor for factor, n in powers.items())
    return Term(name, lambda x: math.prod(x[factor] ** n for factor, n in powers.items()))


def _logarithm(powers: Mapping[str, int]) -> Term:
    name = " × ".join(f"log {factor}²" if n == 2 else f"log {factor}" for factor, n in powers.items())
    return Term(name, lambda x: math.prod(math.log(x[factor]) ** n for factor, n in powers.items()))


# Fitting.


def fit(points: Sequence[Point], model: Model, *, resamples: int = RESAMPLES) -> Fit:
    """Least squares. `resamples`: of the bootstrap over configurations, where intervals need one; 0: no intervals."""
    _need(points, model)
    values, aliased = _solve(points, model)
    aliased = (*aliased, *_idle(points, model, values))
    fitted, y = _predict(model, values, points), _measured(points)
    gone = _below(y - fitted, y)
    leverage = _leverages(points, points, model, values)
    most = max(leverage, key=leverage.__getitem__) if leverage else None
    return Fit(
        model=model,
        coefficients=tuple(_intervals(points, model, values, aliased, resamples)),
        aliased=aliased,
        runs=len(points),
        cells=len(_cells(points)),
        r2=1 - gone,
        aic=_aic(points, model, fitted, len(values) - len(aliased)),
        leverage=None if most is None else leverage[most],
        leverage_cell=most,
        lack=_lack_of_fit(points, model, fitted, len(values) - len(aliased)),
        values=tuple(float(v) for v in values),
    )


def judge(points: Sequence[Point], model: Model, *, resamples: int = RESAMPLES) -> Judgement:
    """Fit, then leave out one configuration after another and predict it from the others."""
    cells, whole = _cells(points), fit(points, model, resamples=resamples)
    predicted: dict[str, float] = {}
    for cell in cells:
        rest = [point for point in points if point.cell != cell]
        values, _ = _solve(rest, model, near=np.array(whole.values))
        predicted[cell] = float(_predict(model, values, [_of(points, cell)[0]])[0])
    means = {cell: float(np.mean([point.y for point in _of(points, cell)])) for cell in cells}
    errors = {cell: predicted[cell] / means[cell] - 1 for cell in cells}
    y = _measured(points)
    off = y - np.array([predicted[point.cell] for point in points])
    worst = max(errors, key=lambda cell: abs(errors[cell]))
    return Judgement(
        model=model.name,
        parameters=len(whole.values) - len(whole.aliased),
        fit=whole,
        median_error=float(np.median(np.abs(list(errors.values())))),
        worst_error=abs(errors[worst]),
        worst_cell=worst,
        press_r2=1 - _below(off, y),
        negative=sum(value <= 0 for value in predicted.values()),
        errors=errors,
    )


def extrapolate(points: Sequence[Point], model: Model, inside: Callable[[Point], bool]) -> Extrapolation:
    """Fit to the configurations inside, and predict the others."""
    near = [point for point in points if inside(point)]
    far = [point for point in points if not inside(point)]
    if not far:
        raise ConfigError(f"{model.name}: there must be configurations to extrapolate to, got none")
    _need(near, model)
    values, aliased = _solve(near, model)
    errors = {}
    for cell in _cells(far):
        mean = float(np.mean([point.y for point in _of(far, cell)]))
        errors[cell] = float(_predict(model, values, [_of(far, cell)[0]])[0]) / mean - 1
    worst = max(errors, key=lambda cell: abs(errors[cell]))
    leverage = _leverages(near, far, model, values)
    return Extrapolation(
        model=model.name,
        fitted=len(_cells(near)),
        predicted=len(errors),
        median_error=float(np.median(np.abs(list(errors.values())))),
        worst_error=abs(errors[worst]),
        worst_cell=worst,
        bias=float(np.median(list(errors.values()))),
        aliased=aliased,
        leverage=max(leverage.values(), default=None),
    )


def _need(points: Sequence[Point], model: Model) -> None:
    if len(_cells(points)) < 3:
        raise ConfigError(f"{model.name}: there must be at least 3 configurations, got {len(_cells(points))}")
    for point in points:
        if not (math.isfinite(point.y) and point.y > 0):
            raise ConfigError(f"{model.name}: seconds must be finite and above 0, got {point.y} for {point.cell}")


def _solve(points: Sequence[Point], model: Model, near: Array | None = None) -> tuple[Array, tuple[str, ...]]:
    """Coefficients, zero for terms that cannot be told from those before them, and the names of those terms.

    `near`: where to look for a curve's first, when much the same runs have been fitted before.
    """
    matrix, y = _matrix(points, model), _measured(points)
    kept = _independent(matrix)
    aliased = tuple(term.name for i, term in enumerate(model.terms) if i not in kept)
    values = np.zeros(len(model.terms))
    if not model.positive:
        values[kept] = (
            _load("statsmodels.regression.linear_model")
            .OLS(np.log(y) if model.log else y, matrix[:, kept])
            .fit()
            .params
        )
        return values, aliased
    if near is not None and model.curve is not None:
        return _bend(points, model, [near]), aliased
    weighed = matrix[:, kept] / y[:, None]
    size = np.abs(weighed).max(0)
    # Columns differ by many orders of magnitude, which the solver's own tolerance does not know.
    values[kept] = _load("scipy.optimize").nnls(weighed / size, np.ones_like(y))[0] / size
    if model.curve is None:
        return values, aliased
    first = np.array([*values, *(value for _, value in model.more)])
    full = first.copy()
    full[[term.name for term in model.terms].index("exchange")] = 1.0  # a link that is used in full
    return _bend(points, model, [first, full]), aliased


def _bend(points: Sequence[Point], model: Model, starts: Sequence[Array]) -> Array:
    """Least squares of a curve, the best of those from several places to begin; runs of one cell as their mean."""
    assert model.curve is not None
    curve, optimize = model.curve, _load("scipy.optimize")
    means = [_mean_point(_of(points, cell)) for cell in _cells(points)]
    counts = Counter(point.cell for point in points)
    columns, y = _columns(means), _measured(means)
    weights = np.sqrt([counts[point.cell] for point in means])
    found = []
    for start in starts:
        unit = np.where(start > 0, start, 1e-3)
        result = optimize.least_squares(
            lambda scaled, unit=unit: weights * (curve(scaled * unit, columns) / y - 1),
            np.maximum(start / unit, 1e-6),
            bounds=(0, np.inf),
            max_nfev=25 if len(starts) == 1 else 200,  # a single one is close already
        )
        found.append((float(result.cost), result.x * unit))
    return cast(Array, min(found, key=lambda one: one[0])[1])


def _mean_point(points: Sequence[Point]) -> Point:
    return points[0]._replace(y=float(np.mean([point.y for point in points])))


def _idle(points: Sequence[Point], model: Model, values: Array) -> tuple[str, ...]:
    """Coefficients of a curve that change nothing here: an exchange that always sticks out does not tell what hides."""
    if model.curve is None:
        return ()
    moved = np.abs(_slopes(points, model, values) * values).max(0)
    largest = float(moved.max())
    return tuple(
        name for name, m in zip(model.names, moved, strict=True) if m <= 1e-9 * largest and name in dict(model.more)
    )


def _predict(model: Model, values: Array, points: Sequence[Point]) -> Array:
    if model.curve is not None:
        return model.curve(values, _columns(points))
    linear_part = _matrix(points, model) @ values
    return cast(Array, np.exp(linear_part) if model.log else linear_part)


def _intervals(
    points: Sequence[Point], model: Model, values: Array, aliased: Sequence[str], resamples: int
) -> list[Coefficient]:
    names = model.names
    told = {i for i, name in enumerate(names) if name not in aliased}
    if not model.positive:
        matrix, y = _matrix(points, model), _measured(points)
        kept = sorted(told)
        result = _load("statsmodels.regression.linear_model").OLS(np.log(y) if model.log else y, matrix[:, kept]).fit()
        ends = dict(zip(kept, np.asarray(result.conf_int()), strict=True))
        return [Coefficient(names[i], float(values[i]), *map(float, ends[i])) for i in kept]
    if resamples < 2:
        return [Coefficient(names[i], float(values[i])) for i in sorted(told)]
    draw, cells = np.random.Generator(np.random.Philox(key=8)), _cells(points)
    by_cell = {cell: _of(points, cell) for cell in cells}
    drawn = []
    for _ in range(resamples):
        some = [cells[int(i)] for i in draw.integers(len(cells), size=len(cells))]
        drawn.append(_solve([point for cell in some for point in by_cell[cell]], model, near=values)[0])
    low, high = np.percentile(np.array(drawn), [2.5, 97.5], axis=0)
    return [Coefficient(names[i], float(values[i]), float(low[i]), float(high[i])) for i in sorted(told)]


def _independent(matrix: Array) -> list[int]:
    """The columns that are no sums of columns before them."""
    kept: list[int] = []
    basis: list[Array] = []
    for i, column in enumerate(matrix.T):
        rest = column.astype(np.float64)
        for _ in range(2):  # once more, since the first pass leaves rounding
            for vector in basis:
                rest = rest - (rest @ vector) * vector
        size, left = float(np.linalg.norm(column)), float(np.linalg.norm(rest))
        if size > 0 and left > 1e-9 * size:
            kept.append(i)
            basis.append(rest / left)
    return kept


def _aic(points: Sequence[Point], model: Model, fitted: Array, parameters: int) -> float | None:
    if model.positive:
        return None
    y, n = _measured(points), len(points)
    off = np.log(y) - np.log(fitted) if model.log else y - fitted
    spread = float((off**2).mean())
    if spread <= 0:
        return None
    # The density of seconds is that of their logarithm over the seconds.
    likelihood = -n / 2 * (math.log(2 * math.pi * spread) + 1) - (float(np.log(y).sum()) if model.log else 0.0)
    return 2 * (parameters + 1) - 2 * likelihood


def _lack_of_fit(points: Sequence[Point], model: Model, fitted: Array, parameters: int) -> LackOfFit | None:
    """The F-test of configurations' means against the spread of their runs, in the units that the fit was made in."""
    y, cells = _measured(points), _cells(points)
    error_df, model_df = len(points) - len(cells), len(cells) - parameters
    if error_df < 1 or model_df < 1:
        return None
    if model.log:
        seen, told = np.log(y), np.log(fitted)
    elif model.positive:
        seen, told = y / fitted, np.ones_like(y)
    else:
        seen, told = y, fitted
    place = {cell: i for i, cell in enumerate(cells)}
    groups = np.array([place[point.cell] for point in points])
    means = np.array([seen[groups == i].mean() for i in range(len(cells))])[groups]
    error, lack = float(((seen - means) ** 2).sum()), float(((means - told) ** 2).sum())
    if error <= 0:
        return None
    f = (lack / model_df) / (error / error_df)
    return LackOfFit(f, float(_load("scipy.stats").f.sf(f, model_df, error_df)), model_df, error_df)


def _leverages(fitted: Sequence[Point], asked: Sequence[Point], model: Model, values: Array) -> dict[str, float]:
    """Of each configuration asked about: its runs' together, where it was fitted; a curve's where it is, by slopes."""
    cells = _cells(asked)
    firsts = [_of(asked, cell)[0] for cell in cells]
    here, there = _slopes(fitted, model, values), _slopes(firsts, model, values)
    if model.positive:  # relative residuals, and only coefficients that are not held at zero
        free = np.flatnonzero(values > 1e-12)
        here = here[:, free] / _measured(fitted)[:, None]
        means = np.array([float(np.mean([point.y for point in _of(asked, cell)])) for cell in cells])
        there = there[:, free] / means[:, None]
    if not here.size:
        return {}
    kept = _independent(here)
    q, r = np.linalg.qr(here[:, kept])
    del q
    solved = np.linalg.solve(r.T, there[:, kept].T)
    runs = {cell: len(_of(asked, cell)) for cell in cells}
    return {cell: float(h) * runs[cell] for cell, h in zip(cells, (solved**2).sum(0), strict=True)}


def _slopes(points: Sequence[Point], model: Model, values: Array) -> Array:
    """How predictions change with each coefficient."""
    if model.curve is None:
        return _matrix(points, model)
    columns, slopes = _columns(points), []
    for i, value in enumerate(values):
        step = np.zeros_like(values)
        step[i] = 1e-6 * max(abs(float(value)), 1e-6)
        slopes.append((model.curve(values + step, columns) - model.curve(values - step, columns)) / (2 * step[i]))
    return np.array(slopes).T


def _matrix(points: Sequence[Point], model: Model) -> Array:
    return np.array([[term.value(point.x) for term in model.terms] for point in points], dtype=np.float64)


def _columns(points: Sequence[Point]) -> dict[str, Array]:
    columns = {name: np.array([point.x[name] for point in points], dtype=np.float64) for name in points[0].x}
    columns["wire_s"] = np.array([wire_s(point.x) for point in points], dtype=np.float64)
    return columns


def _measured(points: Sequence[Point]) -> Array:
    return np.array([point.y for point in points], dtype=np.float64)


def _cells(points: Sequence[Point]) -> list[str]:
    return list(dict.fromkeys(point.cell for point in points))


def _of(points: Sequence[Point], cell: str) -> list[Point]:
    return [point for point in points if point.cell == cell]


def _below(off: Array, y: Array) -> float:
    """Squares that are left, over those about the mean."""
    about = float(((y - y.mean()) ** 2).sum())
    return float((off**2).sum()) / about if about > 0 else math.nan


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(module.partition(".")[0], "study", "models of time") from None
