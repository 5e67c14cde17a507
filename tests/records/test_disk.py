"""Files that survive a kill: atomic writes, journals and the lock of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from podium.errors import CheckpointError, ConfigError, RecordError
from podium.records.disk import mend_last_line, replacing, write_atomically
from podium.records.folder_lock import folder_lock
from podium.records.journal import Journal, read_journal


@pytest.mark.parametrize("durable", [False, True])
def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path, durable: bool) -> None:
    target = tmp_path / "target"
    target.write_bytes(b"old")
    (tmp_path / "target.partial").mkdir()  # so that writing fails
    with pytest.raises(CheckpointError, match="target cannot be written"):
        write_atomically(target, b"new", durable=durable, error=CheckpointError)
    assert target.read_bytes() == b"old"


def test_a_block_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "target"
    write_atomically(target, "old ü")
    with pytest.raises(ZeroDivisionError), replacing(target) as partial:
        partial.write_text("half")
        raise ZeroDivisionError
    assert [path.name for path in target.parent.iterdir()] == ["target"]
    assert target.read_text(encoding="utf-8") == "old ü"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ""),
        ('{"a":1}\n', '{"a":1}\n'),
        ('{"a":1}\n{"a":', '{"a":1}\n'),
        ('{"a":1}\n{"a":2}', '{"a":1}\n{"a":2}\n'),
        ('{"a":', ""),
        ('{"a":1}\n"' + "x" * (3 << 20), '{"a":1}\n'),
    ],
    ids=["empty", "whole", "torn", "no newline", "only half a line", "torn, and longer than a block"],
)
def test_a_journal_is_mended_before_it_is_appended_to(tmp_path: Path, before: str, after: str) -> None:
    path = tmp_path / "journal.jsonl"
    path.write_text(before)
    mend_last_line(path)
    assert path.read_text() == after
    path.write_text(before)
    with Journal(path, durable=True) as journal:
        journal.write({"a": 3})
    assert path.read_text() == after + '{"a":3}\n'


def test_a_journal_that_is_missing_has_no_rows(tmp_path: Path) -> None:
    mend_last_line(tmp_path / "none")
    assert read_journal(tmp_path / "none") == []


def test_a_journal_that_cannot_be_written_names_its_file(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=f"{tmp_path} cannot be written"):
        Journal(tmp_path)


def test_a_folder_is_locked_once_and_free_afterwards(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    with folder_lock(folder, "sweep"):
        with pytest.raises(ConfigError, match=r"new: another sweep must not be under way there, got one .this process"):
            folder_lock(folder, "sweep").__enter__()
        with folder_lock(tmp_path / "other", "sweep"):
            pass
    assert list(folder.iterdir()) == []
    with folder_lock(folder, "sweep"):
        pass
