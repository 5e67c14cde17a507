"""Was every sample used once? Worked out from the step records, whoever trained on what and under which strategy.

A step record names where in the global order its samples begin, or the pieces in which they lie. What did not count is
taken out: rounds that were undone, pushes that a server dropped as too stale, and leases that were lent again when
their worker was lost. What a killed worker had done but not put on record counts as missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from podium.measure.records import Record


class Audit(NamedTuple):
    """Samples of the order between where the run began and where it ended."""

    missing: int
    repeated: int


def audit(rows: Sequence[Record]) -> Audit | None:
    """How many samples no step used, and how many more than one did; None where the records do not say."""
    begins = [row["position"] for row in rows if row["kind"] == "begin" and row.get("role") == "worker"]
    ends = [row["position"] for row in rows if row["kind"] == "end" and "param_hash" in row]
    used = _used(rows)
    if not begins or not ends or used is None:
        return None
    at, end, missing, repeated = min(begins), max(ends), 0, 0
    for first, count in sorted(used):
        missing += max(0, first - at)
        repeated += max(0, min(at, first + count) - first)
        at = max(at, first + count)
    return Audit(missing + max(0, end - at), repeated)


def _used(rows: Iterable[Record]) -> list[tuple[int, int]] | None:
    """Where each step's samples begin and how many they are; steps that did not count are left out."""
    rows = list(rows)
    lost = {row["lost"] for row in rows if row["kind"] == "lost"}
    steps: dict[int, list[tuple[int, int]]] = {}
    dropped: Counter[tuple[int, int, int]] = Counter()  # by server, worker and lease
    for row in rows:
        rank, kind = row["rank"], row["kind"]
        if kind == "step":
            if "first" not in row:  # written before steps said so
                return None
            steps.setdefault(rank, []).extend(_pieces(row))
        elif kind == "undone":
            for undone in {rank, *lost} & steps.keys():  # one that is lost cannot say so itself
                steps[undone] = [one for one in steps[undone] if one[0] < row["position"]]
        elif kind == "dropped":
            dropped[rank, row["worker"], row["lease"]] += 1
    _take_out_dropped(steps, dropped)
    _take_out_lent_again(steps, lost)
    return [one for of_rank in steps.values() for one in of_rank]


def _pieces(row: Record) -> list[tuple[int, int]]:
    """A step's samples: in one piece, or in those that its worker has drawn."""
    if "pieces" in row:
        return [(first, count) for first, count in row["pieces"]]
    return [(row["first"], row["samples"])] if row["samples"] else []


def _take_out_dropped(steps: dict[int, list[tuple[int, int]]], dropped: Counter[tuple[int, int, int]]) -> None:
    times: dict[tuple[int, int], int] = {}
    for (_, worker, lease), count in dropped.items():  # each server drops it for itself
        times[worker, lease] = max(count, times.get((worker, lease), 0))
    for (worker, lease), count in times.items():
        for one in [one for one in steps.get(worker, []) if one[0] == lease][:count]:
            steps[worker].remove(one)


def _take_out_lent_again(steps: dict[int, list[tuple[int, int]]], lost: set[int]) -> None:
    """A lost worker's lease is lent again unless it had said that it was through; servers apply it once."""
    others = {one[0] for rank, of_rank in steps.items() if rank not in lost for one in of_rank}
    for rank in lost & steps.keys():
        steps[rank] = [one for one in steps[rank] if one[0] not in others]
