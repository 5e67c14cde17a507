"""Where the processes of a run find each other's sockets: a private folder with a short name.

Its owner holds a lock on a file in it for as long as it lives. A folder whose lock is free was left by a launcher that
was killed; the next launcher removes it, with the namespaces and control groups that are listed in it.

A run may last longer than temporary files do. systemd-tmpfiles leaves a locked folder alone, so the folder itself is
locked, too. What another cleaner removes is made again: each endpoint checks every second that its socket still has its
name (`podium/comm/real/listener.py`), and each generation makes the store's file again where it is missing
(`podium/comm/real/process_group.py`). Abstract sockets need no file, but do not cross network namespaces, and any user
of the machine could connect to them.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from podium.errors import ConfigError
from podium.launch.clusters.commands import find_tool, run_command

_PREFIX = "podium-"
_NAME = re.compile(r"podium-[a-z0-9_]{8}")
"""Names of folders, those of earlier versions too."""
_MADE_BY = "podium-rendezvous-1"
_LOCK = "lock"
_NOTE = "made"
_LONGEST_LOCK = 4096
_NAMESPACE = re.compile(r"podium-[0-9a-f]{6}-(hub|[0-9]+)")
_GROUP = re.compile(r"podium-[0-9a-f]{6}-[0-9]+")


@contextmanager
def rendezvous_folder() -> Iterator[Path]:
    """A folder that only this user can enter, removed afterwards. Its name is short, as Unix socket paths must be."""
    home = Path(tempfile.gettempdir())
    _remove_abandoned(home)
    hidden = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=home))
    lock = os.open(hidden / _LOCK, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        hold = os.open(hidden, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(hold, fcntl.LOCK_SH)
        os.write(lock, json.dumps(_proof(hidden.stat())).encode())
        # Renamed only once it is locked, to a new random name: a process that watches the temporary folder has seen
        # the hidden name, and could have taken a name derived from it.
        folder = hidden.rename(home / f"{_PREFIX}{secrets.token_hex(4)}")
        try:
            yield folder
        finally:
            os.close(hold)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def note_what_is_made(folder: Path, namespaces: Iterable[str] = (), groups: Iterable[Path] = ()) -> None:
    """List what is about to be made, so that the next launcher can remove it if this process is killed."""
    path = folder / _NOTE
    before = json.loads(path.read_text()) if path.is_file() else {"namespaces": [], "groups": []}
    noted = {
        "namespaces": [*before["namespaces"], *namespaces],
        "groups": [*before["groups"], *map(str, groups)],
    }
    path.write_text(json.dumps(noted))


def is_private(found: os.stat_result, kind: int, mode: int) -> bool:
    """Whether this is a folder or file (`kind` of `stat`) of this user, with exactly these permissions."""
    return stat.S_IFMT(found.st_mode) == kind and found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == mode


def _proof(folder: os.stat_result) -> dict[str, Any]:
    """Content of the lock file: it identifies its folder."""
    return {"made_by": _MADE_BY, "device": folder.st_dev, "inode": folder.st_ino}


def _remove_abandoned(home: Path) -> None:
    for folder in home.glob(f"{_PREFIX}*"):
        if _NAME.fullmatch(folder.name):
            with contextlib.suppress(OSError, ValueError, ConfigError):  # locked, just removed, or damaged
                _remove_if_abandoned(folder)


def _remove_if_abandoned(folder: Path) -> None:
    found = folder.lstat()  # other users may put anything into a shared folder; a link is not followed
    if not is_private(found, stat.S_IFDIR, 0o700):
        return
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not is_private(os.fstat(lock), stat.S_IFREG, 0o600):
            return
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if json.loads(os.read(lock, _LONGEST_LOCK)) != _proof(found):
            return
        if (folder / _NOTE).is_file():
            _remove_noted(json.loads((folder / _NOTE).read_text()))
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _remove_noted(note: dict[str, list[str]]) -> None:
    """Remove namespaces and groups whose names are Podium's."""
    for name in filter(_NAMESPACE.fullmatch, note["namespaces"]):
        with contextlib.suppress(ConfigError):  # the killed launcher may have removed some
            run_command(find_tool("ip"), "netns", "delete", name)
    for group in map(Path, note["groups"]):
        if _GROUP.fullmatch(group.name) and (group / "cgroup.procs").is_file():
            with contextlib.suppress(OSError):
                group.rmdir()
