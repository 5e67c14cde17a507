"""The linear model of an analysis of variance: runs as arrays, terms as columns, and which terms the runs can estimate.

Contrasts add up to zero over the levels of a factor, so a column of an interaction is a product of the factors'
columns, and the intercept is the mean with equal weight for all levels.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from podium.lab.report.format import plain
from podium.lab.study.responses import response_of
from podium.lab.study.results import finished
from podium.lab.study.store import Row
from podium.records.intervals import load

Matrix = NDArray[np.float64]
Effect = tuple[str, ...]
"""The factors of a term: one, or those that interact."""

NOTHING = 1e-10
"""Residuals below this share of the values are rounding."""


@dataclass(frozen=True)
class Data:
    """The runs that are analysed, as arrays; `notes` lists those left out."""

    cells: list[str]
    seeds: list[int]
    values: Matrix
    ratio: bool
    levels: dict[str, list[str]]
    """Each factor's levels in order; factors with one level are left out."""
    at: dict[str, list[int]]
    """Each factor's level in each run, as an index into `levels`."""
    numbers: dict[str, list[float]]
    """The levels as numbers, for factors whose levels are all numbers."""
    missing: int
    """How many runs are missing for every cell to have every seed."""
    notes: tuple[str, ...]
    averaged: bool = False
    """Whether each cell appears once, as its mean over seeds."""


def read(
    rows: Sequence[Row],
    response: str,
    ratio: bool,
    target: float | None,
    factors: Mapping[str, Sequence[Any]] | None,
    maximize: bool | None = None,
) -> Data | None:
    """The finished runs that have levels and the response; None if they have fewer than two cells or levels."""
    done = [row for row in finished(rows) if row.get("levels")]
    names = list(dict.fromkeys([*(factors or {}), *(name for row in done for name in row["levels"])]))
    whole = [row for row in done if all(name in row["levels"] for name in names)]
    notes = []
    if len(whole) < len(done):
        notes.append(f"{runs(len(done) - len(whole))} without a level of every factor left out.")
    known = [(row, x) for row in whole if (x := response_of(row, response, target, maximize=maximize)) is not None]
    used = [(row, math.log(x) if ratio else x) for row, x in known if x > 0 or not ratio]
    if len(used) < len(known):
        notes.append(f"{runs(len(known) - len(used))} left out: a value of 0 or less has no logarithm.")
    if len({str(row["cell"]) for row, _ in used}) < 2:
        return None
    raw = {name: [row["levels"][name] for row, _ in used] for name in names}
    levels = {name: _order(seen, (factors or {}).get(name, ())) for name, seen in raw.items()}
    for name in [name for name in names if len(levels[name]) < 2]:
        notes.append(f"{name} has one level ({levels[name][0]}), so it is left out.")
        del levels[name]
    if not levels:
        return None
    seeds = [int(row["seed"]) for row, _ in used]
    combos = {tuple(str(raw[name][i]) for name in levels) for i in range(len(used))}
    return Data(
        [str(row["cell"]) for row, _ in used],
        seeds,
        np.array([x for _, x in used]),
        ratio,
        levels,
        {name: [levels[name].index(str(level)) for level in raw[name]] for name in levels},
        {name: _as_numbers(raw[name], levels[name]) for name in levels if all(map(_is_number, raw[name]))},
        len(combos) * len(set(seeds)) - len(used),
        tuple(notes),
    )


def _order(seen: Sequence[Any], asked: Sequence[Any]) -> list[str]:
    there = {str(level) for level in seen}
    ranked = [str(level) for level in asked if str(level) in there]
    rest = sorted(seen) if all(map(_is_number, seen)) else list(seen)
    return list(dict.fromkeys([*ranked, *map(str, rest)]))


def _is_number(level: Any) -> bool:
    return isinstance(level, int | float) and not isinstance(level, bool)


def _as_numbers(raw: Sequence[Any], levels: Sequence[str]) -> list[float]:
    by_text = {str(level): float(level) for level in raw}
    return [by_text[level] for level in levels]


def is_exact(data: Data) -> bool:
    """Whether cells and seeds together explain every value, although there are runs enough to show a residual."""
    combos = [tuple(data.at[name][i] for name in data.levels) for i in range(len(data.seeds))]
    places = {combo: k for k, combo in enumerate(dict.fromkeys(combos))}
    columns = [ones(data), _sum_columns([places[combo] for combo in combos], len(places)), _block(data)]
    design = np.hstack(columns)
    # Not `ols`, which warns about collinear columns where each run has its own seed.
    weights, _, rank, _ = np.linalg.lstsq(design, data.values, rcond=None)
    return bool(rank < len(design) and np.abs(data.values - design @ weights).max() <= rounding(data.values))


