"""Files that survive a kill: written completely or not at all, and journals whose torn last line is removed.

A file is written beside its target and renamed over it, so a reader sees the old file or the new one, never a part.
`durable` also survives a power failure: file and folder are flushed to disk before the call returns.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from podium.errors import PodiumError, RecordError

_BLOCK_BYTES = 1 << 20


def write_atomically(
    path: Path, data: bytes | str, *, durable: bool = False, error: type[PodiumError] = RecordError
) -> None:
    """Write a file, making its folders; raises `error` where the disk cannot be written."""
    with replacing(path, durable=durable, error=error) as partial:
        partial.write_bytes(data.encode() if isinstance(data, str) else data)


@contextlib.contextmanager
def replacing(path: Path, *, durable: bool = False, error: type[PodiumError] = RecordError) -> Iterator[Path]:
    """The path of a file to write inside the block; at the end of the block it replaces `path`."""
    partial = path.with_name(path.name + ".partial")
    try:
        make_folder(path.parent) if durable else path.parent.mkdir(parents=True, exist_ok=True)
        try:
            yield partial
            if durable:
                _sync(partial, os.O_RDONLY)
            partial.replace(path)
            if durable:
                sync_folder(path.parent)
        except BaseException:
            with contextlib.suppress(OSError):  # do not leave half a file on a full disk
                partial.unlink(missing_ok=True)
            raise
    except OSError as cause:
        raise error(f"{path} cannot be written: {cause.strerror or cause}") from cause


def make_folder(path: Path) -> None:
    """Make a folder and its parents, each flushed to disk before this returns. An existing folder is left alone."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


def sync_file(path: Path) -> None:
    """Flush a file's bytes, which may otherwise be gone after a power failure."""
    _sync(path, os.O_RDONLY)


def sync_folder(path: Path) -> None:
    """Flush a folder's entries: otherwise a file that was renamed into it may be gone after a power failure."""
    try:
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that cannot flush folders
            raise


def _sync(path: Path, flags: int) -> None:
    file = os.open(path, flags | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def mend_last_line(path: Path) -> None:
    """Cut off a torn last line; add the newline to a complete one that lacks only that."""
    if not path.is_file():
        return
    with path.open("r+b") as file:
        start, tail = _after_last_newline(file)
        if not tail:
            return
        if _is_json(tail):
            file.seek(0, os.SEEK_END)
            file.write(b"\n")
        else:
            file.truncate(start)


def _after_last_newline(file: BinaryIO) -> tuple[int, bytes]:
    """The offset and text of an unterminated last line; reads from the end, since a journal may be large."""
    start, tail = file.seek(0, os.SEEK_END), b""
    while start and b"\n" not in tail:
        size = min(start, _BLOCK_BYTES if tail else 1)  # nearly always the last byte is a newline
        start = file.seek(start - size)
        tail = file.read(size) + tail
    kept = tail.rfind(b"\n") + 1
    return start + kept, tail[kept:]


def _is_json(text: bytes) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
