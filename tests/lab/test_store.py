from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from podium.errors import RecordError
from podium.lab.study.store import Store, finished_keys
from podium.lab.study.study import Study
from tests.lab.synthetic import failed_row, make_row


def test_rows_come_back_in_the_order_they_were_written(tmp_path: Path) -> None:
    store = Store(tmp_path)
    rows = [make_row("solo", 0), failed_row("all-reduce", 0), make_row("solo", 1)]
    for row in rows:
        store.append(row)
    assert store.rows() == rows


@pytest.mark.parametrize("kept", [1, 20, 200])
def test_a_torn_last_line_is_left_out_and_the_next_row_is_whole(tmp_path: Path, kept: int) -> None:
    store = Store(tmp_path)
    for seed in range(2):
        store.append(make_row("solo", seed))
    whole = store.results.read_bytes()
    cut = whole.index(b"\n") + 1 + kept
    store.results.write_bytes(whole[:cut])
    assert [row["seed"] for row in store.rows()] == [0]
    store.append(make_row("solo", 7))
    assert [row["seed"] for row in store.rows()] == [0, 7]


def test_a_row_that_lost_only_its_newline_is_kept(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(make_row("solo", 0))
    store.results.write_bytes(store.results.read_bytes().rstrip(b"\n"))
    store.append(make_row("solo", 1))
    assert [row["seed"] for row in store.rows()] == [0, 1]


def test_a_spoilt_line_in_the_middle_is_an_error_with_its_place(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.results.write_text('{"cell": "solo"\n{"cell": "solo"}\n')
    with pytest.raises(RecordError, match=r"results\.jsonl:1"):
        store.rows()


def test_numbers_that_are_not_finite_can_be_stored(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.append(make_row("solo", 0, loss=math.nan))
    assert store.rows()[0]["loss"] == "nan"


def test_only_finished_runs_need_no_repeating() -> None:
    rows = [make_row("solo", 0), failed_row("solo", 1), make_row("solo", 2, status="stopped")]
    assert finished_keys(rows) == {("solo", 0)}


def test_a_second_try_gets_a_folder_of_its_own(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first = store.fresh_run_dir("parameter-server:mode=async", 3)
    second = store.fresh_run_dir("parameter-server:mode=async", 3)
    assert first.name == "parameter-server-mode-async-seed3"
    assert second != first and first.is_dir() and second.is_dir()


def test_a_folder_without_a_study_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="holds no study"):
        Store(tmp_path).read_study()


@pytest.mark.parametrize(
    "change", [{"replications": {"fewest": 3}}, {"cells": [{"name": "a"}]}, {"baseline": {"b": 1}}]
)
def test_a_file_that_holds_no_study_is_refused_by_its_name(tmp_path: Path, change: dict[str, Any]) -> None:
    store = Store(tmp_path)
    store.write_study({"name": "x", "cells": [], "factors": {"a": [1, 2]}, **change})
    with pytest.raises(RecordError, match=r"study\.json: holds no study"):
        Study.read(store)
