"""Records: appended line by line, readable after a kill, merged in order of time."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from podium.errors import RecordError
from podium.records.recorder import Recorder, merge_records, read_records, to_json


def write(path: Path, rank: int, *times: int) -> None:
    recorder = Recorder(rank, path / "records" / f"rank-{rank}.jsonl")
    for n, time in enumerate(times):
        recorder.write("step", time, step=n)
    recorder.close()


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recorder = Recorder(3, tmp_path / "deep" / "rank-3.jsonl")
    recorder.write("eval", 12, loss=0.5, metrics={"accuracy": 0.25}, path=tmp_path)
    recorder.close()
    (row,) = read_records(tmp_path / "deep" / "rank-3.jsonl")
    assert row == {
        "kind": "eval",
        "rank": 3,
        "t_ns": 12,
        "loss": 0.5,
        "metrics": {"accuracy": 0.25},
        "path": str(tmp_path),
    }


def test_every_line_is_on_disk_before_the_next_one(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    recorder = Recorder(0, path)
    for n in range(3):
        recorder.write("step", n, step=n)
        assert [row["step"] for row in read_records(path)] == list(range(n + 1))
    recorder.close()


def test_without_a_path_records_are_kept() -> None:
    recorder = Recorder(0)
    recorder.write("stop", 5, step=1)
    assert recorder.kept == [{"kind": "stop", "rank": 0, "t_ns": 5, "step": 1}]


def test_a_torn_last_line_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    whole = to_json({"kind": "step", "rank": 0, "t_ns": 1}) + "\n"
    for cut in range(1, len(whole) - 1):
        path.write_text(whole + whole[:cut])
        assert len(list(read_records(path))) == 1, f"cut after {cut} bytes"


@pytest.mark.parametrize("torn", ['{"kind":"upd', "x" * 200_000])
@pytest.mark.parametrize("before", [(), (1, 2)])
def test_whoever_goes_on_in_the_file_of_one_that_was_killed_in_mid_line_begins_a_line(
    tmp_path: Path, before: tuple[int, ...], torn: str
) -> None:
    write(tmp_path, 3, *before)
    with (tmp_path / "records" / "rank-3.jsonl").open("a") as file:
        file.write(torn)
    write(tmp_path, 3, 5)
    assert [row["t_ns"] for row in read_records(tmp_path)] == [*before, 5]


def test_a_damaged_line_in_the_middle_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.jsonl"
    path.write_text('{"kind":"step"}\n{"kind":\n{"kind":"step"}\n')
    with pytest.raises(RecordError, match=r"rank-0\.jsonl:2"):
        list(read_records(path))


def test_records_that_are_not_there_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="cannot be read"):
        list(read_records(tmp_path / "nowhere.jsonl"))


def test_merging_sorts_by_time_then_rank_then_as_written(tmp_path: Path) -> None:
    write(tmp_path, 1, 5, 5, 9)
    write(tmp_path, 10, 5, 7)
    write(tmp_path, 0, 5, 8)
    merged = merge_records(tmp_path)
    rows = [(row["t_ns"], row["rank"], row["step"]) for row in read_records(merged)]
    assert rows == [(5, 0, 0), (5, 1, 0), (5, 1, 1), (5, 10, 0), (7, 10, 1), (8, 0, 1), (9, 1, 2)]
    assert not list(tmp_path.glob("*.partial"))


def test_a_run_that_was_killed_is_read_from_its_ranks_files(tmp_path: Path) -> None:
    write(tmp_path, 1, 2)
    write(tmp_path, 0, 1, 3)
    with (tmp_path / "records" / "rank-0.jsonl").open("a") as file:
        file.write('{"kind":"st')
    assert [row["t_ns"] for row in read_records(tmp_path)] == [1, 2, 3]


def test_the_merged_file_is_preferred_once_it_is_there(tmp_path: Path) -> None:
    write(tmp_path, 0, 1)
    merge_records(tmp_path)
    write(tmp_path, 0, 2)
    assert [row["t_ns"] for row in read_records(tmp_path)] == [1]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_text(value: float) -> None:
    line = to_json({"loss": value, "nested": [{"x": value}, (1.0, value)]})
    read = json.loads(line, parse_constant=pytest.fail)
    assert read == {"loss": str(value), "nested": [{"x": str(value)}, [1.0, str(value)]]}


def test_numbers_of_numpy_and_torch_are_plain_numbers() -> None:
    line = to_json({"a": np.int64(3), "b": torch.tensor(0.5), "c": np.float32(0.25)})
    assert json.loads(line) == {"a": 3, "b": 0.5, "c": 0.25}


@pytest.mark.parametrize("value", [np.float64("nan"), np.float32("inf"), torch.tensor(math.nan)])
def test_numbers_of_numpy_and_torch_that_are_not_finite_become_text_too(value: object) -> None:
    assert json.loads(to_json({"loss": value}))["loss"] in ("nan", "inf")


def test_what_cannot_be_recorded_is_refused() -> None:
    with pytest.raises(TypeError, match="a record cannot hold a set"):
        to_json({"x": {1, 2}})


def test_a_full_disk_is_a_record_error() -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    recorder = Recorder(2, Path("/dev/full"))
    with pytest.raises(RecordError, match="rank 2 cannot be written to /dev/full"):
        recorder.write("step", 1, step=1)
    recorder.close()  # must not raise once more and hide the error that ended the run


def test_a_folder_that_cannot_be_made_is_a_record_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RecordError, match="rank 0"):
        Recorder(0, tmp_path / "file" / "rank-0.jsonl")
