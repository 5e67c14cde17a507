"""`podium bench soak`: memory, files and disk that grow during a run, by step and by worker.

A tiny model (`regression` without a hidden layer, 51 parameters) trains for hundreds of thousands of steps on two
workers, as real processes of `podium train`, once per strategy. Every `every_s` seconds the bench reads from
`/proc` and from the run's folder:

    memory       anonymous memory of the launcher, of each rank, of the fork server
    open files   descriptors of each of these processes
    disk         bytes of records, server snapshots, checkpoints and logs

and, from the last record of the first worker, that worker's number of steps. A row has the Theil-Sen slope over the
samples after the first third of the steps (buffers and caches fill before), in bytes per step, with its 95 % interval.
Everything but records must be flat: its slope, or its growth over all steps, stays within `BOUNDS`. Records grow by
design: their slope is reported, and the ratio of the slopes in the second and the first half shows whether growth is
linear.

When training ends the launcher merges and sums up all records. `end` compares its peak memory with its memory before,
per record. `by_workers` makes short runs of several sizes, for the cost of one more worker to the launcher and each
rank.

Rates are reported but not judged: they depend on the machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from podium.errors import ConfigError, PodiumError
from podium.lab.bench.harness import check_names

STRATEGIES = (
    "all-reduce",
    "parameter-server:mode=sync",
    "parameter-server:mode=async;servers=2;replicas=2",
    "local-sgd",
)
END_LIMIT = 64.0
"""Bytes per record that the launcher may need to merge and sum up: one 8-byte number per step and field."""

_SLACK_BYTES = 2 << 20  # glibc and Python allocate memory in arenas of up to 1 MiB
_MOST_POINTS = 400  # Theil-Sen uses all pairs
_SHORT_STEPS = 400
_TAIL_BYTES = 4096
_STEP = re.compile(rb'"kind":"step".*?"step":(\d+)')
_RANK_LOG = re.compile(r"/logs/rank-(\d+)\.log$")
_FOLDERS = {"records": "records", "server snapshots": "servers", "checkpoints": "checkpoints", "logs": "logs"}


class Look(NamedTuple):
    """How a run is observed."""

    checkpoint_every: int
    """Steps between checkpoints; a server drops its memory of pushes at each, so 0 shows whether that grows."""
    every_s: float
    limit_s: float
    """The longest that the run may take."""


class Bound(NamedTuple):
    """How much something that should be flat may grow."""

    per_step: float
    slack: int
    """Growth over the whole run that counts as flat."""


BOUNDS = {"memory": Bound(4.0, _SLACK_BYTES), "open files": Bound(0.0, 4), "disk": Bound(0.1, 64 << 10)}
"""By kind of value. A leak of one small Python object per step is ten times the bound of memory."""


class Sample(NamedTuple):
    """The readings at one moment."""

    seconds: float
    steps: int
    """Steps of the first worker; 0 before its first."""
    values: dict[str, int]
    """Bytes, or a number of open files, by name: `memory of rank 0`, `disk of records`."""


def bench_soak(
    peers: Sequence[str] = (),
    rounds: int | None = None,
    *,
    steps: int = 250_000,
    strategies: tuple[str, ...] = STRATEGIES,
    workers: int = 2,
    by_workers: tuple[int, ...] = (2, 4, 8),
    checkpoint_every: int = 0,
    every_s: float = 0.5,
    limit_s: float = 3600.0,
) -> dict[str, Any]:
    """A row per strategy and value that could grow; `holds`: whether everything that should be flat is flat.

    `steps`: of each strategy. `strategies`: as for `podium train`, with `;` between their options. `by_workers`:
    numbers of workers of the short runs; fewer than two mean no short runs. `checkpoint_every`: in steps. `every_s`:
    seconds between readings. `limit_s`: the longest that one run may take. There are no rounds: every strategy runs
    once.
    """
    check_names("peer of bench soak", peers, ())
    if rounds not in (None, 1):
        raise ConfigError(f"bench soak runs every strategy once: rounds must be 1, got {rounds}")
    if steps < 100 or workers < 1 or min(by_workers, default=1) < 1 or not min(limit_s, every_s) > 0:
        raise ConfigError(
            "bench soak: steps must be at least 100, workers at least 1, every_s and limit_s above 0, "
            f"got {steps}, {workers} (by_workers {by_workers}), {every_s} and {limit_s}"
        )
    look = Look(checkpoint_every, every_s, limit_s)
    arms = [_soak(strategy, steps, workers, look) for strategy in strategies]
    document: dict[str, Any] = {"bench": "soak", "steps": steps, "workers": workers, "arms": arms}
    if len(by_workers) > 1:
        document["by_workers"] = [_by_workers(strategy, by_workers, look) for strategy in strategies]
    return {**document, "holds": all(arm["holds"] for arm in arms)}


def _soak(strategy: str, steps: int, workers: int, look: Look) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        run_dir = Path(folder) / "run"
        samples = list(_watched(strategy, steps, workers, run_dir, look))
        records = _count_lines(run_dir / "records.jsonl")
    rows = grown(samples, steps)
    end = at_end(samples, records)
    return {
        "strategy": strategy,
        "seconds": samples[-1].seconds,
        "records": records,
        "steps_per_s": _rates(samples),
        "end": end,
        "rows": rows,
        "holds": end["holds"] and all(row["holds"] for row in rows if "holds" in row),
    }


def _watched(strategy: str, steps: int, workers: int, run_dir: Path, look: Look) -> Iterator[Sample]:
    """Run `podium train` and yield readings until it ends; if it fails, the error has its output."""
    epochs, batch_size = 1_000_000, 4 * workers  # `steps` ends the run
    settings = {"run_dir": run_dir, "eval_every": 0, "task.hidden": "[]", "task.samples": 500, "threads": 1}
    command = [sys.executable, "-m", "podium", "train", "regression", "--json", "--quiet", "--strategy"]
    command.append(strategy.replace(";", ","))
    command += ["--workers", str(workers), "--steps", str(steps), "--epochs", str(epochs)]
    command += ["--batch-size", str(batch_size), "--checkpoint-every", str(look.checkpoint_every)]
    command += [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]
    output = run_dir.parent / "output"
    began = time.monotonic()
    with output.open("wb") as printed:
        launcher = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=printed, stderr=subprocess.STDOUT)
        try:
            while (code := launcher.poll()) is None:
                yield _look(launcher.pid, run_dir, time.monotonic() - began)
                if time.monotonic() - began > look.limit_s:
                    raise PodiumError(f"bench soak: {strategy} must end within limit_s={look.limit_s:g} s, and has not")
                with contextlib.suppress(subprocess.TimeoutExpired):
                    launcher.wait(look.every_s)
        finally:
            launcher.kill()  # ranks end with their launcher
            launcher.wait()
    if code != 0:
        raise PodiumError(f"bench soak: {strategy} ended with exit code {code}: {output.read_text()[-2000:]}")


def _look(launcher: int, run_dir: Path, seconds: float) -> Sample:
    values: dict[str, int] = {}
    for pid in [launcher, *_descendants(launcher)]:
        with contextlib.suppress(OSError, ValueError):  # a process may end during the reading
            name = "launcher" if pid == launcher else _name_of(pid)
            memory, files = _anonymous_bytes(pid), len(os.listdir(f"/proc/{pid}/fd"))
            values[f"memory of {name}"] = memory
            values[f"open files of {name}"] = files
    for what, folder in _FOLDERS.items():
        values[f"disk of {what}"] = _bytes_below(run_dir / folder)
    return Sample(seconds, _steps_done(run_dir / "records" / "rank-0.jsonl"), values)


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


def _name_of(pid: int) -> str:
    """The name of a process: a rank is known by its log; the launcher's helpers have none."""
    rank = _RANK_LOG.search(os.readlink(f"/proc/{pid}/fd/1"))
    if rank is not None:
        return f"rank {rank[1]}"
    command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    return "resource tracker" if b"resource_tracker" in command else "fork server"


