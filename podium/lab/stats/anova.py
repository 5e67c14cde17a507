"""Which factors of a study matter, and whether the effect of one depends on another: analysis of variance.

Each seed is a block: a seed's common effect on all cells is removed before factors are tested, as in the paired tests.
Factors are categories, also when their levels are numbers, and interactions are in the model as far as the runs allow.
Interactions left out of the model are in the residual, and `Anova.notes` says so. Times are analysed as logarithms, so
that effects are ratios.

Sums of squares are differences between the residuals of models with and without a term (statsmodels fits them), with
sum-to-zero contrasts. Where terms are orthogonal, all types of sums agree. Where runs are missing, a term is adjusted
for all that do not contain it (type II) or, with interactions and no empty cell, for all others (type III).

Not known here: whether residuals are normal and equally spread (`podium.lab.stats.checks` tests that), and whether a
seed changes the order of cells, which is what the residual consists of.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, NamedTuple

import numpy as np

from podium.lab.report.format import probability
from podium.lab.stats.statistics import ALPHA, Mean, holm, mean_interval
from podium.lab.stats.terms import (
    NOTHING,
    Data,
    Effect,
    Matrix,
    Model,
    averaged,
    choose,
    effect_name,
    is_exact,
    no_empty_cell,
    ols,
    ones,
    orthogonal,
    read,
    rounding,
    runs,
)
from podium.lab.study.store import Row
from podium.records.intervals import load

BLOCK = "seed"


@dataclass(frozen=True, kw_only=True)
class Term:
    """One row of the table: a factor, or factors joined by ` × ` for their interaction."""

    name: str
    factors: tuple[str, ...]
    df: int
    sum_sq: float
    f: float | None = None
    error_df: int | None = None
    """Of the error term: the term's own variation from seed to seed, or the residual."""
    shape: float | None = None
    """Huynh and Feldt's correction, by which both degrees of freedom are multiplied; 1 where it is not needed."""
    p: float | None = None
    p_holm: float | None = None
    """Corrected over all terms of this response."""
    partial_eta_squared: float | None = None
    """Share of the variation that the other terms leave. Too high with few runs, since it is never below 0."""
    omega_squared: float | None = None
    """Share of all variation, blocks included, less the share that chance alone would give; at least 0."""
    aliases: tuple[str, ...] = ()
    """Effects that these runs cannot tell from this one: the row is about their sum."""
    exact: bool | None = None
    """Where runs repeat exactly: whether the term has any effect. None where it is tested."""

    @property
    def found(self) -> bool:
        """Whether the term has an effect that is more than chance."""
        return bool(self.exact) if self.exact is not None else self.p_holm is not None and self.p_holm < ALPHA


@dataclass(frozen=True, kw_only=True)
class LevelMean:
    """One level of a factor: its mean, with equal weight for all levels of the other factors, and its distance from
    the first level."""

    factor: str
    level: str
    runs: int
    mean: Mean
    """Geometric where responses are compared by ratio. The interval is over seeds, so with one seed there is none."""
    against_first: float | None = None
    """This level minus the first, or over the first for ratios; None for the first."""
    low: float | None = None
    high: float | None = None
    """95 % interval of `against_first`, from the residual, without the seeds' common effect on all levels."""


class Fit(NamedTuple):
    """One run and its fitted value, on the analysed scale."""

    cell: str
    seed: int
    value: float
    fitted: float
    residual: float
    studentized: float | None
    """Residual over its standard error in a fit without this run; None where the other runs cannot estimate that."""
    levels: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Anova:
    """The analysis of one response."""

    response: str
    ratio: bool
    runs: int
    seeds: int
    terms: tuple[Term, ...]
    overall: Term
    """All terms together: whether cells differ at all."""
    block: Term | None
    """The seeds; None with one seed, or where seeds and cells cannot be told apart. It has no test."""
    residual_df: int
    residual_sum_sq: float
    type: Literal["II", "III"]
    balanced: bool
    """Whether all terms are orthogonal, so that the types of sums of squares agree."""
    exact: bool
    """Whether runs repeat exactly: there is no F, and every difference is certain."""
    levels: tuple[LevelMean, ...]
    fits: tuple[Fit, ...]
    notes: tuple[str, ...]
    """What to know before reading the table, a sentence each."""
    design: Matrix = field(repr=False, compare=False)
    """The model's columns, a row for each fit."""

    def to_dict(self) -> dict[str, Any]:
        """Without fits and design, which repeat the rows."""
        found = asdict(self)
        return {name: value for name, value in found.items() if name not in ("fits", "design")}


