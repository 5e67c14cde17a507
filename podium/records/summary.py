"""The result of a run, computed from its records alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.records.audit import Auditor
from podium.records.balance import Balance
from podium.records.phases import COST, PhaseRows, other_rules, switches
from podium.records.recorder import (
    LIST,
    MAYBE,
    NUMBER,
    OBJECT,
    TEXT,
    TRUTH,
    WHOLE,
    Fields,
    Record,
    check_fields,
    number,
    require,
)
from podium.records.staleness import Dropped, binned, restored
from podium.records.tables import Column


def summarise(records: Iterable[Record], scratch: Path | None = None) -> dict[str, Any]:
    """The measured fields of a RunResult. `scratch`: a folder for temporary files, for runs with many records."""
    summary = Summary(scratch)
    for row in records:
        summary.add(row)
    return summary.result()


_RARE = ("begin", "end", "eval", "codec", "codec_check", "lost", "restored", "lost_updates", "replaced")
_SUMMED: Fields = {
    "begin": {"role": TEXT},
    "end": {"sent": WHOLE},
    "step": {
        **dict.fromkeys(("step_ns", "wait_ns", "sent"), WHOLE),
        **dict.fromkeys(("first?", "step?", "position?"), WHOLE),
    },
    "eval": {
        **dict.fromkeys(("step", "position", "eval_ns"), WHOLE),
        "epoch": NUMBER,
        "loss": NUMBER,
        "metrics": OBJECT,
    },
    "update": {
        **{"staleness": WHOLE, "first": TRUTH},
        **dict.fromkeys(("range?", "pushes?", "worker?", "lease?", "samples?"), WHOLE),
    },
    "dropped": {"worker": WHOLE, "lease": WHOLE},
    "lost": {"lost": WHOLE},
    "restored": {"source": TEXT, "updates?": WHOLE, "recorded?": LIST},
    "replaced": {"server": WHOLE, "took_ns": WHOLE},
    "lost_updates": {"updates": WHOLE},
    "trigger": {
        **dict.fromkeys(("in_force", "fires"), TRUTH),
        **dict.fromkeys(("phase", "step", "position"), WHOLE),
        **{"rule": TEXT, "epoch": NUMBER, "value": MAYBE, "threshold": MAYBE},
    },
    "switch": {
        **dict.fromkeys(("before", "after", "rule", "why"), TEXT),
        **dict.fromkeys(("step", "position", *(f"{part}_ns" for part in COST)), WHOLE),
        **{"epoch": NUMBER, "value": MAYBE},
    },
    "codec_check": {**dict.fromkeys(("measured_ms", "predicted_ms", "dense_ms"), NUMBER), "keeps": TRUTH},
    "balance": {"before?": LIST, "after?": LIST, "ranks?": LIST, "step?": WHOLE, "predicted_s?": (dict, type(None))},
}


class Summary:
    """Takes a run's records one after another, in order of time, and computes the run's result.

    Its memory does not grow with steps and updates; it does with validations, switches, losses and dropped pushes.
    """

    def __init__(self, scratch: Path | None = None) -> None:
        """`scratch`: a folder for temporary files, for runs with many records; the system's own when not given."""
        self._rare: dict[str, list[Record]] = {kind: [] for kind in _RARE}
        self._restored: list[Record] = []
        self._step_ns = Column(scratch)
        self._waited_ns = self._last_step = 0
        self._sent_in_steps: Counter[int] = Counter()
        self._updates = _Updates()
        self._dropped = Dropped()
        self._phases = PhaseRows()
        self._audit = Auditor(scratch)
        self._balance = Balance(scratch)

    def add(self, row: Record) -> None:
        kind = row["kind"]
        check_fields(row, _SUMMED)
        if kind == "step":
            self._add_step(row)
        elif kind == "update":
            self._updates.add(row)
        elif kind in self._rare:
            self._rare[kind].append(row)
        if kind in ("restored", "lost_updates", "replaced"):
            self._restored.append(row)
        self._dropped.add(row)
        self._phases.add(row)
        self._audit.add(row)
        self._balance.add(row)

    def _add_step(self, row: Record) -> None:
        self._last_step = row["t_ns"] if not self._step_ns else max(self._last_step, row["t_ns"])
        self._step_ns.append(row["step_ns"])
        self._waited_ns += row["wait_ns"]
        self._sent_in_steps[row["rank"]] += row["sent"]

    @property
    def ended(self) -> set[int]:
        """The ranks with an `end` record."""
        return {row["rank"] for row in self._rare["end"]}

    def result(self) -> dict[str, Any]:
        evals = self._rare["eval"]
        ends = [row for row in self._rare["end"] if "param_hash" in row]
        begins = [row for row in self._rare["begin"] if row["role"] == "worker"]
        for row in (*ends, *begins):
            require(row, "position")
        is_async = self._updates.seen
        began = min((row["t_ns"] for row in begins), default=0)
        first = min((row["position"] for row in begins), default=0)
        samples = max((row["position"] for row in ends), default=0) - first
        seconds = self._seconds(evals, began, is_async)
        last = evals[-1] if evals else {}
        phases, audited = self._phases.rows, self._audit.result()
        return {
            "metrics": {name: number(value) for name, value in last.get("metrics", {}).items()},
            "loss": number(last.get("loss", "nan")),
            "param_hash": {str(row["rank"]): row["param_hash"] for row in ends},
            "steps": last.get("step", 0),  # a run ends with a validation
            "updates": self._updates.made,
            "samples": samples,
            "epochs": last.get("epoch", 0.0),
            "seconds": seconds,
            "samples_per_s": samples / seconds if seconds > 0 else 0.0,
            "sent_bytes": self._sent_bytes(),
            "step_ms": {"p50": self._step_ns.median() / 1e6, "p90": self._step_ns.quantile(0.9) / 1e6},
            "wait_share": float(self._waited_ns) / max(1.0, float(self._step_ns.total)),
            "staleness": self._updates.staleness,
            "histogram": [list(bin) for bin in binned(self._updates.counts)],
            "dropped": sum(self._dropped.by_worker().values()),
            "codec_choice": _codec_choice(self._rare["codec"], self._rare["codec_check"]),
            "history": _history(evals, began, is_async),
            "lost": sorted({row["lost"] for row in self._rare["lost"]}),
            "restored": restored(self._restored),
            "audit": {} if audited is None else audited._asdict(),
            "switches": switches(phases, began),
            "rules": other_rules(phases, began),
            "balance": self._balance.result(began),
        }

    def _sent_bytes(self) -> int:
        """By all ranks together: from each rank's `end` record, or from its steps if it was lost before."""
        sent: dict[int, int] = {row["rank"]: row["sent"] for row in self._rare["end"]}
        return sum(sent.values()) + sum(count for rank, count in self._sent_in_steps.items() if rank not in sent)

    def _seconds(self, evals: Sequence[Record], began: int, is_async: bool) -> float:
        """From the first worker's start to the last step.

        Validation is left out where all workers wait for it. In asynchronous training the other workers continue
        meanwhile, so its time counts.
        """
        if not self._step_ns:
            return 0.0
        last = self._last_step
        validating = sum(row["eval_ns"] for row in evals if row["t_ns"] <= last and row.get("waited", not is_async))
        return float(last - began - validating) / 1e9


