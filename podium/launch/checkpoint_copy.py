"""The checkpoint that a run resumes from, copied to hosts that do not have it.

Only the first host needs to have the checkpoint. A rank elsewhere asks the coordinator for its files before the rank
joins, chunk by chunk, into its own run folder; one process per host does. The copy is verified like any checkpoint.
"""

from __future__ import annotations

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from podium.comm.base import Meta
from podium.engine.checkpoint import FACTS, find_checkpoint
from podium.errors import CheckpointError

CHUNK_BYTES = 8 << 20
_POLL_S = 0.05

Ask = Callable[[str, int], bytes]
"""(file, offset) to the bytes from there on, at most a chunk; empty at the end of the file."""


class CheckpointFiles(NamedTuple):
    """The files of one checkpoint."""

    name: str
    sizes: dict[str, int]
    sha256: str
    """Of its facts, which have the checksums of all files."""

    @classmethod
    def at(cls, folder: Path) -> CheckpointFiles:
        sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir()) if path.is_file()}
        return cls(folder.name, sizes, hashlib.sha256((folder / FACTS).read_bytes()).hexdigest())

    @classmethod
    def from_meta(cls, meta: Meta) -> CheckpointFiles:
        """From another host: a name is one part of a path, and never leads out of a folder."""
        sizes = {str(name): int(size) for name, size in meta["sizes"].items()}
        found = cls(str(meta["name"]), sizes, str(meta["sha256"]))
        for name in (found.name, *found.sizes):
            if name in ("", ".", "..") or Path(name).name != name:
                raise CheckpointError(f"the coordinator must name files of one folder, got {name[:80]!r}")
        return found


def read_chunk(folder: Path, name: str, offset: int) -> bytes:
    """A part of one of the folder's files."""
    if name not in CheckpointFiles.at(folder).sizes:
        raise CheckpointError(f"{folder}: has no file {name[:80]!r}")
    with (folder / name).open("rb") as file:
        file.seek(offset)
        return file.read(CHUNK_BYTES)


def find_or_copy(resume: Path, files: CheckpointFiles, into: Path, ask: Ask, *, first: bool, limit_s: float) -> Path:
    """The checkpoint's folder on this host: `resume` names the same one, or it is copied to `into`.

    The `first` process of a host copies; the others wait for the copy, at most `limit_s`.
    """
    own = _same(resume, files)
    if own is not None:
        return own
    target = into / files.name
    if first:
        _copy(files, target, ask)
    else:
        until = time.monotonic() + limit_s
        while not target.exists():
            if time.monotonic() > until:
                raise CheckpointError(f"{target}: was not copied from the first host within {limit_s:g} s")
            time.sleep(_POLL_S)
    return target


def _same(resume: Path, files: CheckpointFiles) -> Path | None:
    """The folder here that holds the same checkpoint, if there is one."""
    try:
        found = find_checkpoint(resume).path
    except CheckpointError:
        return None
    return found if CheckpointFiles.at(found) == files else None


def _copy(files: CheckpointFiles, target: Path, ask: Ask) -> None:
    fetch(files, partial_of(target), ask)
    try:
        partial_of(target).rename(target)
    except OSError as error:
        raise CheckpointError(f"{target}: the checkpoint cannot be copied from the first host: {error}") from error


def partial_of(target: Path) -> Path:
    """Where a copy is before it is whole."""
    return target.with_name(f"{target.name}.partial")


def fetch(files: CheckpointFiles, into: Path, ask: Ask) -> None:
    """Get the files from the first host into a folder, which is emptied before."""
    shutil.rmtree(into, ignore_errors=True)
    try:
        into.mkdir(parents=True)
        for name, size in files.sizes.items():
            with (into / name).open("wb") as file:
                while file.tell() < size:
                    chunk = ask(name, file.tell())
                    if not chunk:
                        raise CheckpointError(f"{name}: ended after {file.tell()} of {size} bytes on the first host")
                    file.write(chunk)
    except OSError as error:
        raise CheckpointError(f"{into}: the checkpoint cannot be copied from the first host: {error}") from error
