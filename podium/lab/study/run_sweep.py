"""A cell that is a whole sweep: `podium.sweep` with the cell's settings, in its own process.

A new process with empty caches of compiled kernels keeps an executor from reusing a context or kernel of an earlier
sweep: the makespan is that of a first sweep. The process is `python -m podium.lab.study.run_sweep FOLDER PARENT`. It
reads `request.json` and writes `found.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from threading import Event, Thread
from typing import TYPE_CHECKING, Any

from podium.errors import PodiumError, TrainingError, UnknownName
from podium.records.disk import write_atomically
from podium.records.recorder import to_json

if TYPE_CHECKING:
    from podium.lab.study.store import Row

_TAIL = 300
"""Characters of a failed process's last output in the error message."""
_GRACE_S = 15.0
"""How long a terminated sweep may take to stop what it has started: an MPS daemon, Ray."""
_POLL_S = 0.1


def sweep_arguments(settings: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A cell's settings as arguments of `podium.sweep`; `task.lr` becomes an entry of `options`."""
    import inspect

    from podium.sweeps.api import sweep

    known = set(inspect.signature(sweep).parameters) - {"out", "on_event", "stop", "seed"}
    found: dict[str, Any] = {"keep": "none", "seed": seed}
    options = dict(settings.get("options") or {})
    for name, value in settings.items():
        field = name.replace("-", "_")
        if name.startswith("task."):
            options[name.removeprefix("task.")] = value
        elif field in known:
            found[field] = value
        elif field != "workers":  # for trainings; a sweep's executor chooses its own
            raise UnknownName("setting of a sweep", name, sorted(known))
    return {**found, **({"options": options} if options else {})}


def run_sweep(settings: Mapping[str, Any], seed: int, folder: Path, stop: Event) -> Row:
    """Run one sweep and return its row; setting `stop` ends it early."""
    asked = sweep_arguments(settings, seed)
    write_atomically(folder / "request.json", to_json(asked))
    caches = {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TRITON_CACHE_DIR": f"{folder}/triton"}
    command = [sys.executable, "-m", "podium.lab.study.run_sweep", str(folder), str(os.getpid())]
    with (folder / "said.txt").open("wb") as said:
        env = {**os.environ, **caches}
        child = subprocess.Popen(command, env=env, stdout=said, stderr=said, start_new_session=True)
        try:
            while child.poll() is None and not stop.is_set():
                time.sleep(_POLL_S)
        finally:
            _end(child)
    if stop.is_set():
        return {"status": "stopped"}
    if child.returncode:
        text = (folder / "said.txt").read_text(encoding="utf-8", errors="replace").strip()
        raise TrainingError(f"exit status {child.returncode}: {text[-_TAIL:]}")
    found: Row = json.loads((folder / "found.json").read_text(encoding="utf-8"))
    return found


def _end(child: subprocess.Popen[bytes]) -> None:
    """Terminate the sweep, let it clean up, then kill its process group."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def sweep_numbers(asked: Mapping[str, Any], folder: Path, stop: Event | None = None) -> Row:
    """Train a sweep and return its row: makespan, best score, trials by status, readings of the device's counters."""
    from podium.sweeps.api import sweep

    done = sweep(**asked, out=folder, stop=stop)
    best = done.best
    return {
        "status": "finished" if best is not None else "failed", "error": None if best else "no trial finished",
        "seconds": done.seconds, "metrics": {} if best is None else {done.metric: best.mean},
        "executor": str(asked.get("executor", "auto")), "trials": len(done.outcomes),
        "trials_per_s": done.trials_per_s, "samples_per_s": done.samples_per_s,
        "trials_ended": dict(Counter(outcome.status for outcome in done.outcomes)),
        "best": None if best is None else {
            "name": best.name, "mean": best.mean, "low": best.low, "high": best.high, "n": best.n,
        },
        "chosen": [choice["executor"] for choice in done.choices],
        "not_fused": [probe["why"] for probe in done.probes if not probe["fuses"]], "reading": done.reading or {},
    }  # fmt: skip


def main(folder: Path, parent: int) -> None:
    """The main function of the sweep's process, which ends when its parent ends."""
    from podium.launch.ending import termination_unwinds

    stop = Event()
    Thread(target=_watch, args=(parent, stop), daemon=True).start()
    asked = json.loads((folder / "request.json").read_text(encoding="utf-8"))
    try:
        with termination_unwinds():
            found = sweep_numbers(asked, folder / "sweep", stop)
    except PodiumError as error:
        found = {"status": "failed", "error": f"{type(error).__name__}: {error}"}
    write_atomically(folder / "found.json", to_json(found))


def _watch(parent: int, stop: Event) -> None:
    """Stop the sweep when its parent has ended: it would slow down the runs of the next study."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    stop.set()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
