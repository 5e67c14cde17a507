"""Records are merged and summed up as a stream: the same bytes and figures as from a list, in little memory."""

from __future__ import annotations

import itertools
import json
import random
import tracemalloc
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import podium
from podium.errors import PodiumError, RecordError
from podium.records import tables
from podium.records.phases import MOST_READINGS, PhaseRows, other_rules
from podium.records.recorder import merge_records, read_records, to_json
from podium.records.summary import summarise
from podium.records.tables import Column, Table
from podium.records.trace import write_trace
from podium.testing.toys import toy


def write(run_dir: Path, rows: list[dict[str, Any]]) -> None:
    (run_dir / "records").mkdir(parents=True, exist_ok=True)
    for rank in {row["rank"] for row in rows}:
        lines = [to_json(row) + "\n" for row in rows if row["rank"] == rank]
        (run_dir / "records" / f"rank-{rank}.jsonl").write_text("".join(lines))


def a_run(steps: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Two workers that share steps, one server, a validation now and then; times as they come."""
    chance = random.Random(seed)
    for rank in range(2):
        yield {"kind": "begin", "rank": rank, "t_ns": rank, "role": "worker", "position": 0, "balance": "equal"}
    for k in range(steps):
        for rank in range(2):
            times = {"step_ns": chance.randint(1, 10**6), "pass_ns": chance.randint(1, 9), "wait_ns": 3}
            place = {"step": k + 1, "position": 16 * (k + 1), "first": 16 * k + 8 * rank, "samples": 8}
            t_ns = 1000 * k + chance.randint(0, 900)
            yield {"kind": "step", "rank": rank, "t_ns": t_ns, "loss": 0.5, "sent": 7, "received": 7, **place, **times}
        stale = {"staleness": chance.choice([0, 1, 90]), "first": k < 2, "worker": k % 2, "lease": 16 * k, "range": 0}
        yield {"kind": "update", "rank": 2, "t_ns": 1000 * k + 950, "version": k, **stale}
        if k % 100 == 99:
            facts = {"step": k + 1, "epoch": k / 100, "position": 16 * (k + 1), "loss": 0.1, "metrics": {"a": 0.5}}
            yield {"kind": "eval", "rank": 0, "t_ns": 1000 * k + 990, "eval_ns": 5, "waited": True, **facts}
    for rank in range(2):
        end = {"position": 16 * steps, "param_hash": "ab", "sent": 9, "received": 9}
        yield {"kind": "end", "rank": rank, "t_ns": 1000 * steps, **end}


def test_a_table_is_sorted_whatever_of_it_is_in_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHUNK_ROWS", 7)
    chance = random.Random(0)
    rows = [(chance.randint(0, 9) + i // 20, chance.randint(0, 2), i) for i in range(200)]
    for count in (0, 1, 6, 7, 8, 200):
        table = Table(3, keys=2, scratch=tmp_path)
        for row in rows[:count]:
            table.append(row)
        for _ in range(2):
            assert list(table.sorted()) == sorted(rows[:count], key=lambda row: row[:2])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("few", [1 << 20, 4])
def test_percentiles_of_a_column_are_those_of_numpy(few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHUNK_ROWS", 50)
    monkeypatch.setattr(tables, "_FEW", few)
    for count in (1, 2, 5, 49, 50, 51, 1000):
        values = np.random.default_rng(count).lognormal(9, 3, count).astype(np.int64) - 3
        column = Column()
        for value in values.tolist():
            column.append(value)
        assert column.median() == float(np.median(values))
        for part in (0.0, 0.1, 0.9, 1.0):
            assert column.quantile(part) == float(np.quantile(values, part))
        assert column.total == values.sum()


@pytest.mark.parametrize("tidy", [True, False])
def test_files_are_merged_to_the_bytes_of_a_stable_sort(
    tidy: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a rank's own file is out of order, and where a last line is torn."""
    monkeypatch.setattr(tables, "CHUNK_ROWS", 16)
    rows = list(a_run(120))
    if tidy:
        rows.sort(key=lambda row: row["t_ns"])
    write(tmp_path, rows)
    with (tmp_path / "records" / "rank-1.jsonl").open("a") as file:
        file.write('{"kind":"step","rank":1,"t_')
    by_file = [row for rank in range(3) for row in rows if row["rank"] == rank]
    expected = sorted(by_file, key=lambda row: (row["t_ns"], row["rank"]))
    assert list(read_records(tmp_path)) == expected
    assert merge_records(tmp_path).read_text() == "".join(to_json(row) + "\n" for row in expected)
    assert list(read_records(tmp_path)) == expected


def test_a_summary_is_the_same_whether_it_fits_into_memory_or_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = sorted(a_run(300), key=lambda row: (row["t_ns"], row["rank"]))
    whole = summarise(rows)
    monkeypatch.setattr(tables, "CHUNK_ROWS", 11)
    monkeypatch.setattr(tables, "_FEW", 3)
    assert summarise(iter(rows), tmp_path) == whole
    assert whole["audit"] == {"missing": 0, "repeated": 0}
    assert whole["step_ms"]["p50"] == float(np.median([row["step_ns"] for row in rows if row["kind"] == "step"])) / 1e6
    assert whole["balance"]["division"] == {"0": 8, "1": 8}


def test_merging_and_summing_up_take_no_memory_by_the_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CHUNK_ROWS", 128)
    peaks = {}
    for steps in (300, 1500):
        write(tmp_path / str(steps), list(a_run(steps)))
        tracemalloc.start()
        merge_records(tmp_path / str(steps))
        summarise(read_records(tmp_path / str(steps)), tmp_path)
        peaks[steps] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert (peaks[1500] - peaks[300]) / (3 * 1200) < 100, peaks  # bytes per record; a list of them takes 2,000


def test_of_many_readings_of_a_rule_some_are_kept_and_all_that_decide(tmp_path: Path) -> None:
    facts = {"kind": "trigger", "rank": 0, "rule": "r", "in_force": True, "phase": 0, "value": 0.1, "threshold": 1.0}
    rows = PhaseRows()
    for k in range(20_000):
        rows.add({**facts, "t_ns": k, "fires": k == 12_345, "why": "", "step": k, "epoch": k / 9, "position": k})
    assert len(rows.rows) < 2 * MOST_READINGS
    (rule,) = other_rules(rows.rows, 0)
    assert rule["step"] == 12_345
    steps = [reading["step"] for reading in rule["readings"]]
    assert {0, 12_345, 19_999} <= set(steps)
    assert max(b - a for a, b in itertools.pairwise(steps)) < 20_000 / 100


# Damage.


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("recorded") / "run"
    strategy = "phases:run=parameter-server:mode=async until epoch:at=1 | all-reduce"
    podium.train(toy(), strategy=strategy, workers=2, launcher="threads", run_dir=str(run_dir), checkpoint_every=3)
    write_trace(run_dir)
    return run_dir


def test_a_damaged_byte_is_a_clear_error_or_makes_no_difference_to_the_reading(recorded: Path, tmp_path: Path) -> None:
    """No traceback, whatever is asked of the records."""
    (tmp_path / "manifest.json").write_text((recorded / "manifest.json").read_text())
    whole = (recorded / "records.jsonl").read_bytes()
    chance, refused = random.Random(1), 0
    for _ in range(150):
        damaged = bytearray(whole)
        damaged[chance.randrange(len(whole))] = chance.choice(b'\x00\xff{}[]",:0x')
        (tmp_path / "records.jsonl").write_bytes(damaged)
        for use in (lambda: write_trace(tmp_path), lambda: summarise(read_records(tmp_path), tmp_path)):
            try:
                use()
            except PodiumError:
                refused += 1
    assert refused > 50


def test_a_field_that_is_missing_or_of_another_type_is_no_traceback(recorded: Path, tmp_path: Path) -> None:
    """Of every kind of record that the run has."""
    (tmp_path / "manifest.json").write_text((recorded / "manifest.json").read_text())
    rows, tried = list(read_records(recorded)), set()
    for place, row in enumerate(rows):
        for name in row:
            if (row["kind"], name) in tried:
                continue
            tried.add((row["kind"], name))
            for value in (KeyError, "x", None, [], {"a": None}):
                changed = {k: v for k, v in row.items() if k != name or value is not KeyError}
                if value is not KeyError:
                    changed[name] = value
                lines = [to_json(changed if i == place else other) for i, other in enumerate(rows)]
                (tmp_path / "records.jsonl").write_text("\n".join(lines) + "\n")
                for use in (lambda: write_trace(tmp_path), lambda: summarise(read_records(tmp_path), tmp_path)):
                    with suppress(RecordError):
                        use()


@pytest.mark.parametrize(
    ("line", "trouble"),
    [
        (b"3\n", r"records.jsonl:1: a damaged record: must be an object, got int"),
        (b'{"kind":"step","rank":0}\n', r"records.jsonl:1: a damaged record: has no t_ns"),
        (b'{"kind":"step","rank":"0","t_ns":1}\n', r"rank must be a whole number, got '0'"),
        (b'{"kind":"step","rank":0,"t_ns":1,"step":1,"wait_ns":1}\n', r"step of rank 0 at t_ns=1 has no step_ns"),
        (b'{"kind":"st\xff\xfe","rank":0,"t_ns":1}\n', r"records.jsonl:1: not a record"),
        (b'{"kind":"eval","rank":0,"t_ns":1}\n', r"the eval of rank 0 at t_ns=1 has no"),
        (b'{"kind":"switch","rank":0,"t_ns":1,"before":[1]}\n', r"before of the switch .* must be text"),
    ],
)
def test_a_damaged_record_is_named(line: bytes, trouble: str, tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text(json.dumps({"config": {}}))
    (tmp_path / "records.jsonl").write_bytes(line)
    with pytest.raises(RecordError, match=trouble):
        write_trace(tmp_path)


def test_a_damaged_manifest_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(b"")
    for text in ("[]", '{"config": 3}', "{"):
        (tmp_path / "manifest.json").write_text(text)
        with pytest.raises(RecordError, match=r"no readable manifest\.json"):
            write_trace(tmp_path)