def _anonymous_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory of its own any more")


def _bytes_below(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # snapshots are replaced during the reading
                total += os.stat(os.path.join(parent, name)).st_size
    return total


def _steps_done(records: Path) -> int:
    with contextlib.suppress(OSError), records.open("rb") as file:
        file.seek(max(0, records.stat().st_size - _TAIL_BYTES))
        numbers = _STEP.findall(file.read())
        return int(numbers[-1]) if numbers else 0
    return 0


def _count_lines(path: Path) -> int:
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def grown(samples: Sequence[Sample], steps: int) -> list[dict[str, Any]]:
    """A row per value: its slope per step, and whether it is as flat as it should be."""
    last = max(sample.steps for sample in samples)
    training = [s for s in samples if steps / 3 <= s.steps < last]
    rows = []
    for what in sorted({what for sample in training for what in sample.values}):
        points = [(s.steps, s.values[what]) for s in training if what in s.values]
        if len(points) < 4 or what.endswith("resource tracker"):
            continue
        slope, low, high = slope_of(points)
        row: dict[str, Any] = {"what": what, "per_step": slope, "interval": [low, high], "last": points[-1][1]}
        if what == "disk of records":
            half = len(points) // 2
            row["second_half_to_first"] = slope_of(points[half:])[0] / max(1e-9, slope_of(points[: half + 1])[0])
        else:
            bound = BOUNDS[what.partition(" of ")[0]]
            row["holds"] = slope <= bound.per_step or slope * (points[-1][0] - points[0][0]) <= bound.slack
        rows.append(row)
    return rows


def slope_of(points: Sequence[tuple[int, int]]) -> tuple[float, float, float]:
    """Theil-Sen's slope and its 95 % interval."""
    from scipy.stats import theilslopes

    every = max(1, len(points) // _MOST_POINTS)
    x, y = np.asarray(points[::every], dtype=np.float64).T
    if np.ptp(x) == 0 or np.ptp(y) == 0:
        return 0.0, 0.0, 0.0
    found = theilslopes(y, x)
    return float(found.slope), float(found.low_slope), float(found.high_slope)


def at_end(samples: Sequence[Sample], records: int) -> dict[str, Any]:
    """The launcher's memory to merge and sum up: its peak after the last step, minus the median before."""
    last = max(sample.steps for sample in samples)
    memory = [(s.steps, s.values["memory of launcher"]) for s in samples if "memory of launcher" in s.values]
    before = float(np.median([m for steps, m in memory if last / 3 <= steps < last] or [memory[0][1]]))
    extra = max(0.0, max([m for steps, m in memory if steps == last], default=before) - before)
    per_record = max(0.0, extra - _SLACK_BYTES) / max(1, records)
    return {"extra_bytes": extra, "bytes_per_record": per_record, "holds": per_record <= END_LIMIT}


def _rates(samples: Sequence[Sample]) -> dict[str, float]:
    """Steps per second in the first and in the last third of the steps."""
    last = max(sample.steps for sample in samples)
    first = [s for s in samples if 0 < s.steps <= last / 3]
    final = [s for s in samples if last * 2 / 3 <= s.steps < last]
    rates = {}
    for name, part in (("first_third", first), ("last_third", final)):
        if len(part) > 1 and part[-1].seconds > part[0].seconds:
            rates[name] = (part[-1].steps - part[0].steps) / (part[-1].seconds - part[0].seconds)
    return rates


def _by_workers(strategy: str, sizes: Sequence[int], look: Look) -> dict[str, Any]:
    """The cost of one more worker: slopes of the peak values over runs with several numbers of workers."""
    peaks: list[Mapping[str, int]] = []
    for workers in sizes:
        with tempfile.TemporaryDirectory(prefix="soak-") as folder:
            run_dir = Path(folder) / "run"
            samples = list(_watched(strategy, _SHORT_STEPS, workers, run_dir, look))
            servers = _servers_of(run_dir)
        peaks.append(_peaks(samples, workers, servers))
    kinds = sorted(set.intersection(*(set(peak) for peak in peaks)))
    rows = [
        {
            "what": kind,
            "per_worker": slope_of([(size, peak[kind]) for size, peak in zip(sizes, peaks, strict=True)])[0],
            "seen": [peak[kind] for peak in peaks],
        }
        for kind in kinds
    ]
    return {"strategy": strategy, "workers": list(sizes), "rows": rows}


def _servers_of(run_dir: Path) -> int:
    begins = (json.loads(line) for line in (run_dir / "records.jsonl").read_text().splitlines() if '"begin"' in line)
    return sum(row["kind"] == "begin" and row["role"] == "server" for row in begins)


def _peaks(samples: Sequence[Sample], workers: int, servers: int) -> Mapping[str, int]:
    """The largest value of each kind of process: all workers count as one kind, all servers as another."""
    kinds: dict[str, int] = {}
    for sample in samples:
        for what, value in sample.values.items():
            place = re.fullmatch(r"(.*) of rank (\d+)", what)
            kind = what
            if place is not None:
                kind = f"{place[1]} of a {'worker' if int(place[2]) < workers else 'server'}"
            kinds[kind] = max(kinds.get(kind, 0), value)
    return {kind: value for kind, value in kinds.items() if servers or "server snapshots" not in kind}
