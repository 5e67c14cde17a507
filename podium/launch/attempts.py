"""Earlier starts of the same ranks: torchrun starts them again, and each start continues the one before it.

torchrun starts all ranks again when one has failed and when hosts join or leave. Their number may then be another, and
rank 0 may be on another host. Each start has a run folder of its own, `RUN`, `RUN-2`, `RUN-3`, and resumes from the
newest whole checkpoint of those before it.

On every host, a file in the run's folder names the torchrun agent that started it there. It stands for this one agent:
another torchrun, with the same job id or not, begins a run of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from pathlib import Path
from typing import final

from podium.config import RunConfig
from podium.engine.checkpoint import Checkpoint, find_checkpoint
from podium.errors import CheckpointError, ConfigError
from podium.launch.rendezvous import is_private

COPIED = "resumed"
"""The folder of a run's folder with the checkpoint that it began with, where that was copied from another host."""
_MARK = ".torchrun-"


@final
class Attempts:
    """The folders that earlier starts by this host's agent used, in order."""

    def __init__(self, home: Path, agent: str | None) -> None:
        """`home`: where the folders are; `agent`: what tells it from others, None where nothing starts ranks again."""
        self._home = home
        self._mark = None if agent is None else _MARK + hashlib.sha256(agent.encode()).hexdigest()[:16]
        marks = [] if self._mark is None else home.glob(f"*/{self._mark}")
        numbered = sorted((number, mark.parent) for mark in marks if (number := _number_in(mark)) is not None)
        self.folders = [folder for _, folder in numbered]

    @classmethod
    def of(cls, config: RunConfig) -> Attempts:
        """Those of the torchrun agent that started this process."""
        home = Path(config.out) if config.run_dir is None else Path(config.run_dir).parent
        return cls(home, _agent())

    @property
    def first(self) -> str | None:
        """The name of the folder of the first start."""
        return self.folders[0].name if self.folders else None

    def newest(self) -> Checkpoint | None:
        """The newest whole checkpoint that this host has of them."""
        found: list[Checkpoint] = []
        for folder in self.folders:
            for path in (folder, *folder.glob(f"{COPIED}/step-????????")):
                with contextlib.suppress(CheckpointError):
                    found.append(find_checkpoint(path))
        return max(found, key=lambda checkpoint: checkpoint.step, default=None)

    def next_folder(self, first: str) -> Path:
        """The folder of the next start of a run whose first start used the folder of this name."""
        number = 2
        while (found := self._home / f"{first}-{number}").exists():
            number += 1
        return found

    def add(self, run_dir: Path) -> None:
        """This start uses this folder. One process per host calls this."""
        self.folders.append(run_dir)
        if self._mark is None:
            return
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            file = os.open(run_dir / self._mark, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            with os.fdopen(file, "w") as text:
                text.write(f"{len(self.folders)}\n")
                text.flush()
                os.fsync(text.fileno())
        except OSError as error:
            raise ConfigError(f"{run_dir / self._mark} cannot be written: {error.strerror or error}") from error


def may_be_started_again() -> bool:
    """Whether torchrun started this process: it may do so again, if only because a host joins."""
    return _agent() is not None


def restarts_allowed() -> bool:
    """Whether torchrun starts the ranks again when one fails (`--max-restarts`)."""
    return may_be_started_again() and os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0"


def _agent() -> str | None:
    """What tells the torchrun agent that started this process from all others; None where it was none.

    The agent's folder for logs has a random name, and stays the same when it starts its processes again. With
    `--log-dir /dev/null` there is none, and the agent is the parent process, which began at a certain time.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return None
    error_file = os.environ.get("TORCHELASTIC_ERROR_FILE", "")
    if error_file:
        return str(Path(error_file).parents[2])  # FOLDER/attempt_0/0/error.json
    parent = os.getppid()
    began = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    return f"process {parent}, begun at {began}"


def _number_in(mark: Path) -> int | None:
    """Which start wrote this file; None where it was another user, or the power failed meanwhile."""
    with contextlib.suppress(OSError, ValueError):
        if is_private(mark.lstat(), stat.S_IFREG, 0o600):
            return int(mark.read_text())
    return None
