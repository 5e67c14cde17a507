"""One sweep in a process of its own, so that no arm finds a context, a kernel or a cache that another one left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from podium.errors import PodiumError
from podium.lab.published.one_gpu.design import Key
from podium.lab.published.one_gpu.rows import read
from podium.lab.study.store import Row
from podium.launch.ending import termination_unwinds

_TAIL = 300
"""Characters of what a process that failed said last."""
_GRACE_S = 15.0
_POLL_S = 0.5


def sweep_row(session: int, key: Key, asked: Mapping[str, Any], *, deadline_s: float) -> Row:
    """Run it, with empty caches of compiled kernels: a first sweep of this model. What fails is a row that says why."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="podium-one-gpu-", ignore_cleanup_errors=True) as scratch:
        folder = Path(scratch)
        (folder / "asked.json").write_text(json.dumps(dict(asked)), encoding="utf-8")
        caches = {"TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor", "TRITON_CACHE_DIR": f"{scratch}/triton"}
        why = _run(folder, {**os.environ, **caches}, deadline_s)
        found = {} if why else json.loads((folder / "found.json").read_text(encoding="utf-8"))
    took = time.perf_counter() - began
    row = {"kind": "sweep", "session": session, **key._asdict(), "executor": asked["executor"], **found}
    return {**row, "why": why or found.get("why", ""), "took_s": took}


def _run(folder: Path, env: Mapping[str, str], deadline_s: float) -> str:
    """Empty when it came to its end, else why not."""
    command = [sys.executable, "-m", "podium.lab.published.one_gpu", str(folder)]
    with (folder / "said.txt").open("wb") as said:
        child = subprocess.Popen(command, env=dict(env), stdout=said, stderr=said, start_new_session=True)
        try:
            code = child.wait(deadline_s)
        except subprocess.TimeoutExpired:
            return f"it took longer than {deadline_s:.0f} s"
        finally:
            _end(child)
    if code:
        text = (folder / "said.txt").read_text(encoding="utf-8", errors="replace").strip()
        return f"exit status {code}: {text[-_TAIL:]}"
    return ""


def _end(child: subprocess.Popen[bytes]) -> None:
    """Let it put away what it has started, an MPS daemon or Ray; then kill what is left of it."""
    if child.poll() is None:
        child.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(_GRACE_S)
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main(folder: Path) -> None:
    """In the process of its own: train what `asked.json` asks for, and leave `found.json`."""
    asked = json.loads((folder / "asked.json").read_text(encoding="utf-8"))
    stop = threading.Event()
    threading.Thread(target=_watch_parent, args=(os.getppid(), stop), daemon=True).start()
    try:
        with termination_unwinds():
            found = sweep_facts(asked, folder / "sweep", stop)
    except PodiumError as error:
        found = {"why": f"{type(error).__name__}: {error}"}
    (folder / "found.json").write_text(json.dumps(found), encoding="utf-8")


def _watch_parent(parent: int, stop: threading.Event) -> None:
    """A sweep that nobody waits for any more would be in the way of the next call's measurements."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    stop.set()


def sweep_facts(asked: Mapping[str, Any], folder: Path, stop: threading.Event | None = None) -> Row:
    """Train a sweep, and keep of it what the study is about."""
    from podium.sweeps.sweep import sweep

    wanted = {name: value for name, value in asked.items() if name != "trials"}
    done = sweep(**wanted, keep="none", out=folder, stop=stop)
    best = done.best
    statuses = Counter(outcome.status for outcome in done.outcomes)
    why = "" if best is not None else "no trial finished"
    return {
        "seconds": done.seconds, "trained": len(done.outcomes), "statuses": dict(statuses), "metric": done.metric,
        "best": None if best is None else {
            "name": best.name, "mean": best.mean, "low": best.low, "high": best.high, "n": best.n,
        },
        "chosen": [choice["executor"] for choice in done.choices],
        "not_fused": [probe["why"] for probe in done.probes if not probe["fuses"]],
        "reading": read(done.reading), "why": why,
    }  # fmt: skip