def anova(
    rows: Sequence[Row],
    response: str,
    *,
    ratio: bool,
    target: float | None = None,
    factors: Mapping[str, Sequence[Any]] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    maximize: bool | None = None,
) -> Anova | None:
    """Analyse one response (`responses.response_of`) over the `levels` of the finished runs.

    `factors` gives the order of levels, the first being the reference; by default numbers are sorted and texts come as
    they first appear. `aliases` names effects that a fraction cannot tell apart; those that the runs show are found
    without it. `maximize`: whether a higher metric is better, for `seconds to target`; None decides by its name.
    Returns None with fewer than two cells that have a number, or where no factor has two levels.
    """
    data = read(rows, response, ratio, target, factors, maximize)
    if data is None:
        return None
    exact = is_exact(data)
    model = choose(data, exact)
    if model.lines and model.repeated:
        # All runs of a cell lie off the line by the same amount: counted as independent runs they would inflate n.
        data, exact = averaged(data), False
        model = choose(data, exact)
    if not model.terms:
        return None
    return _analyse(data, model, exact, response, aliases or {})


def tell(found: Anova) -> str:
    """The result of the analysis, in a sentence or two."""
    name = f"{found.response}{' (ratios)' if found.ratio else ''}"
    some = [term for term in found.terms if term.found]
    none = [term for term in found.terms if not term.found and (term.p is not None or term.exact is not None)]
    if not some and not none:
        return f"{name}: too few runs to test anything."
    if found.exact:
        text = f"{name}: the same in every repetition, so these effects are exact"
        text += f": {_names(some)}." if some else ": none."
    elif not some:
        return f"{name}: no effect that we can detect of {_names(none)}."
    else:
        text = f"{name}: " + ", ".join(_told(term) for term in some) + "."
        if none:
            text += f" No effect that we can detect of {_names(none)}."
    mixed = [term for term in some if len(term.factors) > 1]
    if mixed:
        text += f" Since {_names(mixed)} matter{'s' * (len(mixed) == 1)}, the effect of one depends on the other: "
        text += "read the cells, not the means over them."
    return text


def _told(term: Term) -> str:
    p = probability(term.p_holm)
    return f"{term.name} matters (Holm p {p if p.startswith('<') else '= ' + p})"


def _names(terms: Sequence[Term]) -> str:
    names = [" = ".join([term.name, *term.aliases]) for term in terms]
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def _analyse(data: Data, model: Model, exact: bool, response: str, aliases: Mapping[str, Sequence[str]]) -> Anova:
    sums = _Sums(data, model)
    full = sums.full
    df, ssr = int(full.df_resid), float(full.ssr)
    exact = exact or (df > 0 and float(np.abs(full.resid).max()) <= rounding(data.values))
    balanced = orthogonal([ones(data), *sums.columns.values()])
    kind: Literal["II", "III"] = "II"
    if not balanced and any(len(some) > 1 for some in model.terms) and no_empty_cell(data):
        kind = "III"
    total = float(((data.values - data.values.mean()) ** 2).sum())
    scale = None if exact or df == 0 else ssr / df
    nothing = len(data.values) * rounding(data.values) ** 2

    rest = max(nothing, 1e-12 * total)  # sums of squares are differences of larger ones
    strata = model.block is not None and balanced and data.missing == 0 and not exact and df > 0

    def line(name: str, some: Effect, width: int, sum_sq: float, same: Sequence[str]) -> Term:
        term = Term(name=name, factors=some, df=width, sum_sq=max(0.0, sum_sq), aliases=tuple(dict.fromkeys(same)))
        if exact:
            return replace(term, exact=sum_sq > nothing)
        if not (strata and some in model.terms):
            return term if scale is None else _tested(term, scale, df, total)
        error = _from_seed_to_seed(data, model, some)
        if error.sum_sq <= rest:  # copies: this term does not vary at all
            return replace(term, exact=sum_sq > rest)
        return _tested(term, error.sum_sq / error.df, error.df, total, error.shape)

    terms = [
        line(
            effect_name(some),
            some,
            columns.shape[1],
            sums.of(some, kind),
            [*aliases.get(effect_name(some), ()), *model.aliases.get(some, ())],
        )
        for some, columns in model.terms.items()
    ]
    tested = [i for i, term in enumerate(terms) if term.p is not None]
    for i, p in zip(tested, holm([float(terms[i].p or 0.0) for i in tested]), strict=True):
        terms[i] = replace(terms[i], p_holm=p)
    width = sum(columns.shape[1] for columns in model.terms.values())
    overall = line("all terms", tuple(data.levels), width, sums.without(model.terms) - ssr, ())
    block = None
    if model.block is not None:
        lost = sums.without([(BLOCK,)]) - ssr
        block = Term(name=BLOCK, factors=(), df=model.block.shape[1], sum_sq=max(0.0, lost))
    return Anova(
        response=response,
        ratio=data.ratio,
        runs=len(data.values),
        seeds=len(set(data.seeds)),
        terms=tuple(terms),
        overall=replace(overall, p_holm=overall.p),
        block=block,
        residual_df=df,
        residual_sum_sq=ssr,
        type=kind,
        balanced=balanced,
        exact=exact,
        levels=tuple(_level_means(data, model, full, sums, exact, strata)),
        fits=tuple(_fits_of(data, full, sums.design)),
        notes=(*model.notes, *_more_notes(data, terms, balanced, kind, exact, df), *_tested_against(strata, terms)),
        design=sums.design,
    )


