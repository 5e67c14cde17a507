"""Folders that the head offers to agents: the user's code, the checkpoint to resume from, small data sets.

A tree lists files with their sizes and SHA-256. An agent fetches the files that it does not have, chunk by chunk, into
a folder named by the tree's digest, so that the same tree is fetched once per host. What is sent is bytes of files;
nothing of it is unpickled.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import secrets
import shutil
import time
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from podium.errors import ConfigError, DataError
from podium.launch.blobs import CHUNK_BYTES

_PARTIAL = ".partial-"
_ABANDONED_S = 3600.0
_TRIES = 3

Ask = Callable[[str, str, int], bytes]
"""(tree, file, offset) to the bytes from there on, at most a chunk."""


class File(NamedTuple):
    """One file of a tree."""

    size: int
    sha256: str


class Tree(NamedTuple):
    """Files by their paths, relative to the tree's root, with `/`."""

    name: str
    files: dict[str, File]

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.files, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def nbytes(self) -> int:
        return sum(file.size for file in self.files.values())

    def to_json(self) -> bytes:
        return json.dumps({"name": self.name, "files": self.files}).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Tree:
        """From the head: no path may lead out of the folder."""
        found = json.loads(data)
        files = {str(path): File(int(size), str(digest)) for path, (size, digest) in found["files"].items()}
        for path in files:
            parts = PurePosixPath(path).parts
            if not parts or path.startswith("/") or ".." in parts or "\0" in path:
                raise ConfigError(f"the head must name files below one folder, got {path[:80]!r}")
        return cls(str(found["name"]), files)


class Offer(NamedTuple):
    """A tree of the head's, and where it lies."""

    tree: Tree
    root: Path

    @classmethod
    def of(cls, name: str, root: Path, paths: Iterable[Path]) -> Offer:
        files = {path.relative_to(root).as_posix(): _describe(path) for path in sorted(paths)}
        return cls(Tree(name, files), root)

    def chunk(self, path: str, offset: int) -> bytes:
        if path not in self.tree.files:
            raise ConfigError(f"the tree {self.tree.name} has no file {path[:80]!r}")
        with (self.root / path).open("rb") as file:
            file.seek(offset)
            return file.read(CHUNK_BYTES)


def all_files(folder: Path) -> list[Path]:
    """The files below a folder; links to files count as files."""
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def fetch(tree: Tree, into: Path, ask: Ask) -> Path:
    """The tree's folder on this host, below `into`; fetched unless it is there already, and verified.

    Other processes may fetch the same tree at the same time, on this host or on another one that has the same home: the
    first to finish wins, and nobody removes what another one uses.
    """
    target = into / f"{tree.name}-{tree.digest}"
    if _is_whole(target, tree):
        return target
    partial = into / f"{_PARTIAL}{secrets.token_hex(8)}"
    try:
        into.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(into)
        for path, file in tree.files.items():
            _fetch_file(tree.name, path, file, partial / path, ask)
        partial.mkdir(exist_ok=True)  # a tree without files
        _put(partial, target, tree)
    except OSError as error:
        raise DataError(
            f"{target}: cannot be written: {error.strerror or error}; XDG_CACHE_HOME and TMPDIR name other folders"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return target


def _put(partial: Path, target: Path, tree: Tree) -> None:
    """Give a whole tree its name, unless another process has done so meanwhile."""
    damaged = partial.with_name(f"{partial.name}-damaged")
    try:
        for _ in range(_TRIES):
            found = _inode(target)
            if _is_whole(target, tree):
                return
            if found is not None and _inode(target) == found:  # and not what another process has put there meanwhile
                with contextlib.suppress(FileNotFoundError):
                    target.replace(damaged)
            try:
                partial.replace(target)
                return
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):  # another process was faster
                    raise
        raise DataError(f"{target}: other processes keep putting damaged copies there")
    finally:
        shutil.rmtree(damaged, ignore_errors=True)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _remove_abandoned(folder: Path) -> None:
    """Remove what a process that was killed has fetched in part."""
    for path in folder.glob(f"{_PARTIAL}*"):
        with contextlib.suppress(OSError):
            newest = max(p.stat().st_mtime for p in (path, *path.rglob("*")))
            if time.time() - newest > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _fetch_file(tree: str, path: str, file: File, target: Path, ask: Ask) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    sum_ = hashlib.sha256()
    with target.open("wb") as out:
        while out.tell() < file.size:
            chunk = ask(tree, path, out.tell())
            if not chunk:
                raise DataError(f"{path} ended after {out.tell()} of {file.size} bytes on the launcher's host")
            out.write(chunk)
            sum_.update(chunk)
    if sum_.hexdigest() != file.sha256:
        raise DataError(f"{path} has changed on the launcher's host while it was copied")


def _is_whole(folder: Path, tree: Tree) -> bool:
    if not folder.is_dir():
        return False
    return all((folder / path).is_file() and _describe(folder / path) == file for path, file in tree.files.items())


def _describe(path: Path) -> File:
    return File(path.stat().st_size, digest_of(path))


def digest_of(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
