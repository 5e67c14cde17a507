"""Cells compared with reference cells at the same seeds, such as a codec with none, or a switch with no switch.

Two cells are a pair when they differ only in the factors that the reference names. Times, rates and bytes are compared
by their ratio, everything else by its difference, with the paired tests of `statistics`. Holm's correction runs over
the cells of one table and one response.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.stats.statistics import Contrast, compare_pairs, corrected
from podium.lab.study.parts import Against
from podium.lab.study.responses import is_ratio, response_of
from podium.lab.study.results import cells, finished
from podium.lab.study.store import Row


@dataclass(frozen=True)
class Pairing:
    """One cell beside its reference."""

    cell: str
    reference: str
    gaps: Mapping[str, Contrast]
    """By response; only responses that both cells have."""
    verdict: str = ""
    """With a margin: on which side of it the metric lies, and whether the whole interval lies on that side."""


def against(
    rows: Sequence[Row], asked: Against, responses: Sequence[str], metric: str, *, lower: bool = False
) -> list[Pairing]:
    """All cells that one `[[against]]` table of a study compares; its own `responses` replace the study's."""
    responses = asked.responses or responses
    done = finished(rows)
    levels = {cell: next(row["levels"] for row in done if row["cell"] == cell) for cell in cells(done)}
    pairs = [(cell, base) for cell in levels for base in levels if _are_pair(levels[cell], levels[base], asked)]
    found: dict[str, dict[str, Contrast]] = {cell: {} for cell, _ in pairs}
    for name in responses:
        values = {cell: _by_seed(done, cell, name) for cell in levels}
        tested = {
            cell: one
            for cell, base in pairs
            for one in compare_pairs(name, {cell: values[cell], base: values[base]}, ratio=is_ratio(name))
        }
        for cell, one in zip(tested, corrected(list(tested.values())), strict=True):
            found[cell][name] = one
    verdicts = {cell: _verdict(gaps.get(metric), asked.margin, lower) for cell, gaps in found.items()}
    return [Pairing(cell, base, found[cell], verdicts[cell]) for cell, base in pairs]


def _are_pair(at: Mapping[str, Any], base: Mapping[str, Any], asked: Against) -> bool:
    """Whether `base` is the reference of `at`."""
    if any(base[name] != level for name, level in asked.levels.items()) or at == base:
        return False
    return asked.chooses(at) and all(at[name] == level for name, level in base.items() if name not in asked.levels)


def _by_seed(rows: Sequence[Row], cell: str, name: str) -> dict[int, float]:
    values = {int(row["seed"]): response_of(row, name) for row in rows if row["cell"] == cell}
    return {seed: value for seed, value in values.items() if value is not None}


def _verdict(gap: Contrast | None, margin: float | None, lower: bool) -> str:
    """Whether the mean of the metric is at most `margin` worse, and whether its whole interval agrees."""
    if gap is None or margin is None:
        return ""
    sign = -1 if lower else 1
    ends = [sign * end for end in (gap.low, gap.high) if end is not None]
    within = sign * gap.value >= -margin
    settled = bool(ends) and all((end >= -margin) == within for end in ends)
    return ("within" if within else "worse") + ("" if settled else ", not settled")
