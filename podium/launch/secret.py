"""The run's secret: made here, or given by the user, never empty.

A launcher that starts its ranks itself makes 32 random bytes and passes them to its children. Under torchrun there is
no such launcher, and torch's store, over which the ranks meet, is open to anyone who reaches its port. So:

- All ranks on one host: rank 0 makes the secret and leaves it in a file that only this user can read, in a folder that
  only this user can enter. The store holds the name of the folder, and nothing that a stranger could use or forge.
- Ranks on several hosts: the user gives all of them the same secret, in PODIUM_SECRET or in a file.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import secrets
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from podium.errors import ConfigError
from podium.launch.rendezvous import is_private

LEAST_BYTES = 16
"""Shortest secret. 16 random letters and digits have 95 bits, too many to try; 8 have 47, which is feasible."""
VARIABLE, FILE_VARIABLE = "PODIUM_SECRET", "PODIUM_SECRET_FILE"
_FILE = "secret"
_LONGEST_FILE = 4096
_FOLDER = re.compile(r"podium-[a-z0-9_]{8}")
# 16 MiB and about 60 ms per guess, once per process: a phrase is easier to guess than random bytes of its length.
_SCRYPT = {"n": 1 << 14, "r": 8, "p": 1, "maxmem": 64 << 20, "dklen": 32}
_CLEAN_S = 5.0


def check_secret(secret: bytes, where: str) -> bytes:
    """The secret; raises where it is too short."""
    if len(secret) < LEAST_BYTES:
        raise ConfigError(
            f"{where}: a secret must have at least {LEAST_BYTES} bytes, since shorter ones can be guessed; "
            f"got {len(secret)}. A good one: python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return secret


def given_secret() -> bytes | None:
    """The user's secret in PODIUM_SECRET or in the file that PODIUM_SECRET_FILE names, stretched; None: not set."""
    text, path = os.environ.get(VARIABLE), os.environ.get(FILE_VARIABLE)
    if text is not None and path is not None:
        raise ConfigError(f"set {VARIABLE} or {FILE_VARIABLE}, not both")
    if text is not None:
        return _stretched(check_secret(os.fsencode(text), VARIABLE))
    if path is not None:
        return _stretched(check_secret(_read_file(Path(path)), path))
    return None


def need_secret() -> bytes:
    """The user's secret; raises, with instructions, where there is none."""
    found = given_secret()
    if found is None:
        raise ConfigError(
            f"ranks on several hosts need a secret, and there is none: set {VARIABLE} to the same words on all hosts, "
            f"or {FILE_VARIABLE} to a file of yours that holds them (mode 0600). Without one, anyone who reaches a "
            "rank's port could read and overwrite the model. To make one: "
            "python3 -c 'import secrets; print(secrets.token_hex(32))'"
        )
    return found


@functools.cache
def _stretched(secret: bytes) -> bytes:
    """A key that costs time and memory for each guess at the secret."""
    return hashlib.scrypt(secret, salt=b"podium run secret 1", **_SCRYPT)


def _read_file(path: Path) -> bytes:
    """The secret in a file; raises where other users may read it."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise ConfigError(f"{FILE_VARIABLE}: {path} cannot be read: {error.strerror}") from error
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid not in (os.geteuid(), 0) or found.st_mode & 0o077:
            raise ConfigError(
                f"{FILE_VARIABLE}: {path} must be a file of yours that nobody else can read (chmod 600), "
                f"got {stat.filemode(found.st_mode)} of user {found.st_uid}"
            )
        return os.read(file, _LONGEST_FILE).strip()
    finally:
        os.close(file)


# All ranks on one host.


def leave_secret(folder: Path, run: str) -> bytes:
    """Rank 0: choose the secret of `run` and leave it in the private folder, for the other ranks of this host."""
    given = given_secret()
    secret = given or secrets.token_bytes(32)
    file = os.open(folder / _FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(file, "w", encoding="utf-8") as text:
        json.dump({"run": run, "secret": None if given else secret.hex()}, text)
    return secret


def find_secret(name: str, run: str) -> tuple[Path, bytes]:
    """The other ranks: the private folder of this name, and the secret in it.

    The name comes from a store that anyone may write to. So the folder must lie directly in this process's temporary
    folder, belong to this user, be closed to all other users, and belong to this run.
    """
    if not _FOLDER.fullmatch(name):
        raise _tampered(f"the name of the run's folder must be podium-…, got {name[:40]!r}")
    folder = Path(tempfile.gettempdir()) / name
    try:
        inside = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _tampered(f"{folder} cannot be opened here: {error.strerror}") from error
    try:
        if not is_private(os.fstat(inside), stat.S_IFDIR, 0o700):
            raise _tampered(f"{folder} must be a folder of user {os.geteuid()} that nobody else can enter")
        found = _read_left(folder, inside)
    finally:
        os.close(inside)
    if found.get("run") != run:
        raise _tampered(f"{folder} is of another run: {str(found.get('run'))[:80]!r}, and this one is {run!r}")
    left = found.get("secret")
    secret = given_secret() if left is None else bytes.fromhex(left)
    if secret is None:
        raise ConfigError(f"rank 0 was given {VARIABLE}, and this rank was not: set it for all ranks or for none")
    return folder, check_secret(secret, str(folder / _FILE))


def _read_left(folder: Path, inside: int) -> dict[str, str | None]:
    try:
        file = os.open(_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, dir_fd=inside)
    except OSError as error:
        raise _tampered(f"{folder / _FILE} cannot be opened: {error.strerror}") from error
    try:
        if not is_private(os.fstat(file), stat.S_IFREG, 0o600):
            raise _tampered(f"{folder / _FILE} must be a file of user {os.geteuid()} that nobody else can read")
        found = json.loads(os.read(file, _LONGEST_FILE))
        if not isinstance(found, dict):
            raise ValueError("not an object")
        return found
    except ValueError as error:
        raise _tampered(f"{folder / _FILE} is damaged: {error}") from error
    finally:
        os.close(file)


def _tampered(what: str) -> ConfigError:
    return ConfigError(
        f"the run's private folder is not to be trusted: {what}. Its name came over torch's store (MASTER_ADDR and "
        f"MASTER_PORT), which anyone who reaches that port may write to. If ranks are on several hosts, or each has "
        f"its own /tmp, set {VARIABLE} and give them torchrun's LOCAL_WORLD_SIZE"
    )


@contextmanager
def removed_with_this_process(folder: Path) -> Iterator[None]:
    """Have the folder removed even if this process is killed, which is how torchrun ends ranks.

    A shell waits for the end of a pipe, which comes when this process ends for any reason. It then waits a second, so
    that the other ranks notice and end: a rank that is alive makes its socket's folder again.
    """
    words = ("/bin/sh", "-c", 'read -r _ || sleep 1; rm -rf -- "$0"', str(folder))
    quiet = subprocess.DEVNULL
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True) as waiting:
        try:
            yield
        finally:
            assert waiting.stdin is not None
            waiting.stdin.write(b"\n")
            waiting.stdin.close()
            waiting.wait(timeout=_CLEAN_S)
