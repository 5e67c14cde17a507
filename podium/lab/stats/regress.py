"""How well a model of seconds predicts a configuration that it has not seen.

Runs of one configuration share everything but the seed, so they say nothing about another configuration. A model is
judged by leaving out whole configurations (all runs of a cell), predicting them from the rest, and comparing with the
measured mean. R² on the runs that a model was fitted to is shown for contrast, not as a verdict.

Sums of terms are fitted by ordinary least squares, as studies usually do. Models whose coefficients may not be below
zero are fitted to relative residuals: seconds range over orders of magnitude, and an error of a second means little in
long runs and much in short ones. Their intervals are bootstrapped over configurations, from a fixed seed. The models
are in `time_models`.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from podium.errors import ConfigError, MissingExtra

Numbers = Mapping[str, float]
"""What is known about a run before it starts, by name."""
Array = np.ndarray[Any, np.dtype[np.float64]]
Columns = Mapping[str, Array]
"""The numbers of many runs."""
Term = Callable[[Columns], Any]
Curve = Callable[[Array, Columns], Array]
"""(coefficients, numbers of all runs) to seconds."""

RESAMPLES = 100
PULL = 1e-4
"""Weight of a curve's distance from its start values, as factors. Runs of few nodes may leave a coefficient open: fits
that are equal to 13 digits then differed by machine, and predicted more nodes with errors of 1.4 to 48 %."""


class Point(NamedTuple):
    """One run: its configuration, the numbers that describe it, and its measured seconds."""

    cell: str
    x: Numbers
    y: float


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to fit. Without `curve`, seconds are the sum of terms times coefficients."""

    name: str
    terms: Mapping[str, Term]
    log: bool = False
    """Whether the terms add up to the logarithm of seconds."""
    positive: bool = False
    """Whether coefficients must be at least zero; fitted to relative residuals."""
    curve: Curve | None = None
    more: Mapping[str, float] = field(default_factory=dict)
    """Start values of the curve's further coefficients, which follow those of the terms."""

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.terms, *self.more)


class Coefficient(NamedTuple):
    """A fitted number and its 95 % interval; None where there is none."""

    name: str
    value: float
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class LackOfFit:
    """Whether configurations' means differ from the model by more than runs of one configuration differ."""

    f: float
    p: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """A model with its coefficients."""

    model: Model
    coefficients: tuple[Coefficient, ...]
    aliased: tuple[str, ...]
    """Left out: terms that these configurations cannot tell from others, and coefficients without any influence."""
    r2: float
    """Of seconds, on the runs that it was fitted to."""
    aic: float | None
    """Of seconds, so that models of logarithms can be compared with others; only for ordinary least squares."""
    leverage: float | None
    """The largest of any configuration: how much its own runs decide its prediction, from 0 to 1."""
    lack: LackOfFit | None
    values: tuple[float, ...] = field(repr=False)

    def predict(self, points: Sequence[Point]) -> list[float]:
        """Seconds of each point."""
        return [float(y) for y in _predict(self.model, np.array(self.values), _Runs.of(points).x)]


@dataclass(frozen=True, kw_only=True)
class Errors:
    """Prediction errors on configurations that the model was not fitted to."""

    model: str
    errors: Mapping[str, float]
    """Predicted over measured seconds, minus 1, by configuration."""

    @property
    def median_error(self) -> float:
        return float(np.median(np.abs(list(self.errors.values()))))

    @property
    def worst_cell(self) -> str:
        return max(self.errors, key=lambda cell: abs(self.errors[cell]))

    @property
    def worst_error(self) -> float:
        return abs(self.errors[self.worst_cell])

    @property
    def bias(self) -> float:
        """The median error with its sign: which way the model errs."""
        return float(np.median(list(self.errors.values())))


@dataclass(frozen=True, kw_only=True)
class Judgement(Errors):
    """How well a model predicts configurations left out one at a time."""

    parameters: int
    fit: Fit
    press_r2: float
    """R² of the predictions of left-out configurations."""

    @property
    def negative(self) -> int:
        """How many left-out configurations have predicted seconds of zero or less."""
        return sum(error <= -1 for error in self.errors.values())