def rounding(values: Matrix) -> float:
    """The size below which a residual is rounding."""
    return NOTHING * float(np.abs(values).max() + np.ptp(values))


class Model:
    """The terms of the model, as columns of the design matrix."""

    def __init__(self, data: Data) -> None:
        self.data = data
        self.notes = list(data.notes)
        self.block: Matrix | None = _block(data) if len(set(data.seeds)) > 1 else None
        self.columns = {name: _sum_columns(data.at[name], len(data.levels[name])) for name in data.levels}
        """By factor."""
        self.terms: dict[Effect, Matrix] = {}
        self.aliases: dict[Effect, list[str]] = {}
        self.lines: list[str] = []
        """Factors modelled as a straight line over their levels."""

    def design(self, more: Mapping[Effect, Matrix] | None = None) -> Matrix:
        """All columns: the intercept, the blocks, the terms, and `more` terms to try."""
        block = [] if self.block is None else [self.block]
        return np.hstack([ones(self.data), *block, *self.terms.values(), *(more or {}).values()])

    def admit(self, some: Effect, columns: Matrix, *, partly: bool = False) -> None:
        """Add a term, unless it is confounded with terms of the model; then add an alias or a note.

        `partly`: where empty combinations leave a term incomplete, add the columns that can be estimated.
        """
        before = self.design()
        rank = int(np.linalg.matrix_rank(np.hstack([before, columns])))
        if partly and before.shape[1] < rank < before.shape[1] + columns.shape[1]:
            self.terms[some] = _new_in(before, columns)
            there = f"{rank - before.shape[1]} of its {columns.shape[1]} degrees of freedom"
            self.notes.append(f"{effect_name(some)}: with some combinations empty, the runs show {there}.")
            return
        if rank == before.shape[1] + columns.shape[1]:
            self.terms[some] = columns
        elif same := [other for other, its in self.terms.items() if _within(columns, its)]:
            self.aliases.setdefault(same[0], []).append(effect_name(some))
        elif rank == before.shape[1]:
            self.notes.append(f"{effect_name(some)} cannot be told from other terms together, so it is not tested.")
        else:
            self.notes.append(f"{effect_name(some)} can be told from other terms only in part, so it is not tested.")

    @property
    def repeated(self) -> bool:
        """Whether any cell was run more than once."""
        return len(set(self.data.cells)) < len(self.data.cells)

    def effects(self, sizes: Sequence[int]) -> dict[Effect, Matrix]:
        """The interactions of `sizes` factors each, among the factors of the model."""
        names = [some[0] for some in self.terms if len(some) == 1]
        chosen: list[Effect] = [some for size in sizes for some in combinations(names, size)]
        return {some: product_of([self.columns[name] for name in some]) for some in chosen}


def choose(data: Data, exact: bool) -> Model:
    """The largest model that the runs can estimate: all interactions, else pairs, else factors alone."""
    model = Model(data)
    _make_room(model)
    for name in data.levels:
        model.admit((name,), model.columns[name])
    spare = 0 if exact else 1
    count = len(data.levels)
    every = model.effects(range(2, count + 1))
    whole = model.design(every)
    if whole.shape[1] + spare <= len(whole) and _told_apart(whole):
        model.terms |= every
        return model
    if model.repeated and not model.lines:
        # Seeds measure chance, so every other difference between cells must be in the model, not in the residual.
        fuller = copy.deepcopy(model)
        for some, columns in every.items():
            if len(some) == 2 or _new_in(fuller.design(), columns).size:
                fuller.admit(some, columns, partly=True)
        if fuller.design().shape[1] + spare <= len(whole):
            return fuller
    # All pairs that can be told apart, or none: choosing which to leave out after seeing results would bias the tests.
    pairs, wider = model.effects([2]), copy.deepcopy(model)
    for some, columns in pairs.items():
        wider.admit(some, columns)
    if wider.design().shape[1] + spare <= len(whole):
        if count > 2:
            wider.notes.append("Interactions of three or more factors are in the residual, not in the model.")
        return wider
    model.aliases = {some: same for some, same in wider.aliases.items() if some in model.terms}
    model.notes.append(
        "There are too few runs to test interactions: they are in the residual, and the tests of factors count them as "
        "chance."
    )
    return model


def _make_room(model: Model) -> None:
    """Where the runs cannot estimate all factors and blocks: model numbers as straight lines, then drop the blocks."""
    data = model.data
    mains: dict[Effect, Matrix] = {(name,): columns for name, columns in model.columns.items()}
    if _told_apart(model.design(mains)):
        return
    lines = [name for name in data.numbers if len(data.levels[name]) > 2]
    if lines and sum(columns.shape[1] for columns in mains.values()) >= _count_cells(data):
        model.lines = lines
        model.columns |= {name: _line(data, name) for name in lines}
        mains |= {(name,): model.columns[name] for name in lines}
        model.notes.append(
            f"{', '.join(lines)}: too many levels for these cells, so a straight line is fitted through them."
        )
    block, model.block = model.block, None
    if block is not None and _told_apart(model.design(mains)):
        whole = np.hstack([model.design(mains), block])
        if not _told_apart(whole):
            model.notes.append("Seeds and cells cannot be told apart here, so seeds are not blocks.")
            return
    model.block = block


