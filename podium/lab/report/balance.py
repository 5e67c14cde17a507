"""Each worker's share of the steps, over all seeds of a strategy, and advice on a better division.

The data come from `RunResult.balance`. Speeds are means over a run, without the fixed time of a pass, so the predicted
saving of another division is an upper bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from podium.balance.advice import drop_advice
from podium.balance.base import Member, finish_s
from podium.balance.equal_finish import EqualFinish
from podium.balance.speed import Speed
from podium.lab.study.results import cells, finished
from podium.lab.study.store import Row

MATTERS = 0.05
"""The share of a step that a change must save before the report advises it."""

SURE = 2.0
"""How many standard errors the saving must exceed."""

UNLEARNT = (None, "equal", "fixed")
"""Balancers that do not use speeds; None where records do not name one."""


class Part(NamedTuple):
    """One worker: means over the runs of a strategy."""

    rank: int
    samples_per_s: float
    """While computing."""
    share: float
    """Of the last whole step."""
    wait_share: float


class Balanced(NamedTuple):
    """One strategy whose workers differ, or whose steps were divided unequally."""

    parts: tuple[Part, ...]
    changes: tuple[tuple[int, Mapping[str, Any]], ...]
    """Seed and `balance` record of each change."""
    advice: tuple[str, ...]
    """Of the first run."""
    seed: int
    """Of the first run, which the figure shows."""
    unit: str
    """What is divided: a step's `samples`, or a round's `steps`."""
    course: Mapping[str, Any] | None
    """None if rounds are divided."""


def balanced_by_cell(rows: Iterable[Row]) -> dict[str, Balanced]:
    """The strategies with uneven workers; a table of equal workers would be empty of information."""
    done = [row for row in finished(rows) if is_told(row.get("balance") or {})]
    return {cell: _balanced([row for row in done if row["cell"] == cell]) for cell in cells(done)}


def is_told(facts: Mapping[str, Any]) -> bool:
    """Whether the report shows a run's balance: workers or their shares differ, or the division changed."""
    return bool(facts.get("course") or facts.get("changes"))


def _balanced(runs: Sequence[Row]) -> Balanced:
    first = runs[0]
    ranks = sorted({worker["rank"] for row in runs for worker in row["balance"]["workers"]})
    return Balanced(
        parts=tuple(_part(rank, [row["balance"] for row in runs]) for rank in ranks),
        changes=tuple((int(row["seed"]), change) for row in runs for change in row["balance"]["changes"]),
        advice=tuple(advice(first["balance"])),
        seed=int(first["seed"]),
        unit=first["balance"]["unit"],
        course=first["balance"].get("course"),
    )


def _part(rank: int, runs: Sequence[Mapping[str, Any]]) -> Part:
    told = [worker for run in runs for worker in run["workers"] if worker["rank"] == rank]
    shares = [run["division"].get(str(rank), 0) / sum(run["division"].values()) for run in runs]
    return Part(
        rank,
        _mean([worker["samples_per_s"] for worker in told]),
        _mean(shares),
        _mean([worker["wait_share"] for worker in told]),
    )


MOST_PARTS = 8
"""A division among more workers is shown by its minimum and maximum."""


def division(counts: Sequence[int]) -> str:
    """The samples of each worker in a step: `32/16/8/8`."""
    if len(counts) <= MOST_PARTS:
        return "/".join(str(count) for count in counts)
    return f"{min(counts)} to {max(counts)}"


def advice(facts: Mapping[str, Any]) -> list[str]:
    """Advice that would shorten a run's steps, a line each, from its `RunResult.balance`; may be empty."""
    division = facts.get("division") or {}
    told = [worker for worker in facts.get("workers", ()) if str(worker["rank"]) in division]
    if facts.get("unit") != "samples" or len(told) < 2 or any(not worker["per_sample_s"] for worker in told):
        return []  # rounds have their own rule, and the speed of a worker without samples is unknown
    members = [
        Member(worker["rank"], Speed(fixed_s=0.0, per_sample_s=worker["per_sample_s"], error=worker["error"]))
        for worker in told
    ]
    counts = [int(division[str(member.rank)]) for member in members]
    found = [_better_division(members, counts, facts), _fewer_workers(members, sum(counts), facts)]
    return [line for line in found if line is not None]


def _better_division(members: Sequence[Member], counts: Sequence[int], facts: Mapping[str, Any]) -> str | None:
    if facts["balancer"] not in UNLEARNT:
        return None  # this balancer divides by speed already
    before_s, after_s = finish_s(counts, members), finish_s(EqualFinish().divide(sum(counts), members), members)
    saves = (before_s - after_s) / (before_s + facts["exchange_s"])
    last = max(range(len(counts)), key=lambda i: members[i].finish_s(counts[i]))
    if saves <= max(MATTERS, SURE * members[last].speed.error):
        return None
    fast = min(members, key=lambda member: member.speed.per_sample_s)
    slower = members[last].speed.per_sample_s / fast.speed.per_sample_s
    why = f"worker {members[last].rank} takes {slower:.1f} times as long for a sample as worker {fast.rank}"
    if slower < 1 + MATTERS:
        why = f"worker {members[last].rank} has too many samples for its speed"
    return f"--balance equal-finish: steps up to {100 * saves:.0f} % shorter; {why}"


def _fewer_workers(members: Sequence[Member], count: int, facts: Mapping[str, Any]) -> str | None:
    """Workers that cost more time than they save; none among equal workers."""
    if not facts["uneven"]:
        return None
    found = drop_advice(members, count, exchange_of(len(members), facts["exchange_s"], bool(facts["servers"])))
    if found is None or found.gain <= max(MATTERS, SURE * max(member.speed.error for member in members)):
        return None
    if len(found.without) <= MOST_PARTS:
        return found.reason
    stay = len(members) - len(found.without)
    return (
        f"the fastest {stay} of {len(members)} workers alone would make {100 * found.gain:.0f} % more steps per second"
    )


def exchange_of(workers: int, seconds: float, servers: bool) -> Callable[[int], float]:
    """A model of an exchange's seconds by number of workers, if it takes `seconds` with `workers`.

    Among workers it scales with the bytes that each sends in a ring, 2 (n - 1) / n; with servers it stays constant.
    """
    if servers:
        return lambda n: seconds
    return lambda n: seconds * (1 - 1 / n) / (1 - 1 / workers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
