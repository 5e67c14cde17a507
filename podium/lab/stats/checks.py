"""Whether the assumptions of an analysis of variance hold, and rank tests where they do not.

Four checks of the residuals: are they normal, equally spread in all cells, free of a drift along the order of the runs,
and without outliers? Where nothing is wrong, each fails in at most about one of twenty studies. With few runs a check
finds gross violations only, so passing is no proof. Where one fails, rank tests are shown beside the analysis: they
need neither normal residuals nor equal spread, and they have less power.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np

from podium.lab.report.format import plain, probability
from podium.lab.stats.anova import Anova, Fit, anova
from podium.lab.stats.anova import tell as tell_anova
from podium.lab.stats.statistics import ALPHA, holm
from podium.lab.stats.terms import ols
from podium.lab.study.responses import is_ratio
from podium.lab.study.store import Row
from podium.records.intervals import load

T = TypeVar("T")

LEAST_RUNS = 8
"""With fewer residuals, the shape of their distribution cannot be judged."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One assumption."""

    name: Literal["normal", "equal spread", "no drift", "no outlier"]
    test: str
    p: float | None
    """None where these runs cannot test it."""
    said: str
    """The finding, and what it means for the analysis."""

    @property
    def failed(self) -> bool:
        return self.p is not None and self.p < ALPHA


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """A rank test of one factor, or of all cells together, beside the analysis."""

    what: str
    test: str
    seeds: int
    """How many seeds have a run of every cell; others cannot be ranked."""
    p: float
    p_holm: float
    smallest_p: float
    """The smallest p that `seeds` can give; where it is above 0.05, the rank test cannot find anything."""
    found: bool
    agrees: bool

    @property
    def said(self) -> str:
        if self.smallest_p >= ALPHA:
            return f"{self.seeds} seeds are too few for ranks to say anything"
        return "the same as the analysis" if self.agrees else "something else than the analysis"


