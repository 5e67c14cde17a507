"""Copying a checkpoint to a host that does not have it."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from podium.engine.checkpoint import find_checkpoint
from podium.errors import CheckpointError
from podium.launch import checkpoint_copy
from podium.launch.checkpoint_copy import CheckpointFiles, find_or_copy, read_chunk
from podium.strategies import make_strategy
from podium.testing import toy, train_in
from podium.testing.worlds import Memory


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    train_in(Memory(), toy(), make_strategy("all-reduce"), 2, run_dir=tmp_path / "first")
    return find_checkpoint(tmp_path / "first").path


def test_a_copy_is_the_same_checkpoint(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_copy, "CHUNK_BYTES", 100)
    files = CheckpointFiles.from_meta(CheckpointFiles.at(saved)._asdict())
    ask = partial(read_chunk, saved)
    copied = find_or_copy(tmp_path / "absent", files, tmp_path / "second", ask, first=True, limit_s=1)
    assert copied.parent == tmp_path / "second"
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == {
        path.name: path.read_bytes() for path in saved.iterdir()
    }
    assert find_checkpoint(copied).step == find_checkpoint(saved).step


def test_a_checkpoint_that_is_here_is_not_copied(saved: Path, tmp_path: Path) -> None:
    def ask(name: str, offset: int) -> bytes:
        raise AssertionError("nothing is to be sent")

    files = CheckpointFiles.at(saved)
    assert find_or_copy(saved.parents[1], files, tmp_path / "second", ask, first=True, limit_s=1) == saved


def test_the_other_processes_of_a_host_wait_for_the_first(saved: Path, tmp_path: Path) -> None:
    files, ask, into = CheckpointFiles.at(saved), partial(read_chunk, saved), tmp_path / "second"
    with pytest.raises(CheckpointError, match=r"was not copied from the first host within 0\.1 s"):
        find_or_copy(tmp_path / "absent", files, into, ask, first=False, limit_s=0.1)
    found: list[Path] = []
    wait = partial(find_or_copy, tmp_path / "absent", files, into, ask, first=False, limit_s=20)
    thread = threading.Thread(target=lambda: found.append(wait()))
    thread.start()
    copied = find_or_copy(tmp_path / "absent", files, into, ask, first=True, limit_s=20)
    thread.join(20)
    assert found == [copied]


def test_a_copy_that_breaks_off_leaves_no_checkpoint(saved: Path, tmp_path: Path) -> None:
    files = CheckpointFiles.at(saved)
    with pytest.raises(CheckpointError, match=r"ended after 0 of \d+ bytes on the first host"):
        find_or_copy(tmp_path / "absent", files, tmp_path, lambda name, offset: b"", first=True, limit_s=1)
    assert not (tmp_path / files.name).exists()


@pytest.mark.parametrize("name", ["../evil", "/etc/passwd", "..", "", "a/b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name: str, saved: Path) -> None:
    with pytest.raises(CheckpointError, match="must name files of one folder"):
        CheckpointFiles.from_meta({"name": "step-00000001", "sizes": {name: 1}, "sha256": ""})
    with pytest.raises(CheckpointError, match="must name files of one folder"):
        CheckpointFiles.from_meta({"name": name, "sizes": {}, "sha256": ""})
    with pytest.raises(CheckpointError, match="has no file"):
        read_chunk(saved, name, 0)
