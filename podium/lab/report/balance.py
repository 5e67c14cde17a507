"""Who did how much of the steps that workers share, over all seeds of a strategy, and what would be better.

What is here comes from `RunResult.balance`. Speeds are means over a run, without the part of a pass that does not
depend on its samples, so what another division would save is an upper bound.
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
"""What a change must promise to save of a step before the report advises it."""

SURE = 2.0
"""How many standard errors that must be beyond."""

UNLEARNT = (None, "equal", "fixed")
"""Balancers that do not look at speeds; None where records do not say which."""


class Part(NamedTuple):
    """One worker's part, means over the runs of a strategy."""

    rank: int
    samples_per_s: float
    """While it computes."""
    share: float
    """Of the last whole step."""
    wait_share: float


class Balanced(NamedTuple):
    """One strategy whose workers differ, or whose steps were divided unequally."""

    parts: tuple[Part, ...]
    changes: tuple[tuple[int, Mapping[str, Any]], ...]
    """Seed and what was changed."""
    advice: tuple[str, ...]
    """Of the first run."""
    seed: int
    """Of the first run, which the figure shows."""
    unit: str
    """What is divided: a step's `samples`, or a round's `steps`."""
    course: Mapping[str, Any] | None
    """None of rounds."""


def balanced_by_cell(rows: Iterable[Row]) -> dict[str, Balanced]:
    """The strategies whose workers differ: a table of equal workers says nothing."""
    done = [row for row in finished(rows) if is_told(row.get("balance") or {})]
    return {cell: _balanced([row for row in done if row["cell"] == cell]) for cell in cells(done)}


def is_told(facts: Mapping[str, Any]) -> bool:
    """Whether a run's balance is worth a word: workers differ, or parts do, or they were changed."""
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
"""A division among more workers than this is shown by its least and its most."""


def division(counts: Sequence[int]) -> str:
    """How many samples each worker has of a step: `32/16/8/8`."""
    if len(counts) <= MOST_PARTS:
        return "/".join(str(count) for count in counts)
    return f"{min(counts)} to {max(counts)}"


def advice(facts: Mapping[str, Any]) -> list[str]:
    """What would make the steps of a run shorter, a line each; of `RunResult.balance`. Empty where nothing would."""
    division = facts.get("division") or {}
    told = [worker for worker in facts.get("workers", ()) if str(worker["rank"]) in division]
    if facts.get("unit") != "samples" or len(told) < 2 or any(not worker["per_sample_s"] for worker in told):
        return []  # rounds have their own rule, and one that never had a part is not known
    members = [
        Member(worker["rank"], Speed(fixed_s=0.0, per_sample_s=worker["per_sample_s"], error=worker["error"]))
        for worker in told
    ]
    counts = [int(division[str(member.rank)]) for member in members]
    found = [_better_division(members, counts, facts), _fewer_workers(members, sum(counts), facts)]
    return [line for line in found if line is not None]


def _better_division(members: Sequence[Member], counts: Sequence[int], facts: Mapping[str, Any]) -> str | None:
    if facts["balancer"] not in UNLEARNT:
        return None  # it is at it already
    before_s, after_s = finish_s(counts, members), finish_s(EqualFinish().divide(sum(counts), members), members)
    saves = (before_s - after_s) / (before_s + facts["exchange_s"])
    last = max(range(len(counts)), key=lambda i: members[i].finish_s(counts[i]))
    if saves <= max(MATTERS, SURE * members[last].speed.error):
        return None
    fast = min(members, key=lambda member: member.speed.per_sample_s)
    slower = members[last].speed.per_sample_s / fast.speed.per_sample_s
    why = f"worker {members[last].rank} takes {slower:.1f} times as long for a sample as worker {fast.rank}"
    if slower < 1 + MATTERS:
        why = f"worker {members[last].rank} has more samples than its speed asks for"
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
        f"with {stay} of {len(members)} workers, the fastest, steps would be {100 * found.gain:.0f} % more per second"
    )


def exchange_of(workers: int, seconds: float, servers: bool) -> Callable[[int], float]:
    """What an exchange of n workers takes, if one of `workers` takes so long.

    Among workers by what a ring has each of them send, 2 (n - 1) / n; with servers it is taken to stay.
    """
    if servers:
        return lambda n: seconds
    return lambda n: seconds * (1 - 1 / n) / (1 - 1 / workers)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
