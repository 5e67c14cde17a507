"""What the records say of steps that workers share: who did how much, how fast, and who waited.

Only steps that were divided count: all workers that took part have recorded one, and their samples make up the slice.
Asynchronous training has none. Of rounds in which workers do unequal numbers of steps there is a division in steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from podium.measure.records import Record

WARM_UP = 2
"""Steps of each worker that do not count as times: it loads libraries, and connections are made."""

MOST_POINTS = 200
"""Of a longer run neighbouring steps are taken together: a course has about as many points as a figure shows."""

ALIKE = 0.1
"""Workers count as alike where the slowest takes less than this part more time for a sample than the fastest."""

SURE = 2.0
"""How many standard errors two workers must be apart to differ."""


class Whole(NamedTuple):
    """A global step that workers shared."""

    size: int
    """Samples of all together."""
    rows: Mapping[int, Record]
    """Each worker's `step` record, by rank."""


def balance(rows: Sequence[Record], began: int) -> dict[str, Any]:
    """How steps, or rounds, were divided among workers; empty where none were.

    `RunResult.balance` says what is in it.
    """
    changes = [_change(row, began) for row in rows if row["kind"] == "balance" and "after" in row]
    by_rounds = bool(changes) and changes[-1]["unit"] == "steps"
    steps = [] if by_rounds else whole_steps(rows)
    if not steps and not by_rounds:
        return {}
    timed = [row for row in rows if _is_timed(row)] if by_rounds else [r for step in steps for r in step.rows.values()]
    workers = _workers(timed)
    found: dict[str, Any] = {
        "balancer": _balancer(rows),
        "unit": "steps" if by_rounds else "samples",
        "workers": workers,
        "changes": changes,
        "division": _division(steps) if steps else _last_of(changes),
        "exchange_s": _exchange_s(steps) if steps else None,
        "servers": sum(row["kind"] == "begin" and row.get("role") == "server" for row in rows),
        "uneven": _are_uneven(workers),
    }
    parts = found["division"].values()
    is_equal = max(parts) <= min(parts) + 1 and found["balancer"] in (None, "equal")
    if steps and (found["uneven"] or changes or not is_equal):
        found["course"] = _course(steps)
    return found


def _is_timed(row: Record) -> bool:
    """Whether it is a step that says when it computed what; older records do not."""
    return row["kind"] == "step" and "pass_ns" in row and "first" in row


def _division(steps: Sequence[Whole]) -> dict[str, int]:
    """Samples by rank of the last step that was no shorter than others: an epoch's last one says less."""
    most = max(step.size for step in steps)
    last = next(step for step in reversed(steps) if step.size == most)
    return {str(rank): row["samples"] for rank, row in sorted(last.rows.items())}


