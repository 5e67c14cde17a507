"""Records: one measured fact per line, appended as it happens; everything else reads them.

A run's folder:

    manifest.json            resolved configuration, seed, versions, hardware, commit
    records/rank-3.jsonl     records of rank 3, one JSON object per line, flushed line by line
    records/launcher.jsonl   the launcher's records of the ranks (with rank -1)
    records.jsonl            all of them in order of time, written when the run ends

Every record has `kind`, `rank`, `t_ns` (nanoseconds since the run began, on the world's own clock) and its own fields.
A file cut short by a kill is readable up to its last complete line.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import math
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from podium.errors import RecordError
from podium.records.disk import mend_last_line, replacing

Record = dict[str, Any]

KINDS: dict[str, str] = {
    "begin": "a rank is ready: role, parameters, buckets, device, balance, watched (rules, besides the one in force)",
    "step": "one step of one worker: step, position, first, samples, loss, step_ns, pass_ns (computing), wait_ns, "
    "sent, received (bytes)",
    "eval": "validation: step, epoch, position, loss, metrics, eval_ns, waited (whether other workers waited)",
    "arrival": "a server processed a message: source, what, lease, range; with updates, their order is the run's order",
    "update": "a server applied gradients: version, worker, range, staleness, lease, first (of segment), pushes, lead",
    "dropped": "a server dropped a push that was too stale: worker, lease, staleness",
    "worker_lost": "a server learned that a worker is lost: worker, leases (that are lent again)",
    "restored": "a server took the place of a lost one: source (of its state), updates, recorded ([range, updates with "
    "a record] that its copy has)",
    "lost_updates": "a restored server learned how many updates are lost: range, updates",
    "replaced": "a lost server was replaced: server, took_ns",
    "codec": "codecs were chosen: why, chosen, by_bucket, predicted_ms (of a step, by codec), link, rates",
    "codec_check": "a choice was compared with measured exchanges: measured_ms, predicted_ms, dense_ms, keeps",
    "balance": "a division was changed: why (gain, memory, look), ranks, before, after (by rank), unit (samples "
    "of a step where it is absent, or steps of a round), predicted_s (of a step, before and after), least (gain asked "
    "for), members (fixed_s, per_sample_s, noise, error, passes, samples, most, exchange_s)",
    "trigger": "a rule was evaluated: rule, in_force, phase, value, threshold, fires, why, step, epoch, position",
    "switch": "a phase ended and the next began: before, after, rule, why, value, step, epoch, position; leftovers (of "
    "a codec: none, kept, converted, dropped); its cost: drain_ns, home_ns, hand_over_ns, begin_ns",
    "undone": "a round was lost and is repeated: steps (of this worker), step and position (to continue from)",
    "warning": "a worker noticed something that is no error: text",
    "backend": "what workers with GPUs exchange through, nccl or gloo: backend, generation, gpus (in use)",
    "scaled": "workers or servers were asked to join or leave: workers, servers",
    "lost": "a rank was lost: lost (rank), cause, generation",
    "regroup": "the survivors agreed: generation, members, source, step, position, took_ns",
    "checkpoint": "a checkpoint was written: step, position, path, took_ns",
    "stop": "the run was asked to stop: step, reason",
    "failed": "a rank raised: error, message, place, step",
    "end": "a rank has finished: step, position, param_hash, metrics, sent, received",
}
"""Each kind of record with its fields."""


_LOOK_EVERY_S = 1.0
"""How often a recorder checks that its file still exists; also at each record of a kind that is not `_OFTEN`."""
_OFTEN = frozenset({"step", "arrival", "update", "trigger"})


class Recorder:
    """Appends one rank's records to its file; without a path, keeps them in memory.

    A deleted file still takes lines, which no reader can find: a recorder checks that its file exists, and raises.
    """

    def __init__(self, rank: int, path: Path | None = None) -> None:
        self.rank, self.path = rank, path
        self.kept: list[Record] = []
        self._file = None
        self._look_at_s = 0.0
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                mend_last_line(path)  # a rank that replaces a killed one appends to its file
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
    """One line of strict JSON; inf and nan become strings, since JSON has neither."""
    try:
        return _JSON.encode(value)
    except ValueError:  # rare: checking every number first costs more than writing the record
        return _JSON.encode(_finite(value))


def read_records(path: Path) -> Iterator[Record]:
    """The records of a file, or of a run's folder in order of time; a torn last line is left out.

    Reads lazily, so a large file needs little memory.
    """
    if path.is_dir():
        merged = path / "records.jsonl"
        if merged.is_file():
            yield from (_checked(row, merged, place) for place, row in _rows(merged))
        else:
            yield from merged_records((path / "records").glob("*.jsonl"))
        return
    for _, row in _rows(path):
        yield row


def merged_records(paths: Iterable[Path]) -> Iterator[Record]:
    """Records of several ranks in order of time, then rank, then as written. The files are read side by side."""
    streams = [_in_order(path) for path in sorted(paths)]
    return (row for _, row in heapq.merge(*streams, key=lambda item: item[0]))  # ties: the first file's come first


def merge_records(run_dir: Path) -> Path:
    """Write `records.jsonl` from the ranks' files, completely or not at all."""
    target = run_dir / "records.jsonl"
    with replacing(target) as partial, partial.open("w", encoding="utf-8") as file:
        for row in merged_records((run_dir / "records").glob("*.jsonl")):
            file.write(to_json(row) + "\n")
    return target


