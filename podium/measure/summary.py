"""What a run came to, worked out from its records alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from podium.measure.audit import audit
from podium.measure.balance import balance
from podium.measure.phases import other_rules, switches
from podium.measure.records import Record
from podium.measure.staleness import dropped, histogram, later, restored


def summarise(records: Iterable[Record]) -> dict[str, Any]:
    """The measured fields of a RunResult."""
    rows = list(records)
    by_kind: dict[str, list[Record]] = {}
    for row in rows:
        by_kind.setdefault(row["kind"], []).append(row)
    steps, evals = by_kind.get("step", []), by_kind.get("eval", [])
    ends = [row for row in by_kind.get("end", []) if "param_hash" in row]
    begins = [row for row in by_kind.get("begin", []) if row["role"] == "worker"]
    is_async = "update" in by_kind
    began = min((row["t_ns"] for row in begins), default=0)
    history = _history(evals, began, is_async)
    samples = max((row["position"] for row in ends), default=0) - min((row["position"] for row in begins), default=0)
    seconds = _seconds(steps, evals, began, is_async)
    switched = switches(rows, began)
    step_ns = np.array([row["step_ns"] for row in steps] or [0])
    last = evals[-1] if evals else {}
    updates = by_kind.get("update", [])
    return {
        "metrics": last.get("metrics", {}),
        "loss": last.get("loss", float("nan")),
        "param_hash": {str(row["rank"]): row["param_hash"] for row in ends},
        "steps": last.get("step", 0),  # a run ends with a validation, so this is where it stands
        "updates": _updates(updates),
        "samples": samples,
        "epochs": last.get("epoch", 0.0),
        "seconds": seconds,
        "samples_per_s": samples / seconds if seconds > 0 else 0.0,
        "sent_bytes": _sent_bytes(steps, by_kind.get("end", [])),
        "step_ms": {"p50": float(np.median(step_ns)) / 1e6, "p90": float(np.quantile(step_ns, 0.9)) / 1e6},
        "wait_share": float(sum(row["wait_ns"] for row in steps)) / max(1.0, float(step_ns.sum())),
        "staleness": staleness(updates),
        "histogram": [list(bin) for bin in histogram(row["staleness"] for row in later(updates))],
        "dropped": sum(dropped(by_kind.get("dropped", [])).values()),
        "codec_choice": _codec_choice(by_kind.get("codec", []), by_kind.get("codec_check", [])),
        "history": history,
        "lost": sorted({row["lost"] for row in by_kind.get("lost", [])}),
        "restored": restored(rows),
        "audit": {} if (found := audit(rows)) is None else found._asdict(),
        "switches": switched,
        "rules": other_rules(rows, began),
        "balance": balance(rows, began),
    }


def _codec_choice(choices: Sequence[Record], checks: Sequence[Record]) -> dict[str, Any]:
    """What the workers last decided about packing, and what they later made of it; all decide alike."""
    if not choices:
        return {}
    last = max(choices, key=lambda row: row["t_ns"])
    found: dict[str, Any] = {name: last[name] for name in ("why", "chosen", "predicted_ms") if name in last}
    later = [row for row in checks if row["t_ns"] >= last["t_ns"]]
    if later:
        found["check"] = {name: later[0][name] for name in ("measured_ms", "predicted_ms", "dense_ms", "keeps")}
    return found


def _updates(rows: Sequence[Record]) -> int:
    """Updates of the first server's first range; one that several pushes made has a record for each of them."""
    first = [row for row in rows if row["rank"] == rows[0]["rank"] and row.get("range", 0) == 0]
    made: float = sum(1 / row.get("pushes", 1) for row in first)
    return round(made)


def staleness(updates: Sequence[Record]) -> dict[str, float]:
    """Mean, largest and number over updates; a worker's first push of a stretch is left out: all began it alike."""
    values = [row["staleness"] for row in later(updates)]
    if not values:
        return {}
    return {"mean": float(np.mean(values)), "max": float(max(values)), "count": float(len(values))}


def _sent_bytes(steps: Sequence[Record], ends: Sequence[Record]) -> int:
    """By all ranks together: what each said at its end, or in its steps where it was lost before."""
    sent: dict[int, int] = {row["rank"]: row["sent"] for row in ends}
    of_lost: list[int] = [row["sent"] for row in steps if row["rank"] not in sent]
    return sum(sent.values()) + sum(of_lost)


def _seconds(steps: Sequence[Record], evals: Sequence[Record], began: int, is_async: bool) -> float:
    """From the first worker's start to the last step.

    Validation is left out where all wait for it. In asynchronous training the others go on meanwhile, so its time
    counts.
    """
    if not steps:
        return 0.0
    last = max(row["t_ns"] for row in steps)
    validating = sum(row["eval_ns"] for row in evals if row["t_ns"] <= last and row.get("waited", not is_async))
    return float(last - began - validating) / 1e9


def _history(evals: Sequence[Record], began: int, is_async: bool) -> list[Mapping[str, Any]]:
    """One row per position: a validation is done again where the worker that did it was lost over it."""
    history: dict[int, Mapping[str, Any]] = {}
    validating = 0
    for row in evals:
        validating += row["eval_ns"] if row.get("waited", not is_async) else 0
        history[row["position"]] = {
            "step": row["step"],
            "epoch": row["epoch"],
            "samples": row["position"],
            "seconds": (row["t_ns"] - began - validating) / 1e9,
            "loss": row["loss"],
            **row["metrics"],
        }
    return list(history.values())
