"""Real processes and real signals. Every test must leave the machine as it found it."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from multiprocessing.util import get_temp_dir
from pathlib import Path

import pytest

from tests.integration import leftovers


@pytest.fixture(scope="session", autouse=True)
def own_temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A temporary folder of this session's own, since others may use Podium on this machine at the same time."""
    tmp_path_factory.getbasetemp(), get_temp_dir()  # what outlives this fixture is to lie elsewhere
    folder = Path(tempfile.mkdtemp(prefix="it-", dir="/tmp"))  # short, as Unix socket paths must be
    before = {name: os.environ.get(name) for name in ("TMPDIR", leftovers.MARK, "OMP_NUM_THREADS")}
    os.environ.update({"TMPDIR": str(folder), leftovers.MARK: folder.name, "OMP_NUM_THREADS": "1"})
    tempfile.tempdir = None  # look it up again
    yield folder
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value
    tempfile.tempdir = None
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def nothing_is_left_behind(own_temporary_folder: Path) -> Iterator[None]:
    before = leftovers.namespaces() | leftovers.control_groups()
    yield
    until = time.monotonic() + 10.0
    while left := found(own_temporary_folder, before):
        assert time.monotonic() < until, f"left behind: {left}"
        time.sleep(0.05)


def found(folder: Path, before: set[str]) -> list[str]:
    new = (leftovers.namespaces() | leftovers.control_groups()) - before
    return [*leftovers.processes(), *map(str, folder.glob("podium-*")), *sorted(new)]
