"""One run, sweep or study at a time in a folder.

A POSIX lock on the folder's `.lock`: the kernel releases it however the process ends, and processes that a task forks
do not inherit it. Such a lock excludes other processes only, so a set excludes other threads of this process. The file
is removed at the end; one that a killed process left is not a lock.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from pathlib import Path
from threading import Lock

from podium.errors import ConfigError, RecordError, as_request

_LOCK = ".lock"
_LISTING = Lock()
_LOCKED_HERE: set[Path] = set()


@contextlib.contextmanager
def folder_lock(folder: Path, what: str) -> Iterator[None]:
    """Keep other processes and threads out of a folder, which is made if it is missing.

    Raises ConfigError where the folder is locked; `what` is "run", "sweep" or "study", for the message.
    """
    with _listed(folder, what):
        with as_request():
            try:
                lock = _lock(folder, what)
            except OSError as error:
                raise RecordError(f"{folder / _LOCK} cannot be written: {error.strerror or error}") from error
        try:
            yield
        finally:
            (folder / _LOCK).unlink(missing_ok=True)
            os.close(lock)


@contextlib.contextmanager
def _listed(folder: Path, what: str) -> Iterator[None]:
    key = folder.resolve()
    with _LISTING:
        if key in _LOCKED_HERE:
            raise _taken(folder, what, "this process")
        _LOCKED_HERE.add(key)
    try:
        yield
    finally:
        with _LISTING:
            _LOCKED_HERE.discard(key)


def _lock(folder: Path, what: str) -> int:
    path = folder / _LOCK
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # No symbolic links: in another user's folder one may lead to a file of this user, which would be emptied here.
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        try:
            _acquire(lock, folder, what)
            if _is_at(lock, path):  # otherwise its holder has just ended and removed the file
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _acquire(lock: int, folder: Path, what: str) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the two that POSIX allows
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        raise _taken(folder, what, holder) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return  # a file system without locks: other processes cannot be detected
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)


def _taken(folder: Path, what: str, holder: str) -> ConfigError:
    return ConfigError(
        f"{folder}: another {what} must not be under way there, got one ({holder}); wait for it to end, or name "
        "another folder"
    )


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
