"""The manifest: configuration, versions, hardware and commit of a run."""

from __future__ import annotations

import itertools
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from podium import __version__
from podium.errors import RecordError
from podium.records.disk import write_atomically
from podium.records.nvml import can_ask, open_gpus
from podium.records.recorder import to_json

_PACKAGES = ("torch", "numpy", "scikit-learn", "podium")
_MOST_GPUS = 64
_DRIVER = Path("/proc/driver/nvidia")


def write_manifest(run_dir: Path, config: dict[str, Any], **facts: Any) -> None:
    """Write `manifest.json`, before the first step, so that even a run that fails at once can be understood."""
    content = {
        "podium": __version__,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "config": config,
        "versions": versions(),
        "hardware": hardware(),
        "commit": git_commit(Path(__file__).parent),
        **facts,
    }
    write_atomically(run_dir / "manifest.json", json.dumps(json.loads(to_json(content)), indent=1) + "\n")


def read_manifest(run_dir: Path) -> dict[str, Any]:
    try:
        found = json.loads((run_dir / "manifest.json").read_text())
    except (OSError, ValueError) as error:
        raise RecordError(f"{run_dir}: no readable manifest.json: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("config", {}), dict):
        raise RecordError(f"{run_dir}: no readable manifest.json: it must be an object with a config")
    return found


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    """This machine; `gpus` only where there are any. Does not start CUDA."""
    gpus = _gpus()
    return {
        "machine": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        **({"gpus": gpus} if gpus else {}),
    }


def _gpus() -> list[str]:
    """The names of the GPUs that torch would see; without nvidia-ml-py, of all GPUs that the driver lists."""
    if can_ask():
        return [gpu.name or "a GPU" for gpu in itertools.islice(open_gpus(), _MOST_GPUS)]
    return [_model_in(path) for path in sorted(_DRIVER.glob("gpus/*/information"))]


def _model_in(path: Path) -> str:
    lines = path.read_text(errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("Model:")), "a GPU")


def git_commit(folder: Path) -> str | None:
    """The commit of the code, followed by `+` when files were changed; None outside a repository."""
    try:
        run = subprocess.run(
            ["git", "-C", str(folder), "describe", "--always", "--dirty=+", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip() or None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
