"""A run as a trace that chrome://tracing and Perfetto (ui.perfetto.dev) read: the Trace Event Format, as JSON.

Each rank is a process with one thread, its worker or server; the launcher is process 0. `X` events are the workers'
spans (see `timeline.py` for the parts of a step), `C` events are the loss of each worker and the staleness of each
worker's updates, `i` events are switches, losses, checkpoints, validations and changes of the division. Times are
microseconds since the run began, on the run's own clock; `otherData.clock` is `wall` or `virtual`.

https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import ConfigError
from podium.records.disk import write_atomically
from podium.records.manifest import read_manifest
from podium.records.recorder import (
    LIST,
    NUMBER,
    OBJECT,
    TEXT,
    WHOLE,
    Fields,
    Record,
    check_fields,
    read_records,
    to_json,
)
from podium.records.timeline import KINDS, Span, marks, spans

MOST_EVENTS = 250_000
"""A trace ends after the last complete step below this, unless its steps were chosen: some 40 MB."""
PER_STEP = 5
"""Events of one worker's step at most, with one server; to estimate the size."""

Event = dict[str, Any]


class Steps(NamedTuple):
    """The steps in a trace, by each worker's own count: from `first` up to, and without, `end`."""

    first: int = 1
    end: int | None = None


def parse_steps(text: str) -> Steps:
    """`A:B`: from step A up to, and without, B; either may be left out."""
    first, colon, end = text.partition(":")
    try:
        steps = Steps(int(first) if first.strip() else 1, int(end) if end.strip() else None)
    except ValueError:
        colon = ""
    if not colon or steps.first < 1 or (steps.end is not None and steps.end <= steps.first):
        raise ConfigError(f"trace: steps must be A:B with 1 <= A < B, either of which may be left out, got {text!r}")
    return steps


def write_trace(run_dir: str | Path, out: str | Path | None = None, steps: Steps | None = None) -> Path:
    """Write a run's trace, completely or not at all, to `out`, by default `trace.json` in the run's folder."""
    run_dir = Path(run_dir)
    target = Path(out) if out is not None else run_dir / "trace.json"
    trace = make_trace(RunRecords(run_dir), read_manifest(run_dir), steps)
    events = ",\n".join(to_json(event) for event in trace.pop("traceEvents"))
    # An event per line: a large file stays readable.
    write_atomically(target, f'{to_json(trace)[:-1]},"traceEvents":[\n{events}\n]}}\n')
    return target


def read_trace(path: str | Path) -> dict[str, Any]:
    return json.loads(Path(path).read_text(encoding="utf-8"))  # type: ignore[no-any-return]  # as written


def make_trace(records: Iterable[Record], manifest: Mapping[str, Any], steps: Steps | None = None) -> dict[str, Any]:
    """The trace as one JSON object: `traceEvents`, and in `otherData` facts about the run and the steps shown.

    `records` is iterated several times; only the records that the trace shows are kept in memory.
    """
    seen = _Overview.of(records)
    kept = _within(records, steps or seen.bounded(), seen)
    config = manifest.get("config") or {}
    here = [row["step"] for row in kept if row["kind"] == "step"]
    said = {
        "clock": "virtual" if config.get("launcher") == "virtual" else "wall",
        "task": config.get("task"),
        "strategy": manifest.get("strategy"),
        "workers": config.get("workers"),
        "seed": config.get("seed"),
        "steps": [min(here), max(here)] if here else [],
        "steps_of_the_run": max(seen.by_step, default=0),
        "order_inside_a_step": "not recorded: computing, the rest, waiting are drawn one after another",
    }
    events = [*_named(seen.roles), *_done(spans(kept)), *_counted(kept), *_happened(kept)]
    return {"displayTimeUnit": "ms", "otherData": said, "traceEvents": events}


_DRAWN: Fields = {
    "step": dict.fromkeys(("step", "step_ns", "wait_ns"), WHOLE),
    "update": dict.fromkeys(("worker", "staleness"), WHOLE),
    "eval": {"step": WHOLE, "epoch": NUMBER, "loss": NUMBER, "metrics": OBJECT},
    "checkpoint": {"path": TEXT, "step": WHOLE},
    "switch": dict.fromkeys(("before", "after", "why"), TEXT),
    "balance": {"before?": LIST, "after?": LIST},
    "lost": {"lost": WHOLE, "cause": TEXT},
    "regroup": {"members": LIST},
    "replaced": {"server": WHOLE},
    "scaled": dict.fromkeys(("workers", "servers"), (int, type(None))),
    "stop": {"reason": TEXT},
    "failed": {"error": TEXT},
}
"""The fields that a trace needs."""


