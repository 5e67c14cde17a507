"""One sweep at a time in a folder.

A lock of the POSIX kind on a file in the folder: it goes with the process that took it, however that ends, and is not
inherited by processes that a task forks. The file stays and means nothing by itself. Such a lock keeps out other
processes only, and is lost when its own opens and closes the file once more, so this process keeps a list besides.
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

_HOLDING = Lock()
_HELD_HERE: set[Path] = set()


@contextlib.contextmanager
def held(folder: Path) -> Iterator[None]:
    """Nobody else sweeps in this folder meanwhile; it is made where there is none."""
    path = folder / "lock"
    with _HOLDING:
        if (key := folder.resolve()) in _HELD_HERE:
            raise _taken(folder, "this process")
        _HELD_HERE.add(key)
    try:
        with as_request():
            try:
                folder.mkdir(parents=True, exist_ok=True)
                lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            except OSError as error:
                raise RecordError(f"{path} cannot be written: {error.strerror or error}") from error
        try:
            _hold(lock, folder)
            yield
        finally:
            os.close(lock)
    finally:
        with _HOLDING:
            _HELD_HERE.discard(key)


def _taken(folder: Path, holder: str) -> ConfigError:
    return ConfigError(
        f"sweep: another one must not be at work in {folder}, got one ({holder}); wait until it has ended, or give "
        "another folder"
    )


def _hold(lock: int, folder: Path) -> None:
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # the two that POSIX allows
        raise _taken(folder, os.pread(lock, 200, 0).decode(errors="replace").strip() or "unknown") from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise RecordError(f"{folder / 'lock'} cannot be locked: {error.strerror or error}") from error
        return  # a file system without locks: nothing can be known of others
    os.truncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)