def _new_in(before: Matrix, columns: Matrix) -> Matrix:
    """The columns that are linearly independent of `before` and of each other."""
    kept = before
    for column in columns.T:
        wider = np.hstack([kept, column.reshape(-1, 1)])
        if np.linalg.matrix_rank(wider) == wider.shape[1]:
            kept = wider
    return np.asarray(kept[:, before.shape[1] :])


def averaged(data: Data) -> Data:
    """Each cell once, as its mean over the seeds that all cells share (over its own seeds, if they share none)."""
    by_cell = {cell: {s for c, s in zip(data.cells, data.seeds, strict=True) if c == cell} for cell in data.cells}
    shared = set.intersection(*by_cell.values())
    first = {cell: data.cells.index(cell) for cell in by_cell}
    values = []
    for cell in first:
        runs_of = [k for k, c in enumerate(data.cells) if c == cell and (not shared or data.seeds[k] in shared)]
        values.append(float(data.values[runs_of].mean()))
    note = (
        f"Straight lines do not explain all cells, so each counts once, as its mean over {len(shared) or 'its'} seeds."
    )
    return Data(
        list(first),
        [0] * len(first),
        np.array(values),
        data.ratio,
        data.levels,
        {name: [at[place] for place in first.values()] for name, at in data.at.items()},
        data.numbers,
        0,
        (*data.notes, note),
        averaged=True,
    )


def ones(data: Data) -> Matrix:
    return np.ones((len(data.values), 1))


def _block(data: Data) -> Matrix:
    seeds = list(dict.fromkeys(data.seeds))
    return _sum_columns([seeds.index(seed) for seed in data.seeds], len(seeds))


def _sum_columns(at: Sequence[int], levels: int) -> Matrix:
    """Sum-to-zero contrasts: the last level is minus the sum of all others."""
    table = np.vstack([np.eye(levels - 1), -np.ones((1, levels - 1))])
    return np.asarray(table[list(at)])


def _line(data: Data, name: str) -> Matrix:
    """A factor as one number, centred over its levels, with range 1.

    Uses the logarithm where that spreads the levels more evenly.
    """
    levels = np.array(data.numbers[name])
    if levels.min() > 0 and _leaning(np.log(levels)) < _leaning(levels):
        levels = np.log(levels)
    return np.asarray(((levels - levels.mean()) / np.ptp(levels))[data.at[name]].reshape(-1, 1))


def _leaning(levels: Matrix) -> float:
    """How far the median lies from the middle of the range, as a share of the range."""
    middle = (float(levels.min()) + float(levels.max())) / 2
    return abs(float(np.median(levels)) - middle) / float(np.ptp(levels))


def product_of(parts: Sequence[Matrix]) -> Matrix:
    """The columns of an interaction: each column of one factor times each of the others."""
    found = parts[0]
    for part in parts[1:]:
        found = (found[:, :, None] * part[:, None, :]).reshape(len(found), -1)
    return found


def _told_apart(design: Matrix) -> bool:
    """Whether all columns are linearly independent."""
    return bool(design.shape[1] <= len(design) and np.linalg.matrix_rank(design) == design.shape[1])


def _within(columns: Matrix, others: Matrix) -> bool:
    both = np.hstack([np.ones((len(others), 1)), others])
    return int(np.linalg.matrix_rank(np.hstack([both, columns]))) == int(np.linalg.matrix_rank(both))


def orthogonal(parts: Sequence[Matrix]) -> bool:
    """Whether the parts of a design are orthogonal to each other."""
    return all(float(np.abs(a.T @ b).max()) < 1e-9 * len(a) for a, b in combinations(parts, 2))


def _count_cells(data: Data) -> int:
    return len({tuple(data.at[name][i] for name in data.levels) for i in range(len(data.seeds))})


def no_empty_cell(data: Data) -> bool:
    """Whether every combination of levels has a run."""
    return _count_cells(data) == math.prod(len(levels) for levels in data.levels.values())


def effect_name(some: Sequence[str]) -> str:
    return " × ".join(some)


def runs(count: int) -> str:
    return f"{plain(count)} run{'s' * (count != 1)}"


def ols(values: Matrix, design: Matrix) -> Any:
    return load("statsmodels.regression.linear_model").OLS(values, design).fit()
