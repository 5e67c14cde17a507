"""What is written down: one line of `one-gpu.jsonl` per session, arm, choice of `auto` and sweep.

    session    the machine: device, driver, power limit, idle power, temperature, versions, commit, settings
    row        one arm in one cell: microseconds per model-step by round, start-up, what a window read
    auto       what `auto` would choose in a cell
    sweep      one whole sweep: makespan, best score, what a window read

A figure that is absent is null, and `absent` or `why` says why. Numbers have five digits: more than they are worth.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.lab.published.one_gpu.design import Design, Key
from podium.lab.study.store import Row, Store

READ = (
    "seconds",
    "power_w",
    "power_over_idle_w",
    "energy_is_short",
    "memory_bytes",
    "sm_util",
    "dram_bw_util",
    "temperature_after_c",
    "cpu_s",
)
"""Of a window's reading, what somebody looks at."""
_DIGITS = 5


def open_store(out: Path) -> Store:
    store = Store(out.parent)
    store.results = out
    return store


def numbered(rows: Iterable[Row]) -> list[Row]:
    """Rows with the number of their line, from 1, by which a page can point at them."""
    return [{**row, "line": number} for number, row in enumerate(rows, 1)]


def key_of(row: Mapping[str, Any]) -> Key:
    return Key(row["part"], row["task"], int(row["trials"]), row["precision"], row["arm"])


def done_keys(rows: Iterable[Mapping[str, Any]], *, again: bool = False) -> set[Key]:
    """What need not be measured; with `again`, what failed counts as missing."""
    return {key_of(row) for row in rows if row["kind"] != "session" and not (again and row["why"])}


def check_same(rows: Iterable[Mapping[str, Any]], design: Design, out: Path) -> None:
    """Refuse to mix measurements of two designs in one file."""
    for row in rows:
        if row["kind"] == "session" and row["settings"]:
            for name, value in design.settings.items():
                if row["settings"].get(name) != value:
                    raise ConfigError(
                        f"one_gpu: {out} holds measurements with {name} {row['settings'].get(name)!r}; wanted "
                        f"{value!r}. Give another --out"
                    )


def session_row(
    number: int,
    design: Design,
    *,
    device: Mapping[str, Any],
    versions: Mapping[str, str],
    hardware: Mapping[str, Any],
    commit: str | None,
) -> Row:
    return {
        "kind": "session", "session": number, "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "size": "small" if design.size == "small" else "gpu", "device": rounded(device), "versions": dict(versions),
        "hardware": dict(hardware), "commit": commit, "settings": design.settings,
    }  # fmt: skip


def timed_row(session: int, key: Key, row: Mapping[str, Any], *, steps_per_trial: int | None, took_s: float) -> Row:
    """From a row of `podium bench sweep`."""
    return {
        "kind": "row", "session": session, **key._asdict(), "us": row["us_per_model_step"],
        "rounds_us": row["rounds_us"], "width": row["width"], "start_s": row["start_s"],
        "steps_per_trial": steps_per_trial, "j": row["joules_per_trial"],
        "j_over_idle": row["joules_per_trial_over_idle"], "reading": read(row["reading"]), "why": row["why_absent"],
        "took_s": took_s,
    }  # fmt: skip


def failed_row(session: int, key: Key, why: str, took_s: float) -> Row:
    kind = (
        "auto" if key.arm == "auto" and key.part == "times" else "row" if key.part in ("times", "energy") else "sweep"
    )
    return {"kind": kind, "session": session, **key._asdict(), "why": why, "took_s": took_s}


def read(reading: Mapping[str, Any] | None) -> Row:
    """A reading without what nobody looks at."""
    if not reading:
        return {}
    absent = {name: why for name, why in reading["absent"].items() if name in READ}
    kept = {name: reading[name] for name in READ if reading.get(name) is not None}
    return {**kept, "absent": absent} if absent else kept


def from_bench(document: Mapping[str, Any], session: int) -> list[Row]:
    """Records of a document of `podium bench sweep --json`; what only repeats another measurement is left out."""
    facts = {name: document.get(name) for name in ("device", "versions", "hardware")}
    rows: list[Row] = [{"kind": "session", "session": session, "at": None, "size": "gpu", **facts, "commit": None}]
    rows[0]["settings"] = {}
    for row in document["rows"]:
        if not row["same_as"]:
            part = "energy" if row["joules_per_trial"] is not None else "times"
            key = Key(part, row["task"], row["trials"], row["precision"], row["executor"])
            rows.append(timed_row(session, key, row, steps_per_trial=None, took_s=0.0))
    for cell in document["cells"]:
        key = Key("times", cell["task"], cell["trials"], cell["precision"], "auto")
        rows.append(auto_row(session, key, cell, took_s=cell["calibration_s"]))
    return [rounded(row) for row in rows]


def auto_row(session: int, key: Key, choice: Mapping[str, Any], *, took_s: float) -> Row:
    return {
        "kind": "auto", "session": session, **key._asdict(), "chosen": choice["auto"], "chosen_arm": choice["auto_arm"],
        "said": choice["why"], "calibration_s": choice["calibration_s"], "why": "", "took_s": took_s,
    }  # fmt: skip


def rounded(value: Any) -> Any:
    """The same with floats to five digits."""
    if isinstance(value, float):
        return float(f"{value:.{_DIGITS}g}")
    if isinstance(value, Mapping):
        return {name: rounded(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [rounded(one) for one in value]
    return value


def told(row: Mapping[str, Any]) -> str:
    """One record on one line of a terminal."""
    name = f"{row['part']}: {row['task']}, {row['trials']} trials, {row['precision']}, {row['arm']}"
    took = f"took {row['took_s']:.1f} s"
    if row["why"]:
        return f"{name}: absent: {row['why']}; {took}"
    if row["kind"] == "row":
        return f"{name}: {row['us']:.4g} µs per model-step, {took}"
    if row["kind"] == "auto":
        return f"{name}: {row['chosen']}, {took}"
    return f"{name}: {row['seconds']:.3g} s, best {row['best']['mean']:.4g}, {took}"