class _Place(NamedTuple):
    """Where a line is in its file."""

    line: int
    offset: int
    size: int


def _lines(path: Path, offset: int = 0) -> Iterator[tuple[_Place, bytes, bool]]:
    """The non-empty lines of a file, and whether each has its newline.

    The file is open only while a block is read: a run may have more ranks than a process may have files.
    """
    number, rest = 1, b""
    while True:
        try:
            with path.open("rb") as file:
                file.seek(offset + len(rest))
                block = file.read(_BLOCK_BYTES)
        except OSError as error:
            raise RecordError(f"records cannot be read from {path}: {error}") from error
        *whole, last = (rest + block).split(b"\n")
        for line in whole:
            if line:
                yield _Place(number, offset, len(line)), line, True
            number, offset = number + 1, offset + len(line) + 1
        rest = last
        if not block:
            break
    if rest:
        yield _Place(number, offset, len(rest)), rest, False


def _rows(path: Path) -> Iterator[tuple[_Place, Any]]:
    for place, line, is_whole in _lines(path):
        try:
            row = json.loads(line)
        except ValueError as error:
            if not is_whole:  # the writer was killed in the middle of the line
                return
            raise RecordError(f"{path}:{place.line}: not a record: {error}") from error
        yield place, row


def _in_order(path: Path) -> Iterator[tuple[tuple[int, int], Record]]:
    """One rank's records with their sort keys. Nearly always they were written in order."""
    if _is_sorted(path):
        for place, row in _rows(path):
            checked = _checked(row, path, place)
            yield (checked["t_ns"], checked["rank"]), checked
        return
    from podium.records.tables import Table  # here: it imports numpy, which `podium --help` must not

    table = Table(5, keys=2, scratch=path.parent)
    for place, row in _rows(path):
        checked = _checked(row, path, place)
        table.append((checked["t_ns"], checked["rank"], *place))
    with path.open("rb") as file:
        for t_ns, rank, _, offset, size in table.sorted():
            yield (t_ns, rank), json.loads(os.pread(file.fileno(), size, offset))


def _is_sorted(path: Path) -> bool:
    """By a regular expression, much cheaper than parsing; a line that does not match counts as not sorted."""
    last = (-(1 << 63), 0)
    for _, line, is_whole in _lines(path):
        found = _WRITTEN.match(line)
        if found is None:
            return not is_whole
        key = int(found[2]), int(found[1])
        if key < last:
            return False
        last = key
    return True


