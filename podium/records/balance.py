"""From the records of steps that workers share: each worker's part, speed and waiting.

Only divided steps count: all workers that took part have recorded the step, and their samples make up the slice.
Asynchronous training has none. Rounds in which workers do unequal numbers of steps have a division in steps.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podium.records.recorder import Record, require
from podium.records.tables import Table

WARM_UP = 2
"""Steps of each worker that are not timed: the worker loads libraries and makes connections."""

MOST_POINTS = 200
"""Neighbouring steps of a longer run are averaged: a course has about as many points as a figure shows."""

ALIKE = 0.1
"""Workers count as alike where the slowest takes less than this part more time for a sample than the fastest."""

SURE = 2.0
"""How many standard errors two workers must be apart to differ."""


class Whole(NamedTuple):
    """A global step that workers shared."""

    size: int
    """Samples of all workers together."""
    rows: Mapping[int, Mapping[str, int]]
    """Each worker's step, by rank: the `_FIELDS` of its record."""


_FIELDS = ("position", "rank", "first", "samples", "step", "pass_ns", "wait_ns", "step_ns")


def balance(rows: Iterable[Record], began: int) -> dict[str, Any]:
    """How steps, or rounds, were divided among workers; empty where none were. `RunResult.balance` lists the keys."""
    found = Balance()
    for row in rows:
        found.add(row)
    return found.result(began)


def whole_steps(rows: Iterable[Record]) -> list[Whole]:
    """The steps that at least two workers shared, in order."""
    found = Balance()
    for row in rows:
        found.add(row)
    return list(found.whole_steps())


class Balance:
    """Takes a run's records one after another; stores eight numbers of each step."""

    def __init__(self, scratch: Path | None = None) -> None:
        """`scratch`: a folder for a temporary file, for runs with many steps."""
        self._steps = Table(len(_FIELDS), scratch=scratch)
        self._changes: list[Record] = []
        self._named: list[str] = []
        self._named_at_begin: list[str] = []
        self._servers = 0

    def add(self, row: Record) -> None:
        kind = row["kind"]
        if kind == "step":
            if _is_timed(row):
                require(row, *_FIELDS)
                self._steps.append([row[name] for name in _FIELDS])
        elif kind == "balance":
            if "balancer" in row:
                self._named.append(str(row["balancer"]))
            if "after" in row:
                require(row, "step", "ranks", "before")
                self._changes.append(row)
        elif kind == "begin":
            self._servers += row.get("role") == "server"
            if "balance" in row:
                self._named_at_begin.append(str(row["balance"]))

    def result(self, began: int) -> dict[str, Any]:
        changes = [_change(row, began) for row in self._changes]
        by_rounds = bool(changes) and changes[-1]["unit"] == "steps"
        steps = None if by_rounds else _Steps.of(self.whole_steps())
        if not by_rounds and steps is None:
            return {}
        workers = _workers(self._rows if by_rounds else self._shared_rows)
        found: dict[str, Any] = {
            "balancer": next(iter([*self._named, *self._named_at_begin]), None),
            "unit": "steps" if by_rounds else "samples",
            "workers": workers,
            "changes": changes,
            "division": _last_of(changes) if steps is None else steps.division,
            "exchange_s": None if steps is None else steps.exchange_s,
            "servers": self._servers,
            "uneven": _are_uneven(workers),
        }
        parts = found["division"].values()
        is_equal = max(parts) <= min(parts) + 1 and found["balancer"] in (None, "equal")
        if steps is not None and (found["uneven"] or changes or not is_equal):
            full = (step for step in self.whole_steps() if step.size == steps.most)
            found["course"] = _course(full, steps.full)
        return found

    def _rows(self) -> Iterator[dict[str, int]]:
        return (dict(zip(_FIELDS, row, strict=True)) for row in self._steps.sorted())

    def _shared_rows(self) -> Iterator[Mapping[str, int]]:
        return (row for step in self.whole_steps() for row in step.rows.values())

    def whole_steps(self) -> Iterator[Whole]:
        """The steps that at least two workers shared, in order."""
        before: int | None = None
        for end, told in itertools.groupby(self._rows(), key=lambda row: row["position"]):
            some, last, before = (
                {row["rank"]: row for row in told},
                before,
                end,
            )  # of a repeated step the last record counts
            count = sum(row["samples"] for row in some.values())
            begin = min((row["first"] for row in some.values() if row["samples"]), default=end)
            # In rounds of unequal numbers of steps the last steps may also be adjacent, but do not begin at `last`.
            if len(some) > 1 and 0 < count == end - begin and last in (None, begin):
                yield Whole(count, some)


def _is_timed(row: Record) -> bool:
    """Whether it is a step with its times and position; older records have neither."""
    return row["kind"] == "step" and "pass_ns" in row and "first" in row


class _Steps(NamedTuple):
    """Facts about all shared steps."""

    most: int
    """Samples of a full step; an epoch's last step is shorter."""
    full: int
    """How many full steps there were."""
    division: dict[str, int]
    """Samples by rank of the last full step."""
    exchange_s: float
    """Mean wait of the last worker of a step: it waited for no other worker, only for the exchange."""

    @classmethod
    def of(cls, steps: Iterable[Whole]) -> _Steps | None:
        """None where no step was shared."""
        most = full = count = 0
        last: Whole | None = None
        waited: list[int] = [0, 0]  # while warming up, and afterwards
        for step in steps:
            count += 1
            waited[count > WARM_UP] += min(row["wait_ns"] for row in step.rows.values())
            if step.size > most:
                most, full = step.size, 0
            if step.size == most:
                full, last = full + 1, step
        if last is None:
            return None
        division = {str(rank): row["samples"] for rank, row in sorted(last.rows.items())}
        warm = count - WARM_UP if count > WARM_UP else count
        return cls(most, full, division, waited[count > WARM_UP] / warm / 1e9)


