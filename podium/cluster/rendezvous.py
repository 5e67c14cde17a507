"""Where the processes of a run find each other's sockets: a private folder with a short name.

Its owner holds a lock in it for as long as it lives. A folder without a holder was left by a launcher that was killed;
whoever makes the next one removes it, with the namespaces and control groups that are noted in it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.errors import ConfigError

_PREFIX = "podium-"
_LOCK = "lock"
_NOTE = "made"


@contextmanager
def rendezvous_folder() -> Iterator[Path]:
    """A folder that only this user can enter, removed afterwards. Its name is short, as Unix socket paths must be."""
    home = Path(tempfile.gettempdir())
    _remove_abandoned(home)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=home))
    lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = hidden.rename(home / hidden.name.removeprefix("."))  # seen by others only once it is held
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def note_what_was_made(folder: Path, namespaces: Iterable[str], groups: Iterable[Path]) -> None:
    """Write down what is to be removed, should this process be killed before it can do so itself."""
    (folder / _NOTE).write_text(json.dumps({"namespaces": list(namespaces), "groups": list(map(str, groups))}))


def _remove_abandoned(home: Path) -> None:
    for folder in home.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ValueError, ConfigError):  # held, or gone in this moment, or damaged
            if _is_ours(folder):
                _remove_unless_held(folder)


def _is_ours(folder: Path) -> bool:
    """Others may put what they like into a shared folder; it is not followed."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()


def _remove_unless_held(folder: Path) -> None:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if (folder / _NOTE).is_file():
            _remove_noted(json.loads((folder / _NOTE).read_text()))
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_noted(note: dict[str, list[str]]) -> None:
    from podium.cluster.netns import find_tool, run_command

    for name in note["namespaces"]:
        with contextlib.suppress(ConfigError):  # it had got as far as removing some
            run_command(find_tool("ip"), "netns", "delete", name)
    for group in note["groups"]:
        with contextlib.suppress(OSError):
            Path(group).rmdir()