@dataclass(frozen=True, kw_only=True)
class Checks:
    """The checks of one response, and rank tests where one failed."""

    response: str
    checks: tuple[Check, ...]
    """Empty where there is no residual."""
    ranks: tuple[Ranks, ...]

    @property
    def passed(self) -> bool:
        return not any(check.failed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


class Analysis(NamedTuple):
    """One response as a report shows it."""

    anova: Anova
    said: str
    checks: Checks
    checks_said: str


def analyse(
    rows: Sequence[Row],
    responses: Sequence[str],
    *,
    target: float | None = None,
    factors: Mapping[str, Sequence[Any]] | None = None,
    aliases: Mapping[str, Sequence[str]] | None = None,
    order: Sequence[tuple[str, int]] | None = None,
    maximize: bool | None = None,
) -> list[Analysis]:
    """Analysis and checks of each response that can be analysed; times, rates and bytes as ratios."""
    found = []
    asked: dict[str, Any] = {"target": target, "factors": factors, "aliases": aliases, "maximize": maximize}
    for response in responses:
        one = anova(rows, response, ratio=is_ratio(response), **asked)
        if one is not None:
            looked = checks(one, order)
            found.append(Analysis(one, tell_anova(one), looked, tell(looked)))
    return found


def checks(found: Anova, order: Sequence[tuple[str, int]] | None = None) -> Checks:
    """Check the residuals of an analysis.

    `order` is the order in which runs were made, as (cell, seed); without it, that of the rows.
    """
    if found.exact or found.residual_df == 0:
        return Checks(response=found.response, checks=(), ranks=())
    done = (_normal(found), _equal_spread(found), _no_drift(found, order), _no_outlier(found))
    ranks = by_ranks(found) if any(check.failed for check in done) else ()
    return Checks(response=found.response, checks=done, ranks=tuple(ranks))


def tell(found: Checks) -> str:
    """A sentence: which checks failed, and whether rank tests change the answer."""
    failed = [check for check in found.checks if check.failed]
    if not found.checks:
        return f"{found.response}: no residuals, so nothing to check."
    if not failed:
        return f"{found.response}: no sign against the assumptions."
    text = f"{found.response}: " + " ".join(check.said for check in failed)
    able = [line for line in found.ranks if line.smallest_p < ALPHA]
    other = [line.what for line in able if not line.agrees]
    if not able:
        return f"{text} There are too few complete seeds for ranks to give a second opinion."
    return f"{text} Ranks say {'something else of ' + ', '.join(other) if other else 'the same'}."


def _normal(found: Anova) -> Check:
    blank = Check(name="normal", test="Shapiro–Wilk", p=None, said="Too few runs to see the shape of the residuals.")
    if len(found.fits) < LEAST_RUNS:
        return blank
    p = float(load("scipy.stats").shapiro([fit.residual for fit in found.fits]).pvalue)
    if p >= ALPHA:
        return replace(blank, p=p, said="No sign that residuals are not normal.")
    more = "" if found.ratio else " If effects multiply, analyse logarithms."
    said = f"Residuals are not normal (p {_p(p)}): tests of clear effects hold, p near 0.05 do not.{more}"
    return replace(blank, p=p, said=said)


def _equal_spread(found: Anova) -> Check:
    blank = Check(name="equal spread", test="Brown–Forsythe, without structural zeros", p=None, said="")
    groups: dict[str, list[float]] = {}
    for fit in found.fits:
        groups.setdefault(fit.cell, []).append(fit.residual)
    large = [group for group in groups.values() if len(group) > 2]
    if len(groups) < 3 and found.block is not None:
        return replace(blank, said="Two cells in blocks always have equally spread residuals.")
    if len(large) < 2:
        return replace(blank, said="Fewer than two cells have three runs, so spreads cannot be compared.")
    p = float(load("scipy.stats").f_oneway(*map(_deviations, large)).pvalue)
    if not p < ALPHA:  # no spread in any cell gives nan
        return replace(blank, p=p if p == p else None, said="No sign that cells differ in spread.")
    cells = {cell: sum(x * x for x in group) / len(group) for cell, group in groups.items() if len(group) > 2}
    widest, *alike = _largest(cells.items(), lambda one: one[1])
    said = (
        f"Cells differ in spread (p {_p(p)}), most of all {widest[0]}{_tied(alike)}: rely on the paired tests, which "
        "take each pair's "
    )
    return replace(blank, p=p, said=f"{said}own spread.")


def _deviations(values: Sequence[float]) -> list[float]:
    """Distances from the median, without the one that is always 0 (Hines and Hines, 2000).

    With few runs in a cell, that zero hides all differences. With an even number of runs the two smallest distances are
    equal and become one.
    """
    middle = median(values)
    first, *rest = sorted(abs(value - middle) for value in values)
    return rest if len(values) % 2 else [math.sqrt(2) * first, *rest[1:]]


def _no_drift(found: Anova, order: Sequence[tuple[str, int]] | None) -> Check:
    blank = Check(name="no drift", test="place in the order of runs, added to the model", p=None, said="")
    place = {run: i for i, run in enumerate(order or [(fit.cell, fit.seed) for fit in found.fits])}
    if found.residual_df < 2 or any((fit.cell, fit.seed) not in place for fit in found.fits):
        return replace(blank, said="Too few runs to see a drift, or their order is not known.")
    places = np.array([float(place[fit.cell, fit.seed]) for fit in found.fits])
    # The part of the order that cells and seeds do not explain: a drift from seed to seed is in the blocks.
    own = places - found.design @ np.linalg.lstsq(found.design, places, rcond=None)[0]
    if np.abs(own).max() < 1e-6 * len(own):
        return replace(blank, said="Cells came in the same order with every seed, so a drift would pass for an effect.")
    fitted = ols(np.array([fit.value for fit in found.fits]), np.column_stack([found.design, places]))
    slope, p = float(fitted.params[-1]), float(fitted.pvalues[-1])
    if p >= ALPHA:
        return replace(blank, p=p, said="No sign of a drift along the order of the runs.")
    way = "up" if slope > 0 else "down"
    said = f"Residuals go {way} along the order of the runs (p {_p(p)}): the machine changed on the way. "
    return replace(blank, p=p, said=f"{said}With a shuffled order that adds noise, not bias; look for its cause.")


def _no_outlier(found: Anova) -> Check:
    blank = Check(name="no outlier", test="largest studentized residual, Bonferroni", p=None, said="")
    known = [(fit, abs(fit.studentized)) for fit in found.fits if fit.studentized is not None]
    if not known or found.residual_df < 2:
        return replace(blank, said="Too few runs to judge a single one.")
    (fit, size), *alike = _largest(known, lambda one: one[1])
    p = min(1.0, len(known) * 2 * float(load("scipy.stats").t.sf(size, found.residual_df - 1)))
    if p >= ALPHA:
        return replace(blank, p=p, said="No run stands out.")
    which = f"{fit.cell}, seed {fit.seed}{_tied(alike)}"
    off = f"{plain(size, 2)} standard errors off (p {_p(p)}): see what happened in"
    if alike:
        return replace(blank, p=p, said=f"{which}, lie {off} these runs. They are not left out.")
    return replace(blank, p=p, said=f"{which}, lies {off} this run. It is not left out.")


def _largest(values: Iterable[T], size: Callable[[T], float]) -> list[T]:
    """The largest, and those that equal it but for rounding: which of them comes out largest depends on the CPU."""
    known = list(values)
    limit = max(map(size, known)) * (1 - 1e-6)
    return [value for value in known if size(value) >= limit]


def _tied(alike: Sequence[object]) -> str:
    return f" ({len(alike)} more tied)" if alike else ""


def by_ranks(found: Anova) -> list[Ranks]:
    """Friedman's test over seeds for all cells and each factor with three or more levels, Wilcoxon's for two.

    A factor's levels are ranked by their means over the other factors, seed by seed. Interactions are not tested.
    """
    cells = list(dict.fromkeys(fit.cell for fit in found.fits))
    seeds = [seed for seed in dict.fromkeys(fit.seed for fit in found.fits) if _complete(found.fits, seed, len(cells))]
    whole = [fit for fit in found.fits if fit.seed in seeds]
    if len(seeds) < 2:
        return []
    lines = [_ranked("all cells", _table(whole, lambda fit: fit.cell), found.overall.found)] if len(cells) > 2 else []
    mains = [term for term in found.terms if len(term.factors) == 1]
    factors = []
    for term in mains:
        name = term.name
        table = _table(whole, lambda fit, name=name: fit.levels[name])
        factors.append(_ranked(name, table, term.found))
    corrected = holm([line.p for line in factors])
    lines += [_corrected(line, p, term.found) for line, p, term in zip(factors, corrected, mains, strict=True)]
    return lines


def _complete(fits: Sequence[Fit], seed: int, cells: int) -> bool:
    return len({fit.cell for fit in fits if fit.seed == seed}) == cells


def _table(fits: Sequence[Fit], key: Any) -> dict[str, list[float]]:
    """The means of each group, one per seed, all in the same order of seeds."""
    seeds = dict.fromkeys(fit.seed for fit in fits)
    found: dict[str, list[float]] = {}
    for group in dict.fromkeys(key(fit) for fit in fits):
        for seed in seeds:
            values = [fit.value for fit in fits if fit.seed == seed and key(fit) == group]
            found.setdefault(group, []).append(sum(values) / len(values))
    return found


def _ranked(what: str, table: Mapping[str, Sequence[float]], parametric: bool) -> Ranks:
    stats = load("scipy.stats")
    groups = list(table.values())
    n, k = len(groups[0]), len(groups)
    if k == 2:
        gaps = [a - b for a, b in zip(*groups, strict=True)]
        p = float(stats.wilcoxon(gaps).pvalue) if any(gaps) else 1.0
        test, smallest = "Wilcoxon", 2.0 ** (1 - n)
    else:
        p = float(stats.friedmanchisquare(*groups).pvalue)
        test, smallest = "Friedman", float(stats.chi2.sf(n * (k - 1), k - 1))
    p = 1.0 if p != p else p  # all ranks tied
    line = Ranks(what=what, test=test, seeds=n, p=p, p_holm=p, smallest_p=smallest, found=False, agrees=False)
    return _corrected(line, p, parametric)


def _corrected(line: Ranks, p_holm: float, parametric: bool) -> Ranks:
    found = p_holm < ALPHA
    return replace(line, p_holm=p_holm, found=found, agrees=found == parametric)


def _p(p: float) -> str:
    text = probability(p)
    return text if text.startswith("<") else f"= {text}"