@dataclass(frozen=True, kw_only=True)
class Extrapolation(Errors):
    """How well a model fitted to some configurations predicts the others."""

    fitted: int
    aliased: tuple[str, ...]
    leverage: float | None
    """The largest of any predicted configuration; above 1 it lies outside the fitted ones."""

    @property
    def predicted(self) -> int:
        return len(self.errors)


def fit(points: Sequence[Point], model: Model, *, resamples: int = RESAMPLES) -> Fit:
    """Fit by least squares. `resamples`: of the bootstrap over configurations; 0 gives no bootstrapped intervals."""
    runs = _checked(points, model)
    values, aliased = _solve(runs, model)
    aliased = (*aliased, *_idle(runs, model, values))
    free = len(values) - len(aliased)
    return Fit(
        model=model,
        coefficients=tuple(_intervals(runs, model, values, aliased, resamples)),
        aliased=aliased,
        r2=1 - _missed(runs.y - _predict(model, values, runs.x), runs.y),
        aic=_aic(runs, model, values, free),
        leverage=max(_leverages(runs, runs, model, values).values(), default=None),
        lack=_lack_of_fit(runs, model, values, free),
        values=tuple(float(v) for v in values),
    )


def judge(points: Sequence[Point], model: Model, *, resamples: int = RESAMPLES) -> Judgement:
    """Fit, then leave out one configuration after another and predict it from the others."""
    whole, runs = fit(points, model, resamples=resamples), _Runs.of(points)
    means, predicted = runs.means(), np.zeros(len(runs.cells))
    for i in range(len(runs.cells)):
        values, _ = _solve(runs.at(runs.cell != i), model, near=np.array(whole.values))
        predicted[i] = _predict(model, values, means.at(means.cell == i).x)[0]
    return Judgement(
        model=model.name,
        errors=dict(zip(runs.cells, map(float, predicted / means.y - 1), strict=True)),
        parameters=len(whole.values) - len(whole.aliased),
        fit=whole,
        press_r2=1 - _missed(runs.y - predicted[runs.cell], runs.y),
    )


def extrapolate(points: Sequence[Point], model: Model, inside: Callable[[Point], bool]) -> Extrapolation:
    """Fit to the points for which `inside` is true, and predict the others."""
    near, far = [point for point in points if inside(point)], [point for point in points if not inside(point)]
    if not far:
        raise ConfigError(f"{model.name}: there must be configurations to extrapolate to, got none")
    runs, beyond = _checked(near, model), _Runs.of(far)
    values, aliased = _solve(runs, model)
    means = beyond.means()
    errors = _predict(model, values, means.x) / means.y - 1
    return Extrapolation(
        model=model.name,
        errors=dict(zip(beyond.cells, map(float, errors), strict=True)),
        fitted=len(runs.cells),
        aliased=aliased,
        leverage=max(_leverages(runs, beyond, model, values).values(), default=None),
    )


