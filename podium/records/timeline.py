"""A timeline of the ranks from their records: spans of time that one rank spent on one activity, and marks.

A step's record has the step's length, computing time and waiting time, but not where in the step the waiting was. So
the parts are drawn one after another: computing, the rest (applying, packing, loading), and last exchanging and
waiting. Servers record when messages arrive, but not how long they take: they have no spans. Records of a user's own
script have no computing time; then all time that was not waiting counts as computing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from podium.records.recorder import Record

STEPS = 12
"""Steps of the fastest worker that a timeline shows."""
MOST_RANKS = 16
"""Workers that a timeline shows; of more, the fastest, those in the middle and the slowest."""
MOST_MARKS = 60
"""Marks that a timeline shows."""

KINDS = {
    "compute": "computing",
    "rest": "the rest of a step",
    "wait": "exchanging and waiting",
    "validate": "validating",
    "switch": "changing phase",
    "checkpoint": "writing a checkpoint",
    "regroup": "agreeing anew after a loss, a join or a leave",
}
"""Activities of a rank, as a legend names them."""

_LENGTHS: dict[str, tuple[str, ...]] = {
    "eval": ("eval_ns",),
    "checkpoint": ("took_ns",),
    "regroup": ("took_ns",),
    "switch": ("drain_ns", "home_ns", "hand_over_ns", "begin_ns"),
}
_NAMES = {"eval": "validate"}


class Span(NamedTuple):
    """A time span of one activity of one rank."""

    rank: int
    kind: str
    """A key of KINDS."""
    begin_ns: int
    end_ns: int
    record: Mapping[str, Any]
    """The record that it comes from."""


class Mark(NamedTuple):
    """An event at one time, of one rank or of all."""

    rank: int
    kind: str
    t_ns: int
    text: str


def spans(records: Iterable[Record]) -> list[Span]:
    """All spans in order of time; those of one rank never overlap, and empty ones are left out.

    Where a record's time overlaps the one before it (a rank retried after a loss), it begins where that one ended.
    """
    found: list[Span] = []
    until: dict[int, int] = {}
    for record in sorted(records, key=lambda record: int(record["t_ns"])):
        kind, rank, end = str(record["kind"]), int(record["rank"]), int(record["t_ns"])
        if kind == "step":
            length = record["step_ns"]
        elif kind in _LENGTHS:
            length = sum(record.get(name) or 0 for name in _LENGTHS[kind])
        else:
            continue
        begin = max(end - int(length), until.get(rank, end - int(length)))
        parts = _parts(record, end - begin) if kind == "step" else [(_NAMES.get(kind, kind), end - begin)]
        for name, took in parts:
            if took > 0:
                found.append(Span(rank, name, begin, begin + took, record))
            begin += took
        until[rank] = max(end, until.get(rank, end))
    return sorted(found, key=lambda span: (span.begin_ns, span.rank))


def _parts(step: Record, length: int) -> list[tuple[str, int]]:
    waited = int(step["wait_ns"])
    computed = min(int(step.get("pass_ns", max(0, length - waited))), length)
    waited = min(waited, length - computed)
    return [("compute", computed), ("rest", length - computed - waited), ("wait", waited)]


def marks(records: Iterable[Record]) -> list[Mark]:
    """Switches, losses, changes of the division and other events of a run, each once, in order of time."""
    found: dict[tuple[Any, ...], Mark] = {}
    for record in sorted(records, key=lambda record: (int(record["t_ns"]), int(record["rank"]))):
        told = _TOLD.get(record["kind"])
        if told is not None and (record["kind"] != "balance" or {"before", "after"} <= record.keys()):
            text = told(record)
            # All workers record a switch and a regroup; the first record is used.
            about = (record["kind"], record.get("step"), record.get("generation"), text)
            found.setdefault(about, Mark(record["rank"], record["kind"], int(record["t_ns"]), text))
    return list(found.values())


_TOLD: dict[str, Any] = {
    "switch": lambda r: f"{_brief(r['before'])} → {_brief(r['after'])}: {r['why']}",
    "balance": lambda r: f"{r.get('unit', 'samples')} by worker {_listed(r['before'])} → {_listed(r['after'])}",
    "lost": lambda r: f"rank {r['lost']} lost: {r['cause']}",
    "regroup": lambda r: f"{len(r['members'])} workers continue",
    "replaced": lambda r: f"server {r['server']} replaced",
    "scaled": lambda r: f"asked for {r['workers']} workers, {r['servers']} servers",
    "stop": lambda r: f"asked to stop: {r['reason']}",
    "failed": lambda r: f"rank {r.get('failed', r['rank'])} failed: {r['error']}",
}


def _brief(phase: str) -> str:
    """A phase without its rule and its options."""
    return phase.partition(" until ")[0].partition(":")[0]


def _listed(parts: Sequence[int]) -> str:
    return "/".join(map(str, parts)) if len(parts) <= 8 else f"{min(parts)} to {max(parts)}"


def timeline(records: Iterable[Record], steps: int = STEPS) -> dict[str, Any]:
    """A window of one run: the spans of each worker in some steps in the middle, and the marks of the whole run.

    Empty where no worker took a step. `window` is the window's place in the run (`begin_s`, `end_s` since the first
    worker began, `steps`: the first and the last, of worker `of`); `length_s` the whole run up to its last step or
    validation; `ranks`, for each worker shown, `spans` ([kind, begin, end] in ms since the window began) and `totals`
    (seconds of the whole run by kind). `workers` counts all workers; `shown` says which are shown. `marks`, the first
    `MOST_MARKS`, have `kind`, `seconds`, `rank` and `text`; `marks_left_out` counts the others.
    """
    rows = list(records)
    by_rank: dict[int, list[Record]] = {}
    for row in rows:
        if row["kind"] == "step":
            by_rank.setdefault(row["rank"], []).append(row)
    if not by_rank:
        return {}
    every = spans(rows)
    began = min([row["t_ns"] for row in rows if _is_start(row)] or [every[0].begin_ns])
    chosen, shown = _choose(by_rank)
    pace = min(by_rank, key=lambda rank: (median(row["step_ns"] for row in by_rank[rank]), rank))
    inside = _middle(by_rank[pace], steps)
    first_ns, last_ns = inside[0]["t_ns"] - inside[0]["step_ns"], inside[-1]["t_ns"]
    told = marks(rows)
    return {
        "began_ns": began,
        "length_s": _seconds(max(span.end_ns for span in every) - began),
        "window": {
            "begin_s": _seconds(first_ns - began),
            "end_s": _seconds(last_ns - began),
            "steps": [inside[0]["step"], inside[-1]["step"]],
            "of": pace,
        },
        "workers": len(by_rank),
        "shown": shown,
        "ranks": [
            _lane(rank, [span for span in every if span.rank == rank], first_ns, last_ns) for rank in sorted(chosen)
        ],
        "marks": [
            {"kind": mark.kind, "seconds": _seconds(mark.t_ns - began), "rank": mark.rank, "text": mark.text}
            for mark in told[:MOST_MARKS]
        ],
        "marks_left_out": max(0, len(told) - MOST_MARKS),
    }


def _is_start(row: Record) -> bool:
    return bool(row["kind"] == "begin" and row.get("role", "worker") == "worker")


def _choose(by_rank: Mapping[int, Sequence[Record]]) -> tuple[list[int], str]:
    """The workers to show: all, or the fastest, the middle and the slowest, by the computing time of a step."""
    if len(by_rank) <= MOST_RANKS:
        return list(by_rank), "all workers"
    lengths = {
        rank: [row["pass_ns"] if "pass_ns" in row else row["step_ns"] for row in by_rank[rank]] for rank in by_rank
    }
    pace = {rank: mean(some) for rank, some in lengths.items()}
    ordered = sorted(by_rank, key=lambda rank: (pace[rank], rank))
    ends = (MOST_RANKS - 4) // 2
    middle = len(ordered) // 2 - 2
    chosen = [*ordered[:ends], *ordered[middle : middle + 4], *ordered[-ends:]]
    return chosen, f"the {ends} fastest, 4 in the middle and the {ends} slowest of {len(by_rank)} workers"


def _middle(some: Sequence[Record], steps: int) -> Sequence[Record]:
    first = max(0, (len(some) - steps) // 2)
    return some[first : first + max(1, steps)]


def _lane(rank: int, own: Sequence[Span], first_ns: int, last_ns: int) -> dict[str, Any]:
    totals: dict[str, int] = {}
    drawn: list[list[Any]] = []
    for span in own:
        totals[span.kind] = totals.get(span.kind, 0) + span.end_ns - span.begin_ns
        begin, end = max(span.begin_ns, first_ns), min(span.end_ns, last_ns)
        if begin < end:
            drawn.append([span.kind, round((begin - first_ns) / 1e6, 6), round((end - first_ns) / 1e6, 6)])
    return {"rank": rank, "spans": drawn, "totals": {kind: totals[kind] / 1e9 for kind in KINDS if kind in totals}}


def _seconds(ns: int) -> float:
    return ns / 1e9
