"""Was every sample used once? Worked out from the step records, whoever trained on what and under which strategy.

A step record names where in the global order its samples begin. What did not count is taken out: rounds that were
undone, and pushes that a server dropped as too stale. What a killed worker had done but not put on record is missing.
"""

from __future__ import annotations

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
    steps: dict[int, list[tuple[int, int]]] = {}
    dropped: set[tuple[int, int]] = set()
    for row in rows:
        rank, kind = row["rank"], row["kind"]
        if kind == "step":
            if "first" not in row:  # written before steps said so
                return None
            if row["samples"]:
                steps.setdefault(rank, []).append((row["first"], row["samples"]))
        elif kind == "undone" and row["steps"]:
            del steps.get(rank, [])[-row["steps"] :]
        elif kind == "dropped":
            dropped.add((row["worker"], row["lease"]))
    for worker, lease in dropped:
        found = [one for one in steps.get(worker, []) if one[0] == lease]
        for one in found[:1]:
            steps[worker].remove(one)
    return [one for of_rank in steps.values() for one in of_rank]