class _Stratum(NamedTuple):
    """The error term of a term: how it varies from seed to seed."""

    sum_sq: float
    df: int
    shape: float
    """Between 1 / (the term's df) and 1: how evenly the variation is spread over the term's contrasts (Huynh and
    Feldt). Both degrees of freedom are multiplied by it: with all variation in one contrast, they are those of one."""


def _from_seed_to_seed(data: Data, model: Model, some: Effect) -> _Stratum:
    """A term's own variation over seeds, from one score per contrast and seed.

    One residual for all terms would treat the cells of a seed as independent. They are not: in virtual time a strategy
    may learn exactly the same on every link, and copies of a run prove no more than the run.
    """
    order = sorted(range(len(data.cells)), key=lambda k: (data.seeds[k], data.cells[k]))
    seeds = len(set(data.seeds))
    columns = model.terms[some][order[: len(order) // seeds]]
    basis, width = np.linalg.qr(columns)[0], columns.shape[1]
    scores = data.values[order].reshape(seeds, -1) @ basis
    spread = np.atleast_2d(np.cov(scores, rowvar=False))
    trace = float(np.trace(spread))
    shape = 1.0
    if width > 1 and trace > 0:
        even = (
            width * trace**2 / (width**2 * float((spread**2).sum()))
        )  # Greenhouse and Geisser's, too low with few seeds
        room = width * (seeds - 1 - width * even)
        corrected = (seeds * width * even - 2) / room if room > 0 else 1.0
        shape = min(1.0, max(1 / width, even, corrected))
    return _Stratum(trace * (seeds - 1), width * (seeds - 1), shape)


def _tested_against(strata: bool, terms: Sequence[Term]) -> list[str]:
    if strata:
        return ["Each term is tested against its variation over seeds, so copies of a run prove no more than the run."]
    if any(term.p is not None for term in terms):
        return ["All terms are tested against one residual, which treats the cells of a seed as independent."]
    return []


def _tested(term: Term, scale: float, residual_df: int, total: float, shape: float = 1.0) -> Term:
    f = term.sum_sq / term.df / scale
    return replace(
        term,
        f=f,
        error_df=residual_df,
        shape=shape,
        p=float(load("scipy.stats").f.sf(f, shape * term.df, shape * residual_df)),
        partial_eta_squared=term.sum_sq / (term.sum_sq + scale * residual_df),
        omega_squared=max(0.0, (term.sum_sq - term.df * scale) / (total + scale)),
    )


def _more_notes(
    data: Data, terms: Sequence[Term], balanced: bool, kind: str, exact: bool, residual_df: int
) -> list[str]:
    notes = []
    for term in terms:
        if term.aliases:
            notes.append(f"{term.name} is not tested apart from {', '.join(term.aliases)}: these runs show their sum.")
    if data.missing > 0:
        notes.append(f"{runs(data.missing)} of cells in this study {'is' if data.missing == 1 else 'are'} missing.")
    if not balanced:
        how = "all other terms" if kind == "III" else "all terms that do not contain it"
        notes.append(f"The runs are not balanced: sums of squares are of type {kind}, each adjusted for {how}.")
    if exact:
        notes.append("A seed changes all cells by the same amount: effects are exact, there is no F.")
    elif residual_df == 0:
        notes.append("The runs leave nothing to compare the terms with: there is no test.")
    if len(set(data.seeds)) == 1 and not data.averaged:
        notes.append("There is one seed: the residual, taken for chance here, is what the model leaves out.")
    return notes


class _Sums:
    """Residual sums of squares of submodels, each fitted once."""

    def __init__(self, data: Data, model: Model) -> None:
        self._data, self._terms = data, model.terms
        self.columns: dict[Effect, Matrix] = dict(model.terms)
        if model.block is not None:
            self.columns[BLOCK,] = model.block
        self._known: dict[frozenset[Effect], float] = {}
        self.design = np.hstack([ones(data), *self.columns.values()])
        self.full = ols(data.values, self.design)
        self._known[frozenset(self.columns)] = float(self.full.ssr)

    def without(self, left_out: Any) -> float:
        """Residual sum of squares of the model without these terms."""
        return self._of(frozenset(self.columns) - set(left_out))

    def of(self, some: Effect, kind: str) -> float:
        """A term's sum of squares."""
        if kind == "III":
            return self.without([some]) - self.without([])
        over = [other for other in self._terms if set(other) > set(some)]
        return self.without([*over, some]) - self.without(over)

    def _of(self, left: frozenset[Effect]) -> float:
        if left not in self._known:
            matrix = np.hstack([ones(self._data), *(its for name, its in self.columns.items() if name in left)])
            self._known[left] = float(ols(self._data.values, matrix).ssr)
        return self._known[left]


def _level_means(data: Data, model: Model, full: Any, sums: _Sums, exact: bool, strata: bool) -> list[LevelMean]:
    """Marginal means. With sum-to-zero contrasts they are the intercept plus the level's columns."""
    start, place = 1, {}
    for some, columns in sums.columns.items():
        place[some] = slice(start, start + columns.shape[1])
        start += columns.shape[1]
    seeds = np.array(data.seeds)
    found = []
    for (name,) in [some for some in model.terms if len(some) == 1]:
        at, weights = np.array(data.at[name]), full.params[place[name,]]
        first = None
        for k in _shown(data, model, name):
            level = data.levels[name][k]
            own = model.columns[name][int(np.flatnonzero(at == k)[0])]
            mean = float(full.params[0] + own @ weights)
            values = []
            for seed in dict.fromkeys(data.seeds):
                here = (seeds == seed) & (at == k)
                if here.any():
                    shift = 0.0
                    if model.block is not None:
                        shift = float(model.block[int(np.flatnonzero(here)[0])] @ full.params[place[BLOCK,]])
                    values.append(mean + shift + float(full.resid[here].mean()))
            told = LevelMean(
                factor=name, level=level, runs=int((at == k).sum()), mean=_around(mean, values, data.ratio)
            )
            if first is None:
                first, base, at_first = mean, own, values
            elif strata:
                told = _seed_by_seed(told, [x - y for x, y in zip(values, at_first, strict=True)], data.ratio)
            else:
                vector = np.zeros(sums.design.shape[1])
                vector[place[name,]] = own - base
                told = _against(told, mean - first, vector, full, exact, data.ratio)
            found.append(told)
    return found


def _shown(data: Data, model: Model, name: str) -> list[int]:
    """The levels that a table shows: all, or the two ends of a straight line."""
    if name not in model.lines:
        return list(range(len(data.levels[name])))
    order = sorted(range(len(data.levels[name])), key=lambda k: data.numbers[name][k])
    return [order[0], order[-1]]


def _around(mean: float, values: Sequence[float], ratio: bool) -> Mean:
    """The model's mean, with the interval over seeds moved to it."""

    interval = mean_interval(values)
    assert interval is not None
    shown = math.exp(mean) if ratio else mean
    if interval.low is None or interval.high is None:
        return Mean(interval.n, shown)
    low, high = (mean + end - interval.mean for end in (interval.low, interval.high))
    return Mean(interval.n, shown, *(math.exp(x) if ratio else x for x in (low, high)))


def _seed_by_seed(told: LevelMean, gaps: Sequence[float], ratio: bool) -> LevelMean:
    """The distance from the first level and its interval, from one distance per seed."""
    found = mean_interval(gaps)
    assert found is not None
    value, low, high = (None if x is None else math.exp(x) if ratio else x for x in (found.mean, found.low, found.high))
    return replace(told, against_first=value, low=low, high=high)


def _against(told: LevelMean, gap: float, vector: Matrix, full: Any, exact: bool, ratio: bool) -> LevelMean:
    ends: list[float | None] = [gap, None, None]
    if exact:
        ends = [gap, gap, gap]
    elif full.df_resid > 0:
        ends = [gap, *map(float, full.t_test(vector).conf_int(ALPHA)[0])]
    value, low, high = (None if x is None else math.exp(x) if ratio else x for x in ends)
    return replace(told, against_first=value, low=low, high=high)


def _fits_of(data: Data, full: Any, design: Matrix) -> list[Fit]:
    leverage = (np.linalg.qr(design)[0] ** 2).sum(axis=1)
    df, ssr = int(full.df_resid), float(full.ssr)
    found = []
    for i, residual in enumerate(map(float, full.resid)):
        room = 1 - float(leverage[i])
        outside = None
        if df > 1 and room > NOTHING:
            rest = (ssr - residual**2 / room) / (df - 1)
            outside = residual / math.sqrt(rest * room) if rest > NOTHING * ssr / df else None
        value = float(data.values[i])
        levels = {name: data.levels[name][at[i]] for name, at in data.at.items()}
        found.append(Fit(data.cells[i], data.seeds[i], value, value - residual, residual, outside, levels))
    return found
