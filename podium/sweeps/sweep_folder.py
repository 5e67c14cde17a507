"""The folder of a sweep: a new one, or one in which an earlier session of the same sweep left its results."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from podium.errors import ConfigError, RecordError
from podium.records.journal import read_journal
from podium.records.manifest import read_manifest, write_manifest
from podium.records.nvml import Gpu, open_gpu
from podium.records.recorder import to_json
from podium.sweeps.queue import read_outcomes
from podium.sweeps.trial import Outcome

MAY_DIFFER = ("executor", "device")
"""Settings that may change when a sweep is resumed: they do not change what a trial is."""
MADE_FROM = {"source": "source file of the task", "data": "data set"}
"""The fingerprints (`fingerprint.py`), as messages name them."""


def open_folder(folder: Path, config: Mapping[str, Any], device: torch.device) -> None:
    """Write the manifest, or check that the folder's manifest is of the same sweep."""
    found = _manifest_of(folder)
    if (folder / "study.json").is_file():
        raise ConfigError(f"sweep: {folder} holds a study, and a sweep needs a folder of its own; give another folder")
    if found is None:
        if (folder / "trials.jsonl").is_file():
            raise ConfigError(f"sweep: {folder} holds trials without a whole manifest.json; take another folder")
        write_manifest(folder, dict(config), board=_gpu_facts(device))
        return
    wanted = json.loads(to_json(dict(config)))  # compared as JSON has them: a tuple written is a list read
    for name, value in wanted.items():
        if name not in MAY_DIFFER and found.get(name) != value:
            before, now = _apart(found.get(name), value)
            if name in MADE_FROM:
                raise ConfigError(
                    f"sweep: {folder} was begun with another {MADE_FROM[name]}, {before}; now it is {now}. Trials of "
                    "both cannot be ranked together: restore it, or give another folder"
                )
            raise ConfigError(
                f"sweep: {folder} holds another sweep, with {name} {before}; wanted {now}. Give another folder, or "
                "ask for the same sweep to resume it"
            )


def _manifest_of(folder: Path) -> Mapping[str, Any] | None:
    """The configuration of the sweep in this folder; None where there is no complete manifest yet."""
    if not (folder / "manifest.json").is_file():
        return None
    try:
        found: Mapping[str, Any] = read_manifest(folder)["config"]
    except RecordError:  # killed in the middle of writing it
        return None
    return found


def _apart(before: Any, now: Any) -> tuple[Any, Any]:
    """Both values as text; of two dicts only the entries that differ."""
    if not isinstance(before, dict) or not isinstance(now, dict):
        return repr(before), repr(now)
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    first, second = ({name: table[name] for name in names if name in table} for table in (before, now))
    return repr(first), repr(second)


def _gpu_facts(device: torch.device) -> dict[str, Any] | None:
    """The GPU's name, driver and power limit, without which results cannot be compared."""
    with gpu_of(device) as gpu:
        if gpu is None:
            return None
        return {"name": gpu.name, "driver": gpu.driver, "power_limit_w": gpu.power_limit_w}


@contextlib.contextmanager
def gpu_of(device: torch.device) -> Iterator[Gpu | None]:
    gpu = open_gpu(device.index or 0) if device.type == "cuda" else None
    if gpu is None:
        yield None
        return
    with gpu:
        yield gpu


def outcomes_before(folder: Path) -> list[Outcome]:
    """Outcomes of earlier sessions, with the options that the source gave: a rule may have changed them on the way."""
    asked = {row["number"]: row["options"] for row in read_journal(folder / "trials.jsonl")}
    found = read_outcomes(folder)
    return [
        dataclasses.replace(o, trial=dataclasses.replace(o.trial, options=asked.get(o.trial.number, o.trial.options)))
        for o in found
    ]