def _last_of(changes: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    return {str(rank): part for rank, part in zip(changes[-1]["ranks"], changes[-1]["after"], strict=True)}


def whole_steps(rows: Sequence[Record]) -> list[Whole]:
    """The steps that at least two workers shared, in order."""
    by_end: dict[int, dict[int, Record]] = {}
    for row in rows:
        if _is_timed(row):
            by_end.setdefault(row["position"], {})[row["rank"]] = row  # a step that came again counts as it came last
    found: list[Whole] = []
    before: int | None = None
    for end in sorted(by_end):
        some, last, before = by_end[end], before, end
        count = sum(row["samples"] for row in some.values())
        begin = min((row["first"] for row in some.values() if row["samples"]), default=end)
        # In a round of unequal numbers of steps, too, the last ones may lie side by side; but not all that is new.
        if len(some) > 1 and 0 < count == end - begin and last in (None, begin):
            found.append(Whole(count, some))
    return found


def _balancer(rows: Sequence[Record]) -> str | None:
    """Its name, where any record has it."""
    named = [row["balancer"] for row in rows if row["kind"] == "balance" and "balancer" in row]
    named += [row["balance"] for row in rows if row["kind"] == "begin" and "balance" in row]
    return str(named[0]) if named else None


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


def _workers(timed: Sequence[Record]) -> list[dict[str, Any]]:
    """One row per worker, by rank. Times are per sample, so that a worker with a larger part is not called slower."""
    told: dict[int, list[Record]] = {}
    for row in timed:
        told.setdefault(row["rank"], []).append(row)
    return [_worker(rank, told[rank]) for rank in sorted(told)]


def _worker(rank: int, told: Sequence[Record]) -> dict[str, Any]:
    warm = told[WARM_UP:] or told
    samples, pass_ns = sum(row["samples"] for row in warm), sum(row["pass_ns"] for row in warm if row["samples"])
    step_ns = sum(row["step_ns"] for row in warm)
    per_sample = pass_ns / samples / 1e9 if samples else None
    return {
        "rank": rank,
        "samples": sum(row["samples"] for row in told),
        "samples_per_s": samples / pass_ns * 1e9 if pass_ns else 0.0,
        "per_sample_s": per_sample,
        "error": _error([row["pass_ns"] / row["samples"] for row in warm if row["samples"]]),
        "wait_share": sum(row["wait_ns"] for row in warm) / step_ns if step_ns else 0.0,
    }


def _error(values: Sequence[float]) -> float:
    """Relative standard error of the mean; 1 where one value cannot say."""
    mean = sum(values) / len(values) if values else 0.0
    if len(values) < 2 or not mean:
        return 1.0
    variance = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return math.sqrt(variance / len(values)) / mean


def _are_uneven(workers: Sequence[Mapping[str, Any]]) -> bool:
    """Whether some take longer for a sample than others, by more than chance."""
    known = [worker for worker in workers if worker["per_sample_s"]]
    if len(known) < 2:
        return False
    fast = min(known, key=lambda worker: float(worker["per_sample_s"]))
    slow = max(known, key=lambda worker: float(worker["per_sample_s"]))
    more = slow["per_sample_s"] / fast["per_sample_s"] - 1
    return bool(more > max(ALIKE, SURE * math.hypot(fast["error"], slow["error"])))


def _exchange_s(steps: Sequence[Whole]) -> float:
    """What the last to come has waited, on average: nobody was behind it, so it waited for the exchange alone."""
    warm = steps[WARM_UP:] or steps
    waited_ns: list[int] = [min(row["wait_ns"] for row in step.rows.values()) for step in warm]
    return sum(waited_ns) / len(warm) / 1e9


def _course(steps: Sequence[Whole]) -> dict[str, Any]:
    """Shares and times over the steps, by worker; neighbouring steps are taken together where there are many.

    Only full steps: an epoch's last one is shorter and would look like a change. None where a worker took no part, or
    was warming up.
    """
    most = max(step.size for step in steps)
    steps = [step for step in steps if step.size == most]
    ranks = sorted({rank for step in steps for rank in step.rows})
    seen = dict.fromkeys(ranks, 0)
    cold: set[tuple[int, int]] = set()
    for place, step in enumerate(steps):
        for rank in step.rows:
            seen[rank] += 1
            if seen[rank] <= WARM_UP and len(steps) > 2 * WARM_UP:
                cold.add((place, rank))
    every = -(-len(steps) // MOST_POINTS)
    bins = [range(first, min(first + every, len(steps))) for first in range(0, len(steps), every)]

    def times(some: range, rank: int, name: str) -> list[float]:
        told = [(place, steps[place].rows[rank]) for place in some if rank in steps[place].rows]
        return [row[name] / 1e6 for place, row in told if (place, rank) not in cold]

    return {
        "step": [next(iter(steps[some[0]].rows.values()))["step"] for some in bins],
        "step_ms": [_mean([t for rank in ranks for t in times(some, rank, "step_ns")]) for some in bins],
        "workers": {
            str(rank): {
                "share": [_mean([_share(steps[p], rank) for p in some if rank in steps[p].rows]) for some in bins],
                "pass_ms": [_mean(times(some, rank, "pass_ns")) for some in bins],
            }
            for rank in ranks
        },
    }


def _share(step: Whole, rank: int) -> float:
    samples: int = step.rows[rank]["samples"]
    return samples / step.size


def _mean(values: Sequence[float]) -> float | None:
    """To five digits: a figure shows no more."""
    return float(f"{sum(values) / len(values):.5g}") if values else None
