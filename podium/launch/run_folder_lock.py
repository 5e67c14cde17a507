"""A run's folder belongs to one run: from before its manifest is written until its result is.

A lock (`flock`) on a file in the folder, which the kernel lets go of however the launcher ends. The launcher that has
it and finds no manifest is the first. The file is removed at the end of the run; one that a killed launcher left means
nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.errors import ConfigError, RecordError, as_request

_LOCK = ".lock"


@contextmanager
def claimed(run_dir: Path) -> Iterator[None]:
    """Make the folder this run's own; raises ConfigError where another run is in it, or was."""
    with as_request():
        try:
            lock = _lock(run_dir)
        except OSError as error:
            raise RecordError(f"{run_dir} cannot be written: {error.strerror or error}") from error
    try:
        refuse_taken(run_dir)
        yield
    finally:
        (run_dir / _LOCK).unlink(missing_ok=True)
        os.close(lock)


def refuse_taken(run_dir: Path) -> None:
    """Two runs' records in one folder would be summed up as one run."""
    if (run_dir / "manifest.json").exists():
        raise ConfigError(
            f"run_dir must be a folder without a run, got {run_dir}, which has a manifest.json: name a fresh one; "
            f"to go on from the run in {run_dir}, add --resume {run_dir}"
        )


def _lock(run_dir: Path) -> int:
    path = run_dir / _LOCK
    while True:
        run_dir.mkdir(parents=True, exist_ok=True)
        # A link in a folder that somebody else made may lead to a file of the user's, which would be emptied here.
        lock = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        try:
            _hold(lock, run_dir)
            if _is_at(lock, path):  # otherwise its holder has just ended and removed it
                return lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _hold(lock: int, run_dir: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(lock, 200, 0).decode(errors="replace").strip() or "another process"
        raise ConfigError(
            f"run_dir must be a folder without a run, got {run_dir}, where a run is under way ({holder}): name a fresh "
            "one"
        ) from None
    except OSError as error:
        if error.errno not in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            raise
        return  # a file system without locks: only the manifest tells of another run
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"process {os.getpid()} on {platform.node()}\n".encode(), 0)


def _is_at(file: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), path.stat())
    except FileNotFoundError:
        return False