@dataclass(frozen=True)
class _Runs:
    """Runs as columns; `cell` is each run's index into `cells`."""

    x: Columns
    y: Array
    cell: np.ndarray[Any, np.dtype[np.int64]]
    cells: tuple[str, ...]

    @staticmethod
    def of(points: Sequence[Point]) -> _Runs:
        cells = tuple(dict.fromkeys(point.cell for point in points))
        x = {name: np.array([point.x[name] for point in points], dtype=np.float64) for name in points[0].x}
        return _Runs(x, np.array([p.y for p in points]), np.array([cells.index(p.cell) for p in points]), cells)

    def at(self, rows: Any) -> _Runs:
        return _Runs({name: column[rows] for name, column in self.x.items()}, self.y[rows], self.cell[rows], self.cells)

    def means(self) -> _Runs:
        """One row per configuration that has runs, with the mean of its seconds."""
        _, first = np.unique(self.cell, return_index=True)
        some = self.at(np.sort(first))
        return _Runs(
            some.x,
            (np.bincount(self.cell, self.y, len(self.cells)) / self.counts.clip(1))[some.cell],
            some.cell,
            self.cells,
        )

    @property
    def counts(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """How many runs each of `cells` has."""
        return np.bincount(self.cell, minlength=len(self.cells))


def _checked(points: Sequence[Point], model: Model) -> _Runs:
    if len({point.cell for point in points}) < 3:
        raise ConfigError(
            f"{model.name}: there must be at least 3 configurations, got {len({point.cell for point in points})}"
        )
    for point in points:
        if not (math.isfinite(point.y) and point.y > 0):
            raise ConfigError(f"{model.name}: seconds must be finite and above 0, got {point.y} for {point.cell}")
    return _Runs.of(points)


def _matrix(model: Model, x: Columns) -> Array:
    return np.column_stack([term(x) for term in model.terms.values()])


def _target(runs: _Runs, model: Model) -> Array:
    return np.log(runs.y) if model.log else runs.y


def _predict(model: Model, values: Array, x: Columns) -> Array:
    if model.curve is not None:
        return model.curve(values, x)
    total: Array = _matrix(model, x) @ values
    return np.exp(total) if model.log else total


def _solve(runs: _Runs, model: Model, near: Array | None = None) -> tuple[Array, tuple[str, ...]]:
    """Coefficients, and the names of terms that depend linearly on earlier ones, whose coefficients are zero.

    `near`: start values for a curve, from a fit of similar runs.
    """
    matrix, values = _matrix(model, runs.x), np.zeros(len(model.terms))
    kept = _independent(matrix)
    aliased = tuple(name for i, name in enumerate(model.terms) if i not in kept)
    if near is not None and model.curve is not None:
        return _bend(runs, model, [near]), aliased
    if not model.positive:
        values[kept] = np.linalg.lstsq(matrix[:, kept], _target(runs, model), rcond=None)[0]
        return values, aliased
    weighed = matrix[:, kept] / runs.y[:, None]
    size = np.abs(weighed).max(0)
    # Columns differ by many orders of magnitude, which the solver's tolerance does not allow for.
    values[kept] = _load("scipy.optimize").nnls(weighed / size, np.ones_like(runs.y))[0] / size
    if model.curve is None:
        return values, aliased
    first = np.array([*values, *model.more.values()])
    full = first.copy()
    full[list(model.terms).index("exchange")] = 1.0  # a link that is used in full
    return _bend(runs, model, [first, full]), aliased


def _independent(matrix: Array) -> list[int]:
    """The columns that are linearly independent of the columns before them."""
    sizes = np.linalg.norm(matrix, axis=0)
    scaled = matrix / np.where(sizes > 0, sizes, 1)
    kept: list[int] = []
    for i in range(matrix.shape[1]):
        if np.linalg.matrix_rank(scaled[:, [*kept, i]], tol=1e-9) > len(kept):
            kept.append(i)
    return kept


def _bend(runs: _Runs, model: Model, starts: Sequence[Array]) -> Array:
    """Least squares of a curve, the best over all `starts`; runs of one cell count as their mean."""
    assert model.curve is not None
    curve, optimize, means = model.curve, _load("scipy.optimize"), runs.means()
    weights = np.sqrt(runs.counts[means.cell])
    found = []
    for start in starts:
        unit = np.where(start > 0, start, 1e-3)
        first = np.maximum(start / unit, 1e-6)

        def residuals(scaled: Array, unit: Array = unit, first: Array = first) -> Array:
            return np.concatenate([weights * (curve(scaled * unit, means.x) / means.y - 1), PULL * (scaled - first)])

        result = optimize.least_squares(
            residuals,
            first,
            bounds=(0, np.inf),
            max_nfev=25 if len(starts) == 1 else 200,  # a single start is close already
            jac="3-point",
            ftol=1e-14,
            xtol=1e-14,
        )
        found.append((float(result.cost), result.x * unit))
    best: Array = min(found, key=lambda one: one[0])[1]
    return best


def _idle(runs: _Runs, model: Model, values: Array) -> tuple[str, ...]:
    """Coefficients of a curve without influence here, such as `hidden` where `last` decides every exchange."""
    if model.curve is None:
        return ()
    moved = np.abs(_slopes(model, values, runs.x) * values).max(0)
    told = dict(zip(model.names, moved <= 1e-9 * moved.max(), strict=True))
    return tuple(name for name in model.more if told[name])


def _intervals(runs: _Runs, model: Model, values: Array, aliased: Sequence[str], resamples: int) -> list[Coefficient]:
    kept = [i for i, name in enumerate(model.names) if name not in aliased]
    ends: Mapping[int, Any] = {}
    if not model.positive:
        ols = _load("statsmodels.regression.linear_model").OLS
        found = ols(_target(runs, model), _matrix(model, runs.x)[:, kept]).fit()
        ends = dict(zip(kept, np.asarray(found.conf_int()), strict=True))
    elif resamples > 1:
        draw, own = np.random.Generator(np.random.Philox(key=8)), range(len(runs.cells))
        rows = [np.flatnonzero(runs.cell == i) for i in own]
        picked = [draw.integers(len(rows), size=len(rows)) for _ in range(resamples)]
        drawn = [_solve(runs.at(np.concatenate([rows[i] for i in some])), model, near=values)[0] for some in picked]
        ends = dict(enumerate(np.percentile(np.array(drawn), [2.5, 97.5], axis=0).T))
    return [Coefficient(model.names[i], float(values[i]), *map(float, ends.get(i, ()))) for i in kept]


def _aic(runs: _Runs, model: Model, values: Array, parameters: int) -> float | None:
    if model.positive:
        return None
    fitted, n = _predict(model, values, runs.x), len(runs.y)
    off = np.log(runs.y / fitted) if model.log else runs.y - fitted
    spread = float((off**2).mean())
    if spread <= 0:
        return None
    # The density of seconds is that of their logarithm over the seconds.
    likelihood = -n / 2 * (math.log(2 * math.pi * spread) + 1) - (float(np.log(runs.y).sum()) if model.log else 0.0)
    return 2 * (parameters + 1) - 2 * likelihood


def _lack_of_fit(runs: _Runs, model: Model, values: Array, parameters: int) -> LackOfFit | None:
    """The F-test of configurations' means against the spread of their runs, in the units of the fit."""
    error_df, model_df = len(runs.y) - len(runs.cells), len(runs.cells) - parameters
    if error_df < 1 or model_df < 1:
        return None
    fitted = _predict(model, values, runs.x)
    seen, told = (runs.y / fitted, np.ones_like(fitted)) if model.positive else (runs.y, fitted)
    if model.log:
        seen, told = np.log(seen), np.log(told)
    means = (np.bincount(runs.cell, seen) / runs.counts)[runs.cell]
    error, lack = float(((seen - means) ** 2).sum()), float(((means - told) ** 2).sum())
    if error <= 0:
        return None
    f = (lack / model_df) / (error / error_df)
    return LackOfFit(f, float(_load("scipy.stats").f.sf(f, model_df, error_df)))


def _leverages(fitted: _Runs, asked: _Runs, model: Model, values: Array) -> dict[str, float]:
    """Leverage of each configuration in `asked`, summed over its runs; a curve's is that of its tangent at `values`."""
    means = asked.means()
    here, there = _slopes(model, values, fitted.x), _slopes(model, values, means.x)
    if model.positive:  # relative residuals, and only coefficients above zero
        free = np.flatnonzero(values > 1e-12)
        here, there = here[:, free] / fitted.y[:, None], there[:, free] / means.y[:, None]
    if not here.size:
        return {}
    kept = _independent(here)
    _, r = np.linalg.qr(here[:, kept])
    solved = np.linalg.solve(r.T, there[:, kept].T)
    return dict(zip(asked.cells, map(float, (solved**2).sum(0) * asked.counts), strict=True))


def _slopes(model: Model, values: Array, x: Columns) -> Array:
    """The derivative of each prediction by each coefficient."""
    if model.curve is None:
        return _matrix(model, x)
    steps = np.diag(1e-6 * np.maximum(np.abs(values), 1e-6))
    found = [(model.curve(values + step, x) - model.curve(values - step, x)) / (2 * step.sum()) for step in steps]
    return np.array(found).T


def _missed(off: Array, y: Array) -> float:
    """Residual sum of squares over the total sum of squares."""

    about = float(((y - y.mean()) ** 2).sum())
    return float((off**2).sum()) / about if about > 0 else math.nan


def _load(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        raise MissingExtra(module.partition(".")[0], "study", "models of time") from None