class _Updates:
    """Counts of the servers' updates."""

    def __init__(self) -> None:
        self.seen = False
        self.counts: Counter[int] = Counter()
        """How often each staleness occurred, without each worker's first push of a segment, which is always fresh."""
        self._server = 0
        self._made = 0.0

    def add(self, row: Record) -> None:
        if not self.seen:
            self.seen, self._server = True, row["rank"]
        if row["rank"] == self._server and row.get("range", 0) == 0:
            self._made += 1 / row.get("pushes", 1)
        if not row["first"]:
            self.counts[row["staleness"]] += 1

    @property
    def made(self) -> int:
        """Updates of the first server's first range; one that several pushes made has a record for each of them."""
        return round(self._made)

    @property
    def staleness(self) -> dict[str, float]:
        """Mean, largest and number."""
        count = self.counts.total()
        if not count:
            return {}
        total = sum(value * times for value, times in self.counts.items())
        return {"mean": float(total / count), "max": float(max(self.counts)), "count": float(count)}


def _codec_choice(choices: Sequence[Record], checks: Sequence[Record]) -> dict[str, Any]:
    """The workers' last choice of codecs, and its later check; all workers choose alike."""
    if not choices:
        return {}
    last = max(choices, key=lambda row: row["t_ns"])
    found: dict[str, Any] = {name: last[name] for name in ("why", "chosen", "predicted_ms") if name in last}
    later = [row for row in checks if row["t_ns"] >= last["t_ns"]]
    if later:
        found["check"] = {name: later[0][name] for name in ("measured_ms", "predicted_ms", "dense_ms", "keeps")}
    return found


def staleness(updates: Iterable[Record]) -> dict[str, float]:
    """Mean, largest and number over updates, without each worker's first push of a segment."""
    found = _Updates()
    for row in updates:
        found.add(row)
    return found.staleness


def _history(evals: Sequence[Record], began: int, is_async: bool) -> list[Mapping[str, Any]]:
    """One row per position: a validation is repeated where the worker that did it was lost."""
    history: dict[int, Mapping[str, Any]] = {}
    validating = 0
    for row in evals:
        validating += row["eval_ns"] if row.get("waited", not is_async) else 0
        history[row["position"]] = {
            "step": row["step"],
            "epoch": row["epoch"],
            "samples": row["position"],
            "seconds": (row["t_ns"] - began - validating) / 1e9,
            "loss": number(row["loss"]),
            **{name: number(value) for name, value in row["metrics"].items()},
        }
    return list(history.values())
