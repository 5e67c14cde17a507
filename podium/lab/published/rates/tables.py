"""Rows to tables: one panel per task, one line per codec."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from podium.lab.published.rates.design import CODECS, PAIRS, TITLES
from podium.lab.report.format import ABSENT
from podium.lab.stats.statistics import Mean, mean_interval
from podium.lab.study.rows import deciding_rows, number
from podium.lab.study.store import Row

POINT = 1.0
"""How far below dense, in points of a hundred, a codec may lie to be called close to it."""


@dataclass(frozen=True, kw_only=True)
class Line:
    """One codec on one task, over the seeds that finished."""

    codec: str
    tried: int
    """How many seeds."""
    finished: int
    feedback: str
    reduction: str
    ratio: float | None
    """Bytes sent over dense's bytes sent."""
    accuracy: Mean | None
    """In percent."""
    gap: Mean | None
    """Minus dense's with the same seed, in points of a hundred."""

    @property
    def failed(self) -> int:
        return self.tried - self.finished

    @property
    def close(self) -> bool:
        """Whether it trained with every seed and lies, on average, at most a point below dense."""
        return self.gap is not None and not self.failed and self.gap.mean >= -POINT

    @property
    def settled(self) -> bool:
        """Whether the whole interval lies on the side of the line where the mean lies."""
        if self.gap is None or self.gap.low is None or self.gap.high is None:
            return False
        return self.gap.low >= -POINT or self.gap.high < -POINT


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One task."""

    task: str
    lines: tuple[Line, ...]
    facts: Mapping[str, Any]
    """Sizes and settings, as a finished row has them."""
    feedback: tuple[tuple[str, str, Mean], ...]
    """What feedback adds, in points: with it, without it, the difference paired by seed."""

    @property
    def title(self) -> str:
        return TITLES.get(self.task, self.task)

    @property
    def dense(self) -> Line:
        return self.lines[0]


def tabulate(rows: Sequence[Row]) -> list[Panel]:
    """One panel per task that has a finished run with `dense`; tasks and codecs in the design's order."""
    panels = [_panel(task, deciding_rows([row for row in rows if row["task"] == task])) for task in task_names(rows)]
    return [panel for panel in panels if panel is not None]


def task_names(rows: Sequence[Row]) -> list[str]:
    """Those of the design in its order, then others by name."""
    known = [*TITLES]
    return sorted({str(row["task"]) for row in rows}, key=lambda t: (known.index(t) if t in known else len(known), t))


def _panel(task: str, rows: Sequence[Row]) -> Panel | None:
    done = [row for row in rows if row["status"] == "finished"]
    dense = {int(row["seed"]): row for row in done if row["cell"] == "dense"}
    if not dense:
        return None
    names = {str(row["cell"]) for row in rows}
    codecs = [codec for codec in CODECS if codec in names] + sorted(names - set(CODECS))
    accuracy = {codec: _accuracies(done, codec) for codec in codecs}
    worth = [(on, off, _gap(accuracy.get(on, {}), accuracy.get(off, {}))) for on, off in PAIRS]
    return Panel(
        task=task,
        lines=tuple(_line(codec, rows, dense) for codec in codecs),
        facts=next(iter(dense.values())),
        feedback=tuple((on, off, gap) for on, off, gap in worth if gap is not None),
    )


def _line(codec: str, rows: Sequence[Row], dense: Mapping[int, Row]) -> Line:
    mine = [row for row in rows if row["cell"] == codec]
    done = [row for row in mine if row["status"] == "finished"]
    ratios = [row["sent_bytes"] / dense[row["seed"]]["sent_bytes"] for row in done if row["seed"] in dense]
    values = _accuracies(done, codec)
    return Line(
        codec=codec,
        tried=len(mine),
        finished=len(done),
        feedback=done[0]["feedback"] if done else ABSENT,
        reduction=done[0]["reduction"] if done else ABSENT,
        ratio=math.fsum(ratios) / len(ratios) if ratios else None,
        accuracy=mean_interval(list(values.values())),
        gap=_gap(values, _accuracies(list(dense.values()), "dense")),
    )


def _accuracies(done: Sequence[Row], codec: str) -> dict[int, float]:
    """In percent, by seed."""
    found = {int(row["seed"]): number(row["accuracy"]) for row in done if row["cell"] == codec}
    return {seed: 100 * value for seed, value in found.items() if value is not None}


def _gap(first: Mapping[int, float], second: Mapping[int, float]) -> Mean | None:
    return mean_interval([first[seed] - second[seed] for seed in sorted(set(first) & set(second))])