_WRITTEN = re.compile(rb'\{"kind":"\w+","rank":(-?\d{1,18}),"t_ns":(-?\d{1,18})[,}]')
_BLOCK_BYTES = 1 << 16


def _checked(row: Any, path: Path, place: _Place) -> Record:
    """The row, if it is an object with `kind`, `rank` and `t_ns`, and known fields have the right type; else raises."""
    trouble = _trouble(row)
    if trouble:
        raise RecordError(f"{path}:{place.line}: a damaged record: {trouble}")
    return row  # type: ignore[no-any-return]  # an object, as just checked


def _trouble(row: Any) -> str:
    if not isinstance(row, dict):
        return f"must be an object, got {type(row).__name__}"
    for name in ("kind", "rank", "t_ns"):
        if name not in row:
            return f"has no {name}"
    for name, value in row.items():
        types = _TYPES.get(name)
        if types is not None and type(value) not in types:
            return f"{name} must be {_named(types)}, got {value!r:.80}"
    return ""


def require(row: Record, *names: str) -> None:
    """Raise where a record lacks one of these fields."""
    for name in names:
        if name not in row:
            raise RecordError(
                f"a damaged record: the {row['kind']} of rank {row['rank']} at t_ns={row['t_ns']} has no {name}"
            )


def check_fields(row: Record, needed: Fields) -> None:
    """Raise where a record lacks a field that its reader needs, or has it with another type."""
    for name, types in needed.get(row["kind"], {}).items():
        if name.endswith("?"):
            name = name[:-1]
            if name not in row:
                continue
        require(row, name)
        if type(row[name]) not in types:
            raise RecordError(
                f"a damaged record: {name} of the {row['kind']} of rank {row['rank']} at t_ns={row['t_ns']} must be "
                f"{_named(types)}, got {row[name]!r:.80}"
            )


def number(value: Any) -> float:
    """A number of a record, where inf and nan are text."""
    try:
        return float(value)
    except (TypeError, ValueError):
        raise RecordError(f"a damaged record: a number must be there, got {value!r:.80}") from None


def _named(types: tuple[type, ...]) -> str:
    words = {int: "a whole number", float: "a number", str: "text", list: "a list", dict: "an object", bool: "a truth"}
    return " or ".join(words[kind] for kind in types if kind is not type(None))


WHOLE: tuple[type, ...] = (int,)
NUMBER: tuple[type, ...] = (int, float, str)  # text: not finite
MAYBE: tuple[type, ...] = (*NUMBER, type(None))
TEXT: tuple[type, ...] = (str,)
TRUTH: tuple[type, ...] = (bool,)
LIST: tuple[type, ...] = (list,)
OBJECT: tuple[type, ...] = (dict,)
Fields = Mapping[str, Mapping[str, tuple[type, ...]]]
"""By kind of record: the fields that a reader needs and their types; a question mark marks optional ones."""

_TYPES: dict[str, tuple[type, ...]] = {
    "kind": TEXT,
    **dict.fromkeys(("rank", "t_ns", "position", "samples", "wait_ns", "pass_ns", "step_ns"), WHOLE),
    **dict.fromkeys(("eval_ns", "took_ns", "drain_ns", "home_ns", "hand_over_ns", "begin_ns", "staleness"), WHOLE),
    **dict.fromkeys(("updates", "sent", "received", "generation", "lost"), WHOLE),
    "step": (int, type(None)),
    **dict.fromkeys(("loss", "epoch"), MAYBE),
    "metrics": OBJECT,
    **dict.fromkeys(("members", "pieces", "ranks"), LIST),
    **dict.fromkeys(("role", "path", "rule", "param_hash", "cause", "reason"), TEXT),
}
"""Types of the fields that have the same type in all kinds of record."""


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
