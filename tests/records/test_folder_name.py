"""Folders that nobody named get names of their own."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.records.folder_name import new_folder


def test_what_begins_in_the_same_second_gets_folders_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.strftime", lambda form: "20261115-213012")
    assert len({new_folder("runs", "sweep-digits") for _ in range(5)}) == 5


def test_the_name_tells_what_it_holds_and_stays_one_name() -> None:
    path = new_folder("runs", "sweep-../a b/my_task.py:make")
    assert path.parent == Path("runs")
    assert path.name.startswith("sweep-..-a-b-my_task.py-make-2")
    assert len(new_folder("runs", "x" * 1000).name) < 160
