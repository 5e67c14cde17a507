"""Records: one measured fact per line, appended as it happens; everything else reads them.

A run's folder:

    manifest.json            what was run: resolved configuration, seed, versions, hardware, commit
    records/rank-3.jsonl     what rank 3 saw, one JSON object per line, flushed line by line
    records/launcher.jsonl   what the launcher saw of the ranks (its records have rank -1)
    records.jsonl            all of them in order of time, written when the run ends

Every record has `kind`, `rank`, `t_ns` (nanoseconds since the run began, on the world's own clock) and its own fields.
A file cut short by a kill is readable up to its last whole line.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from podium.errors import RecordError

Record = dict[str, Any]

KINDS: dict[str, str] = {
    "begin": "a rank is ready: role, parameters, buckets, device, balance, watched (rules, besides the one in force)",
    "step": "one step of one worker: step, position, first, samples, loss, step_ns, pass_ns (computing), wait_ns, "
    "sent, received (bytes)",
    "eval": "validation: step, epoch, position, loss, metrics, eval_ns, waited (whether the others waited for it)",
    "arrival": "a server took up a message: source, what, lease, range; with updates, their order is the run's order",
    "update": "a server applied gradients: version, worker, range, staleness, lease, first (of stretch), pushes, lead",
    "dropped": "a server dropped a push that was too stale: worker, lease, staleness",
    "worker_lost": "a server heard that a worker is gone: worker, leases (that go back)",
    "restored": "a server took the place of a lost one: source (of its state), updates",
    "lost_updates": "a restored server heard how much of its work is gone: range, updates",
    "replaced": "a lost server was replaced: server, took_ns",
    "codec": "codecs were chosen: why, chosen, by_bucket, predicted_ms (of a step, by codec), link, rates",
    "codec_check": "a choice was held against its step times: measured_ms, predicted_ms, dense_ms, keeps",
    "balance": "who gets how much was changed: why (gain, memory, look), ranks, before, after (each's), unit (samples "
    "of a step where it is absent, or steps of a round), predicted_s (of a step, before and after), least (gain asked "
    "for), members (fixed_s, per_sample_s, noise, error, passes, samples, most, exchange_s)",
    "trigger": "a rule was evaluated: rule, in_force, phase, value, threshold, fires, why, step, epoch, position",
    "switch": "a phase ended and the next began: before, after, rule, why, value, step, epoch, position; leftovers (of "
    "a codec: none, kept, converted, dropped); its cost: drain_ns, home_ns, hand_over_ns, begin_ns",
    "undone": "a round did not happen, and comes again: steps (of this worker), step and position (to go on from)",
    "scaled": "workers or servers were asked to join or leave: workers, servers",
    "lost": "a rank was lost: lost (rank), cause, generation",
    "regroup": "the survivors agreed: generation, members, source, step, took_ns",
    "checkpoint": "a checkpoint was written: step, position, path, took_ns",
    "stop": "the run was asked to stop: step, reason",
    "failed": "a rank raised: error, message, place, step",
    "end": "a rank is through: step, position, param_hash, metrics, sent, received",
}
"""What each kind of record holds."""


_LOOK_EVERY_S = 1.0
"""How often a recorder looks whether its file still has its name; and whenever it writes what does not come often."""
_OFTEN = frozenset({"step", "arrival", "update", "trigger"})


class Recorder:
    """Appends one rank's records to its file; with no path, keeps them in memory.

    A file that was deleted takes lines as before, for nobody to read: a recorder looks for it, and raises.
    """

    def __init__(self, rank: int, path: Path | None = None) -> None:
        self.rank, self.path = rank, path
        self.kept: list[Record] = []
        self._file = None
        self._look_at_s = 0.0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._file = path.open("a", buffering=1, encoding="utf-8")
            except OSError as error:
                raise RecordError(f"records of rank {rank} cannot be written to {path}: {error}") from error

    def write(self, kind: str, t_ns: int, **fields: Any) -> None:
        assert kind in KINDS, kind
        record: Record = {"kind": kind, "rank": self.rank, "t_ns": int(t_ns), **fields}
        if self._file is None:
            self.kept.append(record)
            return
        try:
            self._file.write(to_json(record) + "\n")
        except OSError as error:
            raise RecordError(f"records of rank {self.rank} cannot be written to {self.path}: {error}") from error
        if time.monotonic() >= self._look_at_s or kind not in _OFTEN:
            self._look()

    def _look(self) -> None:
        assert self._file is not None
        assert self.path is not None
        self._look_at_s = time.monotonic() + _LOOK_EVERY_S
        try:
            is_there = os.path.samestat(os.fstat(self._file.fileno()), os.stat(self.path))
        except OSError:
            is_there = False
        if not is_there:
            who = f"rank {self.rank}" if self.rank >= 0 else "the launcher"
            raise RecordError(
                f"records of {who} cannot be written to {self.path}: the file, or the run's folder, was removed or "
                "moved while the run was under way"
            )

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):  # a record that did not fit on the disk was reported by `write`
                self._file.close()


def to_json(value: Any) -> str:
    """One line of strict JSON; a number that is not finite becomes a string, since JSON has none."""
    try:
        return _JSON.encode(value)
    except ValueError:  # most records are finite, and looking at every number first costs more than writing them
        return _JSON.encode(_finite(value))


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, or of a run's folder in order of time; a torn last line is left out."""
    if path.is_dir():
        merged = path / "records.jsonl"
        yield from read_records(merged) if merged.is_file() else merged_records((path / "records").glob("*.jsonl"))
        return
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise RecordError(f"records cannot be read from {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            yield json.loads(line)
        except ValueError as error:
            if number == len(lines):  # no newline behind it: the writer was killed in mid-line
                return
            raise RecordError(f"{path}:{number}: not a record: {error}") from error


def merged_records(paths: Iterable[Path]) -> list[Record]:
    """Records of several ranks in order of time, then rank, then as written."""
    rows = [row for path in sorted(paths) for row in read_records(path)]
    return sorted(rows, key=lambda row: (row["t_ns"], row["rank"]))  # stable: ties keep each file's order


def merge_records(run_dir: Path) -> Path:
    """Write `records.jsonl` from the ranks' files, whole or not at all."""
    target = run_dir / "records.jsonl"
    partial = target.with_suffix(".partial")
    rows = merged_records((run_dir / "records").glob("*.jsonl"))
    try:
        partial.write_text("".join(to_json(row) + "\n" for row in rows), encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RecordError(f"records cannot be merged into {target}: {error}") from error
    return target


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return value


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        return _finite(value.item())
    raise TypeError(f"a record cannot hold a {type(value).__name__}")


_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False, default=_plain)