class RunRecords:
    """A run's records, read from disk again at every iteration."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir

    def __iter__(self) -> Iterator[Record]:
        return read_records(self._run_dir)


class _Overview(NamedTuple):
    """Facts about all records, needed before some of them are chosen."""

    by_step: Counter[int]
    """How many workers recorded each step."""
    updates: int
    roles: dict[int, str]

    @classmethod
    def of(cls, records: Iterable[Record]) -> _Overview:
        by_step: Counter[int] = Counter()
        roles: dict[int, str] = {}
        updates = 0
        for row in records:
            check_fields(row, _DRAWN)
            roles.setdefault(row["rank"], "worker")
            if row["kind"] == "step":
                by_step[row["step"]] += 1
            elif row["kind"] == "begin" and "role" in row:
                roles[row["rank"]] = row["role"]
            updates += row["kind"] == "update"
        return cls(by_step, updates, dict(sorted(roles.items())))

    def bounded(self) -> Steps:
        """The first steps, as many as stay below `MOST_EVENTS`."""
        each = PER_STEP + self.updates / max(1, self.by_step.total())
        events = 0.0
        for step in sorted(self.by_step):
            events += each * self.by_step[step]
            if events > MOST_EVENTS:
                return Steps(1, max(2, step))
        return Steps()


def _within(records: Iterable[Record], steps: Steps, seen: _Overview) -> list[Record]:
    """These steps, and all other records during them."""
    if steps == Steps():
        return list(records)
    chosen = [row for row in records if row["kind"] == "step" and _is_in(row["step"], steps)]
    if not chosen:
        asked = f"{steps.first}:{'' if steps.end is None else steps.end}"
        last = max(seen.by_step, default=0)
        raise ConfigError(f"trace: steps must be some of the run's, which are 1 to {last}, got {asked}")
    begin, end = min(row["t_ns"] - row["step_ns"] for row in chosen), max(row["t_ns"] for row in chosen)
    others = [row for row in records if row["kind"] != "step" and begin <= row["t_ns"] <= end]
    return sorted([*chosen, *others], key=lambda row: (row["t_ns"], row["rank"]))


def _is_in(step: int, steps: Steps) -> bool:
    return step >= steps.first and (steps.end is None or step < steps.end)


def _process(rank: int) -> dict[str, int]:
    """The launcher, whose rank is -1, is process 0."""
    return {"pid": rank + 1, "tid": 0}


def _us(ns: int) -> float:
    """Microseconds with nanosecond resolution."""
    return round(ns / 1000, 3)


def _named(roles: Mapping[int, str]) -> Iterator[Event]:
    for rank, role in roles.items():
        place = _process(rank)
        name, thread = ("launcher", "launcher") if rank < 0 else (f"rank {rank}", role)
        yield {"ph": "M", "name": "process_name", **place, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", **place, "args": {"sort_index": place["pid"]}}
        yield {"ph": "M", "name": "thread_name", **place, "args": {"name": thread}}


_TOLD = ("step", "position", "samples", "loss", "sent", "received", "path", "rule", "why", "generation")
"""Fields of a record that a span shows when it is clicked."""


def _done(found: Sequence[Span]) -> Iterator[Event]:
    for span in found:
        times = {"ts": _us(span.begin_ns), "dur": _us(span.end_ns - span.begin_ns)}
        args = {name: span.record[name] for name in _TOLD if span.record.get(name) is not None}
        yield {"ph": "X", "name": KINDS[span.kind], "cat": span.kind, **times, **_process(span.rank), "args": args}


def _counted(records: Sequence[Record]) -> Iterator[Event]:
    for row in records:
        if row["kind"] == "step" and isinstance(row.get("loss"), int | float):
            yield _counter("loss", row, row["loss"])
        elif row["kind"] == "update":
            yield _counter(f"staleness of worker {row['worker']}, range {row.get('range', 0)}", row, row["staleness"])


def _counter(name: str, row: Record, value: float) -> Event:
    return {"ph": "C", "name": name, "ts": _us(row["t_ns"]), **_process(row["rank"]), "args": {"value": value}}


def _happened(records: Sequence[Record]) -> Iterator[Event]:
    for mark in marks(records):
        yield _instant(mark.kind, mark.t_ns, mark.rank, "g", {"what": mark.text})
    for row in records:
        if row["kind"] == "checkpoint":
            yield _instant("checkpoint", row["t_ns"], row["rank"], "p", {"path": row["path"], "step": row["step"]})
        elif row["kind"] == "eval":
            args = {"step": row["step"], "epoch": row["epoch"], "loss": row["loss"], **row["metrics"]}
            yield _instant("validation", row["t_ns"], row["rank"], "p", args)


def _instant(name: str, t_ns: int, rank: int, scope: str, args: Mapping[str, Any]) -> Event:
    """`scope`: g draws a line through all processes, p through one."""
    return {"ph": "i", "name": name, "ts": _us(t_ns), "s": scope, **_process(rank), "args": dict(args)}
