"""Was every sample used once? Worked out from the step records, whoever trained on what and under which strategy.

A step record names where in the global order its samples begin, or the pieces in which they lie. What did not count is
taken out: rounds that were undone, pushes that a server dropped as too stale, and leases that were lent again when
their worker was lost. What a killed worker had done but not put on record counts as missing.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from podium.measure.records import Record, require
from podium.measure.tables import Table


class Audit(NamedTuple):
    """Samples of the order between where the run began and where it ended."""

    missing: int
    repeated: int


def audit(rows: Iterable[Record]) -> Audit | None:
    """How many samples no step used, and how many more than one did; None where the records do not say."""
    auditor = Auditor()
    for row in rows:
        auditor.add(row)
    return auditor.result()


class _Undone(NamedTuple):
    """A round that did not happen: steps from this position on, of before this moment."""

    place: int
    rank: int
    position: int


class Auditor:
    """Takes a run's records one after another, in order of time; keeps four numbers of each step."""

    def __init__(self, scratch: Path | None = None) -> None:
        """`scratch`: where a temporary file may be, should there be many steps."""
        self._steps = Table(4, scratch=scratch)  # where its samples begin, when it came, whose it is, how many they are
        self._begins: list[int] = []
        self._ends: list[int] = []
        self._lost: set[int] = set()
        self._undone: list[_Undone] = []
        self._dropped: Counter[tuple[int, int, int]] = Counter()  # by server, worker and lease
        self._is_told = True

    def add(self, row: Record) -> None:
        kind, rank = row["kind"], row["rank"]
        if kind == "step":
            self._add_step(row)
        elif kind == "begin" and row.get("role") == "worker":
            require(row, "position")
            self._begins.append(row["position"])
        elif kind == "end" and "param_hash" in row:
            require(row, "position")
            self._ends.append(row["position"])
        elif kind == "lost":
            self._lost.add(row["lost"])
        elif kind == "undone":
            require(row, "position")
            self._undone.append(_Undone(len(self._steps), rank, row["position"]))
        elif kind == "dropped":
            require(row, "worker", "lease")
            self._dropped[rank, row["worker"], row["lease"]] += 1

    def _add_step(self, row: Record) -> None:
        if "first" not in row:  # written before steps said so
            self._is_told = False
            return
        require(row, "samples")
        for first, count in _pieces(row):
            self._steps.append((first, len(self._steps), row["rank"], count))

    def result(self) -> Audit | None:
        if not self._begins or not self._ends or not self._is_told:
            return None
        at, end, missing, repeated = min(self._begins), max(self._ends), 0, 0
        for first, count in self._used():
            missing += max(0, first - at)
            repeated += max(0, min(at, first + count) - first)
            at = max(at, first + count)
        return Audit(missing + max(0, end - at), repeated)

    def _used(self) -> Iterator[tuple[int, int]]:
        """Where each step's samples begin and how many they are, in order; steps that did not count are left out."""
        dropped, is_undone = self._times_dropped(), self._undoing()
        for first, steps in itertools.groupby(self._steps.sorted(), key=lambda step: step[0]):
            counted: list[tuple[int, int]] = []  # whose, and how many samples
            for _, place, rank, count in steps:
                if is_undone(first, place, rank):
                    continue
                if dropped.get((rank, first), 0) > 0:
                    dropped[rank, first] -= 1
                    continue
                counted.append((rank, count))
            # A lost worker's lease is lent again unless it had said that it was through; servers apply it once.
            others = [(rank, count) for rank, count in counted if rank not in self._lost]
            yield from ((first, count) for count in sorted(count for _, count in others or counted))

    def _undoing(self) -> Callable[[int, int, int], bool]:
        """Tells whether the round of a step was undone later on; a rank that is lost cannot say so itself."""

        @cache
        def of(rank: int) -> tuple[list[int], list[int]]:
            """When rounds were undone, and the first position that this or a later time undid."""
            mine = [undone for undone in self._undone if rank in self._lost or undone.rank == rank]
            lowest = list(itertools.accumulate((undone.position for undone in reversed(mine)), min))
            return [undone.place for undone in mine], lowest[::-1]

        def is_undone(first: int, place: int, rank: int) -> bool:
            places, lowest = of(rank)
            later = bisect_right(places, place)
            return later < len(places) and first >= lowest[later]

        return is_undone

    def _times_dropped(self) -> dict[tuple[int, int], int]:
        times: dict[tuple[int, int], int] = {}
        for (_, worker, lease), count in self._dropped.items():  # each server drops it for itself
            times[worker, lease] = max(count, times.get((worker, lease), 0))
        return times


def _pieces(row: Record) -> list[tuple[int, int]]:
    """A step's samples: in one piece, or in those that its worker has drawn."""
    if "pieces" in row:
        return [(first, count) for first, count in row["pieces"]]
    return [(row["first"], row["samples"])] if row["samples"] else []
