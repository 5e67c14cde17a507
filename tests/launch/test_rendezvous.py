"""The private folder of a run's sockets: what a killed launcher leaves is removed, and nothing else ever is."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from podium.errors import RecordError
from podium.launch.rendezvous import rendezvous_folder
from podium.launch.run_folder_lock import claimed

KILLED = """
import os, signal, sys
from podium.launch.rendezvous import rendezvous_folder
with rendezvous_folder() as folder:
    (folder / "socket").touch()
    print(folder, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A temporary folder of this test's own."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    yield tmp_path
    tempfile.tempdir = None


def abandoned(home: Path) -> Path:
    """The folder of a launcher that was killed."""
    done = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.parent == home and (folder / "socket").exists()
    return folder


def run_once() -> None:
    with rendezvous_folder():
        pass


def test_the_folder_is_private_and_gone_afterwards(home: Path) -> None:
    with rendezvous_folder() as folder:
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
        assert folder.parent == home
    assert list(home.iterdir()) == []


def test_who_sees_the_folder_being_made_cannot_take_its_name(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = tempfile.mkdtemp

    def seen(**how: Any) -> str:
        hidden = make(**how)
        (home / Path(hidden).name.removeprefix(".") / "taken").mkdir(parents=True)
        return hidden

    monkeypatch.setattr(tempfile, "mkdtemp", seen)
    with rendezvous_folder() as folder:
        assert folder.is_dir()


def test_a_run_empties_no_file_behind_a_link_in_the_folder_that_it_is_given(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()
    (tmp_path / "mine").write_text("work")
    (tmp_path / "given" / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(RecordError, match="cannot be written"), claimed(tmp_path / "given"):
        pass
    assert (tmp_path / "mine").read_text() == "work"


def test_what_a_killed_launcher_left_is_removed_by_the_next(home: Path) -> None:
    folder = abandoned(home)
    run_once()
    assert not folder.exists()


def test_the_folder_of_a_launcher_that_lives_is_left_alone(home: Path) -> None:
    with rendezvous_folder() as folder:
        run_once()
        assert folder.is_dir()


NOT_OURS = {
    "a folder of notes with a lock": ("podium-notes", {"lock": "", "thesis.tex": "years of work"}),
    "a name like ours, and an empty lock": ("podium-ab12cd34", {"lock": "", "weights.pt": "x"}),
    "a lock of another program": ("podium-ab12cd34", {"lock": "4711\n", "weights.pt": "x"}),
    "a lock in JSON": ("podium-ab12cd34", {"lock": '{"pid": 1}', "weights.pt": "x"}),
    "no lock": ("podium-ab12cd34", {"weights.pt": "x"}),
    "a note of things that were made": (
        "podium-ab12cd34",
        {"lock": "", "made": '{"namespaces": [], "groups": []}', "weights.pt": "x"},
    ),
}


@pytest.mark.parametrize("what", NOT_OURS)
def test_a_users_own_folder_is_never_removed(home: Path, what: str) -> None:
    name, files = NOT_OURS[what]
    (home / name).mkdir(mode=0o700)
    for file, text in files.items():
        (home / name / file).write_text(text)
    run_once()
    assert {path.name: path.read_text() for path in (home / name).iterdir()} == files


def test_a_copy_of_an_abandoned_folder_is_the_users_own(home: Path) -> None:
    folder = abandoned(home)
    for name in ("podium-backup", "podium-zzzzzzzz"):
        shutil.copytree(folder, home / name)
    run_once()
    assert not folder.exists()
    assert (home / "podium-backup" / "socket").exists() and (home / "podium-zzzzzzzz" / "socket").exists()


def test_an_abandoned_folder_that_the_user_opened_to_others_is_left_alone(home: Path) -> None:
    folder = abandoned(home)
    folder.chmod(0o755)
    run_once()
    assert folder.is_dir()


def test_a_link_to_an_abandoned_folder_is_not_followed(home: Path, tmp_path: Path) -> None:
    folder = abandoned(home)
    elsewhere = folder.rename(tmp_path / "elsewhere")
    (home / folder.name).symlink_to(elsewhere)
    run_once()
    assert (elsewhere / "socket").exists() and (home / folder.name).is_symlink()


def test_a_lock_that_is_a_link_is_not_followed(home: Path) -> None:
    folder = abandoned(home)
    (folder / "lock").rename(home / "kept")
    (folder / "lock").symlink_to(home / "kept")
    run_once()
    assert (folder / "socket").exists()


def test_what_lies_behind_a_link_in_an_abandoned_folder_is_left_alone(home: Path) -> None:
    folder = abandoned(home)
    (home / "precious").mkdir()
    (home / "precious" / "file").touch()
    (folder / "link").symlink_to(home / "precious")
    run_once()
    assert not folder.exists() and (home / "precious" / "file").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give a folder to another user")
def test_the_folder_of_another_user_is_left_alone(home: Path) -> None:
    folder = abandoned(home)
    os.chown(folder, 65534, 65534)
    run_once()
    assert folder.is_dir()


def test_a_note_can_only_name_what_podium_makes(home: Path) -> None:
    """A damaged note must not have other groups or namespaces removed."""
    folder = abandoned(home)
    (home / "group").mkdir()
    (folder / "made").write_text(json.dumps({"namespaces": ["-all"], "groups": [str(home / "group")]}))
    run_once()
    assert (home / "group").is_dir()


def test_a_folder_that_someone_still_holds_is_left_alone(home: Path) -> None:
    folder = abandoned(home)
    with (folder / "lock").open("r+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        run_once()
        assert (folder / "socket").exists()
    run_once()
    assert not folder.exists()