def _last_of(changes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {str(rank): part for rank, part in zip(changes[-1]["ranks"], changes[-1]["after"], strict=True)}


def _change(row: Record, began: int) -> dict[str, Any]:
    predicted = row.get("predicted_s") or {}
    before_s, after_s = predicted.get("before"), predicted.get("after")
    return {
        "step": row["step"],
        "seconds": (row["t_ns"] - began) / 1e9,
        "ranks": row["ranks"],
        "unit": row.get("unit", "samples"),
        "before": row["before"],
        "after": row["after"],
        "why": row.get("why", "gain"),
        "saves": 1 - after_s / before_s if before_s else None,
    }


class _Sums:
    """Sums over one worker's steps."""

    def __init__(self) -> None:
        self.count = self.samples = self.pass_ns = self.step_ns = self.wait_ns = self.passes = 0
        self.per_sample = self.squares = 0.0

    def add(self, row: Mapping[str, int]) -> None:
        self.count += 1
        self.samples += row["samples"]
        self.step_ns += row["step_ns"]
        self.wait_ns += row["wait_ns"]
        if row["samples"]:
            self.passes += 1
            self.pass_ns += row["pass_ns"]
            self.per_sample += row["pass_ns"] / row["samples"]

    def add_square(self, row: Mapping[str, int]) -> None:
        """Called in a second pass over the same steps, when the mean is known."""
        if row["samples"]:
            self.squares += (row["pass_ns"] / row["samples"] - self.per_sample / self.passes) ** 2

    @property
    def error(self) -> float:
        """Relative standard error of the mean; 1 with fewer than two values."""
        if self.passes < 2 or not self.per_sample:
            return 1.0
        return math.sqrt(self.squares / (self.passes - 1) / self.passes) / (self.per_sample / self.passes)


def _workers(timed: Callable[[], Iterable[Mapping[str, int]]]) -> list[dict[str, Any]]:
    """One row per worker, by rank. Times are per sample, so that a worker with a larger part does not look slower."""
    cold: dict[int, _Sums] = {}
    warm: dict[int, _Sums] = {}
    for row in timed():
        early, late = cold.setdefault(row["rank"], _Sums()), warm.setdefault(row["rank"], _Sums())
        (early if early.count < WARM_UP else late).add(row)
    seen: Counter[int] = Counter()
    for row in timed():
        rank = row["rank"]
        seen[rank] += 1
        (cold if seen[rank] <= WARM_UP else warm)[rank].add_square(row)
    return [_worker(rank, cold[rank], warm[rank]) for rank in sorted(cold)]


def _worker(rank: int, cold: _Sums, warm: _Sums) -> dict[str, Any]:
    told = warm if warm.count else cold
    return {
        "rank": rank,
        "samples": cold.samples + warm.samples,
        "samples_per_s": told.samples / told.pass_ns * 1e9 if told.pass_ns else 0.0,
        "per_sample_s": told.pass_ns / told.samples / 1e9 if told.samples else None,
        "error": told.error,
        "wait_share": told.wait_ns / told.step_ns if told.step_ns else 0.0,
    }


def _are_uneven(workers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some workers take longer per sample than others, by more than chance."""
    known = [worker for worker in workers if worker["per_sample_s"]]
    if len(known) < 2:
        return False
    fast = min(known, key=lambda worker: float(worker["per_sample_s"]))
    slow = max(known, key=lambda worker: float(worker["per_sample_s"]))
    more = slow["per_sample_s"] / fast["per_sample_s"] - 1
    return bool(more > max(ALIKE, SURE * math.hypot(fast["error"], slow["error"])))


class _Mean:
    """A mean to five digits: a figure shows no more."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float) -> None:
        self.total, self.count = self.total + value, self.count + 1

    @property
    def value(self) -> float | None:
        return float(f"{self.total / self.count:.5g}") if self.count else None


def _course(steps: Iterable[Whole], count: int) -> dict[str, Any]:
    """Shares and times over the steps, by worker; neighbouring steps are averaged where there are many.

    Only full steps, of which there are `count`: an epoch's last step is shorter and would look like a change. A value
    is None where a worker took no part, or was warming up.
    """
    every = -(-count // MOST_POINTS)
    first_of: list[int] = []
    step_ms: list[_Mean] = []
    shares: defaultdict[tuple[int, int], _Mean] = defaultdict(_Mean)  # by worker and point
    pass_ms: defaultdict[tuple[int, int], _Mean] = defaultdict(_Mean)
    seen: Counter[int] = Counter()
    for place, step in enumerate(steps):
        point = place // every
        if place % every == 0:
            first_of.append(next(iter(step.rows.values()))["step"])
            step_ms.append(_Mean())
        for rank, row in step.rows.items():
            seen[rank] += 1
            shares[rank, point].add(row["samples"] / step.size)
            if seen[rank] > WARM_UP or count <= 2 * WARM_UP:
                pass_ms[rank, point].add(row["pass_ns"] / 1e6)
                step_ms[point].add(row["step_ns"] / 1e6)
    points = range(len(first_of))
    return {
        "step": first_of,
        "step_ms": [mean.value for mean in step_ms],
        "workers": {
            str(rank): {
                "share": [shares[rank, point].value for point in points],
                "pass_ms": [pass_ms[rank, point].value for point in points],
            }
            for rank in sorted(seen)
        },
    }
